"""``pipeproof state reshard``: a checkpoint for another topology, as one file, or with other names, after a proof."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeproof.cli.console import console_for, echo, format_option, note_kind, opening_checkpoints, refusing_bad_plans
from pipeproof.cli.option_types import PLACE, is_plan, set_option
from pipeproof.cli.progress import showing_progress
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.exit_status import ExitStatus
from pipeproof.system_calls import num_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeproof.cli.check_report import Form
    from pipeproof.comm.op_graph import LoweredPlan
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.state.checkpoint import Checkpoint
    from pipeproof.state.reshard.execute_reshard import ReshardResult
    from pipeproof.state.reshard.reshard_targets import ReshardTask
    from pipeproof.state.reshard.shard_layout import ShardLayout
    from pipeproof.state.tensor_map import StateMap


FILE = ".safetensors"
_WITH_CONFIG = "huggingface"
"""The first word of conventions whose directories have a configuration with the weights."""


@dataclass(frozen=True)
class ReshardOptions:
    """Options of one call."""

    source: Path
    plan: Path | None
    settings: Mapping[KeyPath, object]
    """Values for keys of ``plan``, in place of its own."""
    out: Path | None
    aoa: Path | None
    names: str | None
    weights_only: bool
    save_format: str
    jobs: int
    as_json: bool


def _require_consistent(options: ReshardOptions, *, check: bool) -> None:
    """Refuse options that are contradictory or missing."""
    if check == (options.out is not None):
        raise click.UsageError("give -o OUT, the output, or --check to prove only")
    if is_plan(options.source) and not check:
        note_kind(options.source)
        raise click.UsageError("SOURCE is not a checkpoint: name a state to write it, or give --check for two plans")
    if options.plan is not None and (options.plan.is_dir() or options.plan.suffix == FILE):
        kind = "a directory" if options.plan.is_dir() else "a file of tensors"
        raise click.UsageError(f"{options.plan} is {kind}: --to names the plan that resumes")
    if options.settings and options.plan is None:
        raise click.UsageError("--set is for the plan that resumes: give --to PLAN")
    if options.save_format == "flex" and (options.plan is None or options.out is None):
        raise click.UsageError("--save-format flex is for the state of a plan: give --to PLAN and -o OUT")
    is_unified = options.save_format == "unified"
    if is_unified:
        if options.out is None or options.plan is not None:
            raise click.UsageError("--save-format unified writes whole tensors: give -o OUT, and no plan")
        if options.out.suffix == FILE:
            raise click.UsageError(f"a checkpoint of PaddleNLP is a directory: OUT may not end with {FILE}")
    if options.out is None:
        if options.plan is None and options.aoa is None and options.names is None:
            raise click.UsageError("--check needs a target: a plan, --aoa or --names")
        if is_plan(options.source) and options.plan is None:
            raise click.UsageError("give the plan that resumes: --to PLAN")
        if is_plan(options.source) and options.names is not None:
            raise click.UsageError("SOURCE is a plan, whose states have pipeproof's own names: leave --names out")
    elif not is_unified and (options.plan is None) != (options.out.suffix == FILE):
        if options.plan is None and not (options.names or "").startswith(_WITH_CONFIG):
            raise click.UsageError(f"give the plan that resumes, --to PLAN, or an OUT that ends with {FILE}")
        if options.plan is not None:
            raise click.UsageError(f"the state of a plan is a directory: OUT may not end with {FILE}")


_MOST_JOBS = 16


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target_plan", type=PLACE, required=False)
@click.option("--to", "to_plan", type=PLACE, metavar="PLAN", help="The plan that resumes; same as TARGET_PLAN.")
@set_option
@click.option("--check", is_flag=True, help="Prove that nothing is lost or mixed, and write nothing.")
@click.option("-o", "--output", "out", type=PLACE, metavar="OUT",
              help="The output: a directory, or if it ends with .safetensors, one file with all tensors.")  # fmt: skip
@click.option("--aoa", type=click.Path(exists=True, path_type=Path, dir_okay=False), metavar="FILE",
              help="AOA statements that make the target's tensors from the source's.")  # fmt: skip
@click.option("--names", metavar="CONVENTION",
              help="Naming convention of the tensors in the output file (huggingface, megatron, paddleformers, ..); "
              "with a plan, in SOURCE.")  # fmt: skip
@click.option("--weights-only", is_flag=True, help="Leave out the optimizer state: training begins at step 0.")
@click.option("--save-format", type=click.Choice(["pipeproof", "flex", "unified"]), default="pipeproof",
              show_default=True,
              help="Format of a directory; flex: the state of a plan as Paddle's own checkpoint, with our index; "
              "unified: whole tensors as PaddleNLP's.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, _MOST_JOBS), metavar="N",
              help="Number of parallel files, at most 16; by default two per core.")  # fmt: skip
@format_option()
def reshard(
    source: Path, target_plan: Path | None, to_plan: Path | None, settings: dict[KeyPath, object], check: bool,
    out: Path | None, aoa: Path | None, names: str | None, weights_only: bool, save_format: str,
    jobs: int | None, form: Form,
) -> None:  # fmt: skip
    """Reshard a checkpoint for another plan, or merge it into one file, after a proof that nothing is lost.

    SOURCE is a state of `run --save` (or the newest below a directory), a safetensors file, a directory of them as
    Hugging Face has it, or a checkpoint of Paddle's or PyTorch's (DCP); with --check, also a plan. The output appears
    complete or not at all. --set is for the plan that resumes.
    """
    if target_plan is not None and to_plan is not None:
        raise click.UsageError("give the plan once: as TARGET_PLAN or with --to")
    cores = num_cores()  # two jobs per core: one computes while the other waits for the disk
    plan = to_plan if target_plan is None else target_plan
    jobs = jobs or min(2 * cores, _MOST_JOBS)
    options = ReshardOptions(source, plan, settings, out, aoa, names, weights_only, save_format, jobs, form == "json")
    _require_consistent(options, check=check)
    with refusing_bad_plans(form, source if plan is None else plan, noted=(source,)), opening_checkpoints():
        status = _check_plan(options) if is_plan(source) else _reshard_checkpoint(options)
    sys.exit(status)


def _check_plan(options: ReshardOptions) -> ExitStatus:
    """Prove all states that runs of one plan save, and runs of the other resume from."""
    from pipeproof.state.reshard.reshard_targets import padding_map, training_faults, weights_of_layout
    from pipeproof.state.reshard.shard_layout import layout_of_plan
    from pipeproof.state.write_state import values_of

    assert options.plan is not None
    with showing_progress("lowering both plans"):
        before, after = _lowered(options.source, {}), _lowered(options.plan, options.settings)
    source, target = layout_of_plan(before, str(options.source)), layout_of_plan(after, str(options.plan))
    if options.weights_only:
        source, target = weights_of_layout(source), weights_of_layout(target)
    if options.aoa is None:
        state_map = padding_map(source.tensors, values_of(before.spec), after.spec.model)
    else:
        from pipeproof.state.aoa.aoa_engine import program_map
        from pipeproof.state.aoa.read_statements import read_file
        from pipeproof.state.aoa.tensor_families import metas_of

        metas = [
            metas_of(layout.tensors, (part.shard for shards in layout.shards.values() for part in shards))
            for layout in (source, target)
        ]
        state_map = program_map(read_file(options.aoa), *metas)
    return _prove(
        options, source, state_map, target, training_faults(before, after, weights_only=options.weights_only)
    )[0]


def _reshard_checkpoint(options: ReshardOptions) -> ExitStatus:
    from pipeproof.diagnostics.units import size_text
    from pipeproof.signals import TerminatedError, terminate_raises
    from pipeproof.state.open_checkpoint import num_checksummed, open_checkpoint
    from pipeproof.state.reshard.execute_reshard import execute_reshard, require_output_path
    from pipeproof.state.reshard.reshard_codes import require_not_state_file
    from pipeproof.state.reshard.shard_layout import ShardLayout
    from pipeproof.state.state_codes import StateError

    require_not_state_file(options.source)
    with showing_progress(f"opening {options.source}"):
        source = open_checkpoint(options.source)
    if options.out is not None:
        require_output_path(source, options.out, is_merged=options.out.suffix == FILE)
    with showing_progress("mapping tensors"):
        task, findings = _task_and_findings(source, options)
    if not task.target.tensors:
        fix = "name a checkpoint with tensors, without `--weights-only` if it has no weights"
        raise StateError(f"{source.path} has no tensor to write", fix)
    layout = ShardLayout(str(source.path), source.tensors, source.shards)
    status, outcome = _prove(options, layout, task.state_map, task.target_layout, findings)
    if status is not ExitStatus.OK or options.out is None:
        return status
    if source.others:
        more = f" and {len(source.others) - 1:,} more" if len(source.others) > 1 else ""
        echo(f"left out, because they are not tensors of model or optimizer: {source.others[0]}{more}", err=True)
    if num_checksummed(source) < len(source.files):
        echo(f"{source.path} has no SHA-256 of its content: its bytes are not checked", err=True)
    started = time.monotonic()
    try:
        with terminate_raises(), showing_progress("copying", count=size_text) as show:
            result = execute_reshard(source, task, options.out, partial(show, "copying"), options.jobs)
    except TerminatedError as error:
        echo(f"{error}: nothing was written", err=True)
        sys.exit(128 + error.signum)
    seconds = time.monotonic() - started
    md5 = None
    if {"dcp", "unified"} & {source.kind, options.save_format}:
        with showing_progress(f"comparing {options.out} with its source"):
            md5 = _require_same_md5(source, task, options.out)
    try:
        show_outcome(outcome, options.as_json, options.out, result, seconds, options.plan, md5)
    except BrokenPipeError:
        raise
    except OSError:
        echo(f"{options.out} is complete, but its report could not be written", err=True)
        raise
    return status


def _require_same_md5(source: Checkpoint, task: ReshardTask, out: Path) -> str | None:
    """Return the MD5 that the tensors of source and output have; None if the output's tensors are not the source's."""
    from pipeproof.state.checkpoint import md5_of_all, tensor_md5s
    from pipeproof.state.open_checkpoint import open_checkpoint
    from pipeproof.state.state_codes import StateError
    from pipeproof.state.tensor_map import identity_map

    names = task.target.tensors.keys()
    same = {name: entry for name, entry in source.tensors.items() if name in names}
    if dict(task.state_map.tensors) != dict(identity_map(dict(task.target.tensors)).tensors) or len(same) != len(names):
        return None
    before, after = tensor_md5s(replace(source, tensors=same)), tensor_md5s(open_checkpoint(out))
    differ = [name for name in before if before[name] != after.get(name)]
    if differ or len(after) != len(before):
        name = differ[0] if differ else next(name for name in after if name not in before)
        fix = f"remove {out} and run the command again: the source or the disk changed while it was read"
        raise StateError(f"{out} has {name} with another MD5 than {source.path}", fix)
    return md5_of_all(before)


def _task_and_findings(source: Checkpoint, options: ReshardOptions) -> tuple[ReshardTask, tuple[Finding, ...]]:
    """Return the task, its notes, and findings on statements that map elements to elements of another meaning."""
    from pipeproof.state.reshard.reshard_targets import has_training_steps

    plan, digest = None, ""
    if options.plan is not None:
        plan, digest = _with_digest(options.plan, options.settings)
    weights_only = options.weights_only or (plan is not None and not has_training_steps(source))
    if weights_only and not options.weights_only:
        echo(
            f"{source.path} has no step number{_missing_provenance(source)}: only its weights are used, and training "
            "begins at step 0",
            err=True,
        )
    named: StateMap | None = None
    if options.aoa is not None:
        from pipeproof.state.reshard.meaning_proof import map_of_statements

        named = map_of_statements(options.aoa, source, plan, weights_only=weights_only)
    elif options.names is not None:
        from pipeproof.state.reshard.meaning_proof import map_of_names, require_other_names

        if plan is not None and source.index is not None:
            require_other_names(options.names, source.path)
        named = map_of_names(options.names, source, plan)
        num_left_out = sum(entry.kind in ("moment", "counter") for entry in source.tensors.values())
        if num_left_out and not options.weights_only and options.save_format != "unified":
            echo(f"names are for weights: {num_left_out} tensors of the optimizer are left out", err=True)
    task = _task_of(source, options, plan, digest, named, weights_only=weights_only)
    if options.aoa is None or options.names is None or named is None:
        return task, task.notes
    from pipeproof.state.reshard.meaning_proof import meaning_findings

    return task, (*task.notes, *meaning_findings(options.names, named, source, plan, task.target_layout))


def _missing_provenance(source: Checkpoint) -> str:
    """Return the reason why a merged file with optimizer states, which this command wrote, has no step."""
    from pipeproof.state.state_index import provenance_file

    provenance = provenance_file(source.path)
    if source.kind != "merged" or provenance.exists() or all(entry.weight is None for entry in source.tensors.values()):
        return ""
    return f" (there is no {provenance.name} next to it)"


def _task_of(
    source: Checkpoint,
    options: ReshardOptions,
    plan: LoweredPlan | None,
    digest: str,
    named: StateMap | None,
    *,
    weights_only: bool,
) -> ReshardTask:
    """Return the task for a plan's state, one file, or a directory with a file and its configuration."""
    from pipeproof.state.reshard.reshard_targets import task_for_file, task_for_plan

    if plan is not None:
        name = str(options.plan if options.out is None else options.out)
        task = task_for_plan(source, plan, name, digest, named, weights_only=weights_only)
        if options.save_format == "flex":
            from pipeproof.state.flex.flex_output import as_flex

            return as_flex(task)
        return task
    model = Path(f"model{FILE}")
    is_unified = options.save_format == "unified"
    is_directory = options.out is not None and options.out.suffix != FILE and not is_unified
    if options.names is not None and options.out is not None and not is_directory:
        from pipeproof.state.reshard.meaning_proof import require_no_tables

        require_no_tables(options.names, source)
    if is_unified:
        from pipeproof.state.flex.flex_output import as_unified, with_optimizer_states

        if named is not None and not weights_only:
            named = with_optimizer_states(named, source.tensors)
        return as_unified(task_for_file(source, model, named, weights_only=weights_only), source, str(options.out))
    if not is_directory:
        return task_for_file(source, options.out or model, named, weights_only=weights_only)
    from pipeproof.state.reshard.meaning_proof import as_directory

    return as_directory(task_for_file(source, model, named, weights_only=weights_only), source, str(options.names))


