"""``pipeproof reshard``: a checkpoint for another topology, as one file, or under other names; first the proof."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.complete import PLACE, PlanFile, complete_convention
from pipeproof.commands.line import refusing_bad_plans, writable
from pipeproof.commands.reshard_asked import FILE, Asked, is_plan, require_sense
from pipeproof.commands.reshard_shown import Outcome, draw, show_findings, show_outcome, showing_progress
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import BadPlanError, Finding, PipeproofError, Severity

if TYPE_CHECKING:
    from pipeproof.comm.lowered import LoweredPlan
    from pipeproof.commands.check import Form
    from pipeproof.state.checkpoint import Checkpoint
    from pipeproof.state.mapping import StateMap
    from pipeproof.state.reshard.goals import Goal
    from pipeproof.state.reshard.sides import Side

_MOST_JOBS = 16


def _svg_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a picture of another form, or one that cannot be written, before any work is done."""
    if value is not None and value.suffix.lower() != ".svg":
        raise click.BadParameter(f"{str(value)!r}: the picture is a file that ends with .svg")
    return writable(context, parameter, value)


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target_plan", type=PlanFile(), required=False)
@click.option("--to", "to_plan", type=PlanFile(), metavar="PLAN", help="The plan that is to go on; as TARGET_PLAN.")
@click.option("--check", is_flag=True, help="Prove that nothing is lost or mixed, and write nothing.")
@click.option("-o", "--output", "out", type=PLACE, metavar="OUT",
              help="What to make: a directory, or if it ends with .safetensors, one file of all.")  # fmt: skip
@click.option("--aoa", type=click.Path(exists=True, path_type=Path, dir_okay=False), metavar="FILE",
              help="AOA statements that make the target's tensors of the source's.")  # fmt: skip
@click.option("--names", metavar="CONVENTION", shell_complete=complete_convention,
              help="How tensors of the one file are to be named (huggingface, megatron, paddleformers, ..); with a "
              "plan, how those of SOURCE are.")  # fmt: skip
@click.option("--weights-only", is_flag=True, help="Leave out what the optimizer keeps: training begins at step 0.")
@click.option("--save-format", type=click.Choice(["pipeproof", "flex"]), default="pipeproof", show_default=True,
              help="How the state of a plan is written; flex: as Paddle's own checkpoint, with our index.")  # fmt: skip
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", callback=_svg_file,
              help="Draw what moves where.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, _MOST_JOBS), metavar="N",
              help="Files at once, 16 at most; by default two a core.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def reshard(
    source: Path, target_plan: Path | None, to_plan: Path | None, check: bool, out: Path | None, aoa: Path | None,
    names: str | None, weights_only: bool, save_format: str, picture: Path | None, jobs: int | None, form: Form,
) -> None:  # fmt: skip
    """Cut a checkpoint anew for another plan, or merge it into one file; first the proof that nothing is lost.

    SOURCE is a state of `run --save` (or the newest below a directory), a safetensors file, a directory of them as
    Hugging Face has it, or a checkpoint of Paddle's; with --check a plan will do, too. The output appears whole or not
    at all, and the same command goes on with what an interrupted one left.
    """
    if target_plan is not None and to_plan is not None:
        raise click.UsageError("give the plan once: as TARGET_PLAN or with --to")
    cores = len(os.sched_getaffinity(0))  # two jobs a core: one computes while the other waits for the disk
    plan = to_plan if target_plan is None else target_plan
    jobs, by_paddle = jobs or min(2 * cores, _MOST_JOBS), save_format == "flex"
    asked = Asked(source, plan, out, aoa, names, weights_only, by_paddle, picture, jobs, form == "json")
    require_sense(asked, check=check)
    with refusing_bad_plans(form, source if plan is None else plan):
        try:
            status = _of_plan(asked) if is_plan(source) else _of_checkpoint(asked)
        except BadPlanError:
            raise
        except PipeproofError as error:  # what cannot be opened is bad input, too
            raise BadPlanError(*error.findings) from error
    sys.exit(status)


def _of_plan(asked: Asked) -> ExitStatus:
    """The proof for all states that runs of one plan save, and runs of the other go on from."""
    from pipeproof.state.reshard.goals import require_one_of_each, training_faults, weights_of_side
    from pipeproof.state.reshard.padding import padded_map
    from pipeproof.state.reshard.sides import side_of_plan
    from pipeproof.state.save import values_of

    assert asked.plan is not None
    one, other = _lowered(asked.source), _lowered(asked.plan)
    for plan in (one, other):
        require_one_of_each(plan)
    source, target = side_of_plan(one, str(asked.source)), side_of_plan(other, str(asked.plan))
    if asked.weights_only:
        source, target = weights_of_side(source), weights_of_side(target)
    if asked.aoa is None:
        state_map = padded_map(source.tensors, values_of(one.spec), other.spec.model)
    else:
        from pipeproof.state.aoa.engine import map_of
        from pipeproof.state.aoa.meta import metas_of
        from pipeproof.state.aoa.read import read_file

        metas = [
            metas_of(side.tensors, (part.shard for parts in side.parts.values() for part in parts))
            for side in (source, target)
        ]
        state_map = map_of(read_file(asked.aoa), *metas)
    return _judged(asked, source, state_map, target, training_faults(one, other, weights_only=asked.weights_only))[0]


