"""The commands. Each loads what it needs when it runs, so that ``check`` starts fast."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeproof import __version__
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import BadPlanError, PipeproofError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.exec.jobs import Fault
    from pipeproof.specs.load import LoadedPlan
    from pipeproof.specs.source import SourceMap
    from pipeproof.verify.check import Report

_PLAN = click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse an output that cannot be written before any work is done for it."""
    if value is None:
        return None
    existing = next(path for path in (value, *value.absolute().parents) if path.exists())
    is_directory = isinstance(parameter.type, click.Path) and not parameter.type.file_okay
    may_be_made = is_directory or existing in (value, value.absolute().parent)
    if existing != value and not (may_be_made and existing.is_dir()):
        raise click.BadParameter(f"{str(value)!r}: there is no directory {str(value.parent)!r}")
    if not os.access(existing, os.W_OK):
        raise click.BadParameter(f"{str(value)!r}: {str(existing)!r} is not writable")
    return value


def _timeout(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # no bound of a range refuses it
        raise click.BadParameter("nan is not a number of seconds")
    return value


class _Commands(click.Group):
    """The group of commands; each ends with our own status when it is interrupted."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(ExitStatus.INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipeproof")
def main() -> None:
    """Prove, time and run a pipeline-parallel training plan.

    Exit status: 0 clean, 1 errors found or a run that does not match, 2 bad input or a missing backend,
    3 a worker died or hung, 130 interrupted, 143 told to end.
    """


@main.command()
@_PLAN
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--strict", is_flag=True, help="Let warnings fail the check, too.")
def check(plan: Path, form: str, strict: bool) -> None:
    """Prove that a plan's communication is right, or say where it is wrong."""
    with _refusing_bad_plans(as_json=form == "json"), _not_collecting():
        report = _check(_load(plan))
    if form == "json":
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        from pipeproof.verify.render import render_report

        render_report(report, _console())
    warned = strict and any(f.severity == "warning" for f in report.findings)
    sys.exit(ExitStatus.FAILED if report.errors or warned else ExitStatus.OK)


@main.command()
@click.argument("code", metavar="CODE")
def explain(code: str) -> None:
    """Explain a code such as PP201, with a wrong and a right example."""
    from pipeproof.explain import all_docs, find_doc, render_doc

    doc = find_doc(code)
    if doc is None:
        known = ", ".join(doc.code for doc in all_docs())
        raise click.BadParameter(f"no code {code!r}; known are {known}", param_hint="CODE")
    render_doc(doc, _console())


@main.command()
@_PLAN
@click.option("--rank", type=int, help="Also print the whole program of this global rank.")
def show(plan: Path, rank: int | None) -> None:
    """Show what is derived from a plan: stages, groups, boundary layouts, programs."""
    with _refusing_bad_plans():
        from pipeproof.comm.lower import lower
        from pipeproof.comm.show import render_program, render_show

        lowered = lower(_load(plan).spec)
    if rank is not None and not 0 <= rank < lowered.mesh.num_ranks:
        raise click.BadParameter(f"{rank}: the plan has ranks 0..{lowered.mesh.num_ranks - 1}", param_hint="--rank")
    render_show(lowered, _console())
    if rank is not None:
        render_program(lowered, rank, _console())


@main.command()
@_PLAN
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=_writable,
              help="Write a Chrome/Perfetto trace.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def simulate(plan: Path, output: Path | None, as_json: bool) -> None:
    """Predict a plan's timeline, bubbles and activation peaks."""
    with _refusing_bad_plans(as_json=as_json):
        from pipeproof.comm.lower import lower
        from pipeproof.sim.figures import simulation_to_json
        from pipeproof.sim.simulate import simulate as run_simulation
        from pipeproof.sim.terminal import render_figures, render_timeline
        from pipeproof.sim.trace import write_trace

        simulation = run_simulation(lower(_load(plan).spec))
        if output is not None:
            write_trace(simulation.timeline, output)
    if as_json:
        click.echo(json.dumps(simulation_to_json(simulation), indent=2))
        return
    console = _console()
    render_timeline(simulation.timeline, console)
    render_figures(simulation, console)
    if output is not None:
        console.print(f"trace written to {output}; open it in chrome://tracing or ui.perfetto.dev", soft_wrap=True)


def _parse_fault(context: click.Context, parameter: click.Parameter, value: str | None) -> Fault | None:
    if value is None:
        return None
    from pipeproof.exec.jobs import Fault

    rank, _, rest = value.partition(":")
    op, _, action = rest.rpartition(":")
    if not rank.isdecimal() or not op or action not in ("raise", "die", "hang"):
        raise click.BadParameter(f"{value!r} is not RANK:OP:ACTION, such as 1:0F2:die (or raise, hang)")
    return Fault(int(rank), op, action)


@main.command()
@_PLAN
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=_writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--trace", type=click.Path(path_type=Path, dir_okay=False), callback=_writable,
              help="Write the measured timeline.")  # fmt: skip
