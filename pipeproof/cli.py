"""The commands. Each loads what it needs when it runs, so that ``check`` starts fast."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeproof import __version__
from pipeproof.commands.advise import advise
from pipeproof.commands.align import align
from pipeproof.commands.compare import compare
from pipeproof.commands.convert import convert
from pipeproof.commands.describe import describe
from pipeproof.commands.jitter import jitter
from pipeproof.commands.line import console_for, parse_fault, refusing_bad_plans, seconds, writable
from pipeproof.commands.rehearse import rehearse
from pipeproof.commands.schedule import schedule
from pipeproof.commands.sweep import sweep
from pipeproof.commands.timeline_file import timeline_file, write_timeline
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.commands.check import Form
    from pipeproof.exec.jobs import Fault
    from pipeproof.sim.simulate import Engine
    from pipeproof.specs.load import LoadedPlan
    from pipeproof.verify.check import Report
    from pipeproof.verify.selection import Selection

_PLAN = click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))


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


main.add_command(schedule)
main.add_command(convert)
main.add_command(advise)
main.add_command(describe)
main.add_command(sweep)
main.add_command(compare)
main.add_command(align)
main.add_command(jitter)
main.add_command(rehearse)


@main.command()
@click.argument("plan", metavar="[PLAN]", type=click.Path(path_type=Path), required=False)
@click.option("--program", type=click.Path(path_type=Path),
              help="Judge this program text alone, without a plan.")  # fmt: skip
@click.option("--backend", metavar="NAME", help="Whose promises hold for --program, such as paddle-gloo.")
@click.option("--format", "form", type=click.Choice(["text", "json", "sarif"]), default="text", show_default=True)
@click.option("--select", multiple=True, metavar="CODES",
              help="Run only these rules: codes or their beginnings, as in PP401,3xx.")  # fmt: skip
@click.option("--ignore", multiple=True, metavar="CODES", help="Leave these rules out; nothing is certified then.")
@click.option("--strict", is_flag=True, help="Let warnings fail the check, too.")
@click.option("--all", "everything", is_flag=True, help="Show all findings, however many of one code, and all of each.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def check(
    plan: Path | None,
    program: Path | None,
    backend: str | None,
    form: Form,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    strict: bool,
    everything: bool,
    color: str,
) -> None:
    """Prove that a plan's communication is right, or say where it is wrong."""
    file = plan if program is None else program
    if file is None or (plan is not None and program is not None):
        raise click.UsageError("give one of PLAN and --program FILE")
    if backend is not None and program is None:
        raise click.BadParameter("a plan says its backend itself, in `run`", param_hint="--backend")
    from pipeproof.commands.check import exit_status_of, selection_of, show_report

    selection = selection_of(select, ignore)
    with refusing_bad_plans(form, file, color), _not_collecting():
        report = _check(_load(file), selection) if program is None else _check_program(file, backend, selection)
    status = exit_status_of(report, strict=strict)
    show_report(report, form, file, status, console_for(color=color), everything=everything)
    sys.exit(status)


@main.command()
@click.argument("code", metavar="CODE")
def explain(code: str) -> None:
    """Explain a code such as PP201, with a wrong and a right example."""
    from pipeproof.explain import all_docs, find_doc, render_doc

    doc = find_doc(code)
    if doc is None:
        known = ", ".join(doc.code for doc in all_docs())
        raise click.BadParameter(f"no code {code!r}; known are {known}", param_hint="CODE")
    render_doc(doc, console_for())


@main.command()
@_PLAN
@click.option("--rank", type=int, help="Also print the whole program of this global rank.")
@click.option("--costs", is_flag=True, help="Show instead what each stage takes by cost.analytic, and what bounds it.")
@click.option("--memory", is_flag=True, help="Show instead what each stage holds, operation by operation.")
def show(plan: Path, rank: int | None, costs: bool, memory: bool) -> None:
    """Show what is derived from a plan: stages, groups, boundary layouts, programs."""
    if (rank is not None) + costs + memory > 1:
        raise click.UsageError("give one of --rank, --costs and --memory")
    if memory:
        from pipeproof.commands.memory import show_memory

        show_memory(plan)
        return
    if costs:
        from pipeproof.commands.costs import show_costs

        show_costs(plan)
        return
    with refusing_bad_plans("text", plan):
        from pipeproof.comm.loaded import lower_loaded
        from pipeproof.comm.show import render_program, render_show

        lowered = lower_loaded(_load(plan))
    if rank is not None and not 0 <= rank < lowered.mesh.num_ranks:
        raise click.BadParameter(f"{rank}: the plan has ranks 0..{lowered.mesh.num_ranks - 1}", param_hint="--rank")
    render_show(lowered, console_for())
    if rank is not None:
        render_program(lowered, rank, console_for())


@main.command()
@_PLAN
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=timeline_file,
              help="Write the timeline: .html (a page for a browser), .json (Chrome trace), .pftrace (Perfetto), .csv, "
                   "or a picture: .png, .svg, .pdf.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--engine", type=click.Choice(["auto", "fast", "simpy"]), default="auto", show_default=True,
              help="Longest paths, the reference model, or whichever applies; the times are the same.")  # fmt: skip