def _of_checkpoint(asked: Asked) -> ExitStatus:
    from pipeproof.state.checkpoint import open_checkpoint
    from pipeproof.state.faults import num_hashed
    from pipeproof.state.reshard.carry import carry_out, require_place
    from pipeproof.state.reshard.refused import require_no_part
    from pipeproof.state.reshard.sides import side_of_checkpoint
    from pipeproof.state.reshard.workplace import workplace_of
    from pipeproof.told_to_end import TerminatedError, terminate_raises

    require_no_part(asked.source)
    source = open_checkpoint(asked.source)
    if asked.out is not None:
        require_place(source, asked.out)
    goal, meant_wrong = _goal(source, asked)
    status, outcome = _judged(asked, side_of_checkpoint(source), goal.state_map, goal.side, meant_wrong)
    if status is not ExitStatus.OK or asked.out is None:
        return status
    if num_hashed(source) < len(source.files):
        click.echo(f"{source.place} has no SHA-256 of its content: its bytes are taken as they are", err=True)
    started = time.monotonic()
    goes_on = f"what is written stays in {workplace_of(asked.out)}: the same command goes on"
    try:
        with terminate_raises(), showing_progress(goal.target.size_bytes) as (begun, tell):
            made = carry_out(source, goal, asked.out, begun, tell, asked.jobs)
    except KeyboardInterrupt:
        click.echo(goes_on, err=True)
        raise
    except TerminatedError as error:
        click.echo(f"{error}: {goes_on}", err=True)
        sys.exit(128 + error.signum)
    try:
        show_outcome(outcome, asked.as_json, asked.out, made, time.monotonic() - started, asked.plan)
    except BrokenPipeError:
        raise
    except OSError:
        click.echo(f"{asked.out} is there, and whole; what was to be said of it could not be written", err=True)
        raise
    return status


def _goal(source: Checkpoint, asked: Asked) -> tuple[Goal, tuple[Finding, ...]]:
    """What is to be made, and where statements bring elements to others than those that mean the same."""
    from pipeproof.state.reshard.goals import has_steps

    plan, digest = None, ""
    if asked.plan is not None:
        plan, digest = _with_digest(asked.plan)
    weights_only = asked.weights_only or (plan is not None and not has_steps(source))
    if weights_only and not asked.weights_only:
        click.echo(
            f"{source.place} does not say after which step it is: its weights alone are taken, and training begins "
            "at step 0",
            err=True,
        )
    named: StateMap | None = None
    if asked.aoa is not None:
        from pipeproof.state.reshard.statements import map_of_statements

        named = map_of_statements(asked.aoa, source, plan, weights_only=weights_only)
    elif asked.names is not None:
        from pipeproof.state.reshard.naming import map_of_names, require_other_names

        if plan is not None and source.index is not None:
            require_other_names(asked.names, source.place)
        named = map_of_names(asked.names, source, plan)
        kept = sum(entry.kind in ("moment", "counter") for entry in source.tensors.values())
        if kept and not asked.weights_only:
            click.echo(f"names are of weights: {kept} tensors of the optimizer are left out", err=True)
    goal = _goal_of(source, asked, plan, digest, named, weights_only=weights_only)
    if asked.aoa is None or asked.names is None or named is None:
        return goal, ()
    from pipeproof.state.reshard.naming import findings_of_meaning

    return goal, findings_of_meaning(asked.names, named, source, plan, goal.side)


def _goal_of(
    source: Checkpoint,
    asked: Asked,
    plan: LoweredPlan | None,
    digest: str,
    named: StateMap | None,
    *,
    weights_only: bool,
) -> Goal:
    """A plan's state, one file, or a directory with a file and what stands beside."""
    from pipeproof.state.reshard.goals import goal_of_file, goal_of_plan

    if plan is not None:
        name = str(asked.plan if asked.out is None else asked.out)
        goal = goal_of_plan(source, plan, name, digest, named, weights_only=weights_only)
        if asked.by_paddle:
            from pipeproof.state.flex.goal import as_flex

            return as_flex(goal)
        return goal
    model = Path(f"model{FILE}")
    if asked.out is None or asked.out.suffix == FILE:
        return goal_of_file(source, asked.out or model, named, weights_only=weights_only)
    from pipeproof.state.reshard.naming import files_beside

    goal = goal_of_file(source, model, named, weights_only=weights_only)
    return replace(goal, one_file=None, beside=files_beside(source))


def _judged(
    asked: Asked, source: Side, state_map: StateMap, target: Side, others: tuple[Finding, ...] = ()
) -> tuple[ExitStatus, Outcome]:
    """Prove, show what was found, by others too, and the outcome where nothing is going to be written."""
    from pipeproof.state.reshard.proof import prove

    findings = (*prove(source, state_map, target), *others)
    failed = any(finding.severity is Severity.ERROR for finding in findings)
    outcome = Outcome(source, target, findings, asked.picture)
    if not asked.as_json:
        show_findings(findings)
    if asked.picture is not None and not failed:
        draw(asked.picture, source, state_map, target)
    if failed or asked.out is None:
        show_outcome(outcome, asked.as_json)
    return ExitStatus.FAILED if failed else ExitStatus.OK, outcome


def _lowered(path: Path) -> LoweredPlan:
    from pipeproof.comm.loaded import lower_loaded
    from pipeproof.specs.load import load_plan

    return lower_loaded(load_plan(path))


def _with_digest(path: Path) -> tuple[LoweredPlan, str]:
    from pipeproof.specs.load import load_plan
    from pipeproof.verify.certificate import plan_digest
    from pipeproof.verify.subject import make_subject

    subject = make_subject(load_plan(path))
    return subject.plan, plan_digest(subject)