def _prove(
    options: ReshardOptions,
    source: ShardLayout,
    state_map: StateMap,
    target: ShardLayout,
    more: tuple[Finding, ...],
) -> tuple[ExitStatus, Outcome]:
    """Prove, show the findings and ``more``, and the outcome if nothing will be written."""
    from pipeproof.state.reshard.reshard_proof import prove

    with showing_progress("proving the map"):
        findings = (*prove(source, state_map, target), *more)
    failed = any(finding.severity is Severity.ERROR for finding in findings)
    outcome = Outcome(source, target, findings)
    if not options.as_json:
        show_findings(findings)
    if failed or options.out is None:
        show_outcome(outcome, options.as_json)
    return ExitStatus.FAILED if failed else ExitStatus.OK, outcome


def _lowered(path: Path, settings: Mapping[KeyPath, object]) -> LoweredPlan:
    from pipeproof.comm.lower import lower_loaded
    from pipeproof.specs.load_plan import load_plan

    return lower_loaded(load_plan(path, settings))


def _with_digest(path: Path, settings: Mapping[KeyPath, object]) -> tuple[LoweredPlan, str]:
    from pipeproof.specs.load_plan import load_plan
    from pipeproof.verify.certificate import graph_digest
    from pipeproof.verify.subject import make_subject

    subject = make_subject(load_plan(path, settings))
    return subject.plan, graph_digest(subject)