@click.option("--unsafe", is_flag=True, help="Run a plan that does not pass check, and report the damage.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True,
              callback=_timeout, help="Seconds without any progress after which the run counts as hung.")  # fmt: skip
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), callback=_writable,
              help="Keep what each worker printed here.")  # fmt: skip
@click.option("--inject", "fault", metavar="RANK:OP:ACTION", callback=_parse_fault,
              help="Rehearse a failure: let RANK raise, die or hang at OP, as in 1:0F2:die.")  # fmt: skip
def run(
    plan: Path,
    report_file: Path | None,
    trace: Path | None,
    unsafe: bool,
    timeout_s: float,
    logs: Path | None,
    fault: Fault | None,
) -> None:
    """Run a verified plan on real processes and compare it with a single-process reference."""
    from pipeproof.exec.command import run_command
    from pipeproof.exec.run import RunOptions

    with _refusing_bad_plans():
        report = _check(_load(plan))
    options = RunOptions(timeout_s=timeout_s, logs=logs, fault=fault, unsafe=unsafe)
    with _refusing_bad_plans():
        status = run_command(report, options, _console(), report_file, trace)
    sys.exit(status)


@main.command()
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    from pipeproof.specs.schema import plan_json_schema

    click.echo(json.dumps(plan_json_schema(), indent=2))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def doctor(as_json: bool) -> None:
    """Show versions, and whether this machine's backends behave as our tables say."""
    from pipeproof.exec.doctor import doctor_to_json, render_doctor, run_doctor

    report = run_doctor()
    if as_json:
        click.echo(json.dumps(doctor_to_json(report), indent=2))
    else:
        render_doctor(report, _console())
    sys.exit(report.exit_status)


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Without garbage collection: building the plan's models sets it off again and again, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # what was loaded stays: do not look through all of it either
            gc.enable()


def _load(path: Path) -> LoadedPlan:
    from pipeproof.specs.load import load_plan

    return load_plan(path)


def _check(loaded: LoadedPlan) -> Report:
    from pipeproof.verify.check import check as check_plan

    return check_plan(loaded)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@contextmanager
def _refusing_bad_plans(*, as_json: bool = False) -> Iterator[None]:
    """Print the findings of a refused plan and exit with its status; nothing is shown as a traceback."""
    try:
        yield
    except PipeproofError as error:
        _show_findings(error, as_json)
        sys.exit(ExitStatus.BAD_INPUT if isinstance(error, BadPlanError) else ExitStatus.FAILED)
    except BrokenPipeError:
        raise  # whoever read our output has gone: click ends quietly
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitStatus.BAD_INPUT)


def _show_findings(error: PipeproofError, as_json: bool) -> None:
    from pipeproof.specs.render import finding_to_json, render_text

    if as_json:
        content: dict[str, Any] = {"digest": None, "findings": [finding_to_json(f) for f in error.findings]}
        click.echo(json.dumps(content, indent=2))
    source: SourceMap | None = getattr(error, "source", None)
    if not as_json:
        render_text(error.findings, source, console=_console(stderr=True))