def simulate(plan: Path, output: Path | None, as_json: bool, engine: Engine) -> None:
    """Predict a plan's timeline, bubbles and activation peaks."""
    with refusing_bad_plans("json" if as_json else "text", plan):
        from pipeproof.comm.loaded import blaming_plan, lower_loaded
        from pipeproof.sim.figures import simulation_to_json
        from pipeproof.sim.memory.show import render_memory
        from pipeproof.sim.simulate import simulate as run_simulation
        from pipeproof.sim.terminal import render_figures, render_timeline

        loaded = _load(plan)
        with blaming_plan(loaded):
            lowered = lower_loaded(loaded)
            simulation = run_simulation(lowered, engine=engine)
        if output is not None:
            written = write_timeline(output, plan.stem, simulation.timeline, lowered.graph, simulation.memory)
    if as_json:
        click.echo(json.dumps(simulation_to_json(simulation), indent=2))
        return
    console = console_for()
    render_timeline(simulation.timeline, console)
    render_figures(simulation, console)
    render_memory(simulation, lowered, console)
    if output is not None:
        console.print(written, soft_wrap=True)


def _record_directory(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    from pipeproof.align.record import RECORD_FILE

    for who in ("run", "reference"):
        if (value / who / RECORD_FILE).exists():
            raise click.BadParameter(f"{str(value)!r} holds a record already: name another directory, or remove it")
    return writable(context, parameter, value)


@main.command()
@_PLAN
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--trace", "output", type=click.Path(path_type=Path, dir_okay=False), callback=timeline_file,
              help="Write the measured timeline, in the forms of `simulate -o`.")  # fmt: skip
@click.option("--profile", "profile_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write measured times, for `cost: {profile: FILE}`; the reference runs afterwards.")  # fmt: skip
@click.option("--record", "record_directory", type=click.Path(path_type=Path, file_okay=False),
              callback=_record_directory, metavar="DIR",
              help="Record losses and gradients of the run and of the reference below DIR, for `align`.")  # fmt: skip
@click.option("--record-layers", is_flag=True,
              help="Record what each layer takes and gives, forward and backward, too.")  # fmt: skip
@click.option("--record-values", is_flag=True,
              help="Keep the tensors themselves, which are large, so that `align` can tell how far apart.")  # fmt: skip
@click.option("--unsafe", is_flag=True, help="Run a plan that does not pass check, and report the damage.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True,
              callback=seconds, help="Seconds without any progress after which the run counts as hung.")  # fmt: skip
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), callback=writable,
              help="Keep what each worker printed here.")  # fmt: skip
@click.option("--inject", "fault", metavar="RANK:OP:ACTION", callback=parse_fault,
              help="Rehearse a failure: let RANK raise, die or hang at OP, as in 1:0F2:die.")  # fmt: skip
def run(
    plan: Path,
    report_file: Path | None,
    output: Path | None,
    profile_file: Path | None,
    record_directory: Path | None,
    record_layers: bool,
    record_values: bool,
    unsafe: bool,
    timeout_s: float,
    logs: Path | None,
    fault: Fault | None,
) -> None:
    """Run a verified plan on real processes and compare it with a single-process reference."""
    if record_directory is None and (record_layers or record_values):
        raise click.UsageError("--record-layers and --record-values say what --record DIR writes")
    from pipeproof.exec.command import run_command
    from pipeproof.exec.record import RecordOptions
    from pipeproof.exec.run import RunOptions

    with refusing_bad_plans("text", plan):
        report = _check(_load(plan))
    record = None if record_directory is None else RecordOptions(record_directory, record_layers, record_values)
    options = RunOptions(timeout_s, logs, fault, unsafe=unsafe, profile=profile_file is not None, record=record)
    write = None if output is None else partial(write_timeline, output, f"{plan.stem}, measured")
    with refusing_bad_plans("text", plan):
        status = run_command(report, options, console_for(), report_file, profile_file, write)
    sys.exit(status)


@main.command()
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    from pipeproof.specs.schema import plan_json_schema

    click.echo(json.dumps(plan_json_schema(), indent=2))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--backend",
    type=click.Choice(["paddle", "torch"]),
    default="paddle",
    show_default=True,
    help="Whose gloo to probe.",
)
def doctor(as_json: bool, backend: str) -> None:
    """Show versions, and whether a backend behaves on this machine as our table says."""
    from pipeproof.exec.doctor import doctor_to_json, render_doctor, run_doctor

    report = run_doctor(backend=backend)
    if as_json:
        click.echo(json.dumps(doctor_to_json(report), indent=2))
    else:
        render_doctor(report, console_for())
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


def _check(loaded: LoadedPlan, selection: Selection | None = None) -> Report:
    from pipeproof.verify.check import check as check_plan
    from pipeproof.verify.selection import ALL_RULES

    return check_plan(loaded, selection or ALL_RULES)


def _check_program(file: Path, backend: str | None, selection: Selection) -> Report:
    from pipeproof.comm.backends import table_named
    from pipeproof.verify.check import check_subject
    from pipeproof.verify.program import load_program

    try:
        table = None if backend is None else table_named(backend)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--backend") from error
    return check_subject(load_program(file, backend=table), selection)