# --- Output: findings of the proof, progress, and the result ---


_LARGE = 100_000_000
"""Fewest bytes for which the speed is shown."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a proof."""

    source: ShardLayout
    target: ShardLayout
    findings: tuple[Finding, ...]

    @property
    def proved(self) -> bool:
        """True if there is no error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


def show_findings(findings: tuple[Finding, ...]) -> None:
    """Print the findings of the proof."""
    if findings:
        from pipeproof.diagnostics.text_output import render_text

        render_text(findings, None, console=console_for(stderr=True))


def show_outcome(
    outcome: Outcome,
    as_json: bool,
    out: Path | None = None,
    result: ReshardResult | None = None,
    seconds: float = 0.0,
    plan: Path | None = None,
    md5: str | None = None,
) -> None:
    """Print the outcome, and the output with the command that resumes from it.

    ``md5`` is the digest of all tensors if output and source were compared.
    """
    if as_json:
        click.echo(json.dumps(_to_json(outcome, out, result, seconds, md5), indent=2))
        return
    if not outcome.proved:
        num = sum(finding.severity is Severity.ERROR for finding in outcome.findings)
        echo(f"not proved: {num} {'error' if num == 1 else 'errors'}; nothing was written")
        return
    from pipeproof.diagnostics.units import size_text, time_text
    from pipeproof.state.region_text import counted

    tensors, shards = counted(len(outcome.target.tensors), "tensor"), counted(_num_parts(outcome.source), "part")
    echo(
        f"proved: {tensors}, {shards} of {outcome.source.name} to {_num_parts(outcome.target):,}: every element has "
        "its source"
    )
    if result is not None and out is not None:
        size = f"{size_text(result.size_bytes)} in {counted(result.num_files, 'file')}"
        has_speed = result.size_bytes >= _LARGE
        speed = f", {size_text(round(result.size_bytes / max(seconds, 1e-9)))}/s" if has_speed else ""
        echo(f"{out}: {size}, {time_text(seconds * 1e6)}{speed}")
        if md5 is not None:
            echo(f"MD5 of {tensors}: {md5} in {outcome.source.name}, {md5} in {out}: equal")
        if plan is not None:
            click.echo(f"resume: {shlex.join(['pipeproof', 'run', str(plan), '--resume', str(out)])}")


def _num_parts(side: ShardLayout) -> int:
    return sum(map(len, side.shards.values()))


def _to_json(
    outcome: Outcome, out: Path | None, result: ReshardResult | None, seconds: float, md5: str | None
) -> dict[str, Any]:
    from pipeproof.diagnostics.text_output import finding_to_json

    content: dict[str, Any] = {
        "proved": outcome.proved,
        "findings": [finding_to_json(finding) for finding in outcome.findings],
        "num_tensors": len(outcome.target.tensors),
        "num_parts": {"source": _num_parts(outcome.source), "target": _num_parts(outcome.target)},
    }
    if result is not None:
        content["output"] = {
            "path": str(out),
            "num_files": result.num_files,
            "size_bytes": result.size_bytes,
            "seconds": round(seconds, 3),
        }
        if md5 is not None:
            content["output"]["md5"] = md5
    return content
