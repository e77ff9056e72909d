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
from pipeproof.commands.baseline import baseline_options
from pipeproof.commands.compare import compare
from pipeproof.commands.complete import PlanFile, complete_code, complete_importer
from pipeproof.commands.completion import completion
from pipeproof.commands.convert import convert
from pipeproof.commands.describe import describe
from pipeproof.commands.fleet import fleet
from pipeproof.commands.hang import hang
from pipeproof.commands.help import SectionedGroup
from pipeproof.commands.import_plan import KindName, import_from, import_options, import_plan
from pipeproof.commands.jitter import jitter
from pipeproof.commands.kept import kept_options
from pipeproof.commands.line import console_for, refusing_bad_plans, writable
from pipeproof.commands.log import log_options
from pipeproof.commands.ranks import rank_options
from pipeproof.commands.rehearse import rehearse
from pipeproof.commands.schedule import schedule
from pipeproof.commands.sweep import sweep
from pipeproof.commands.timeline_file import timeline_file, write_timeline
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.comm.capabilities import Queue
    from pipeproof.commands.check import Form
    from pipeproof.commands.judged import Item
    from pipeproof.exec.jobs import Fault
    from pipeproof.exec.kept import KeptState
    from pipeproof.interop.imported import Flags
    from pipeproof.sim.simulate import Engine
    from pipeproof.specs.baseline_file import LoadedBaseline
    from pipeproof.specs.load import LoadedPlan
    from pipeproof.specs.problems import KeyPath
    from pipeproof.verify.check import Report
    from pipeproof.verify.selection import Selection

_PLAN = click.argument("plan", metavar="PLAN", type=PlanFile())


class _Commands(SectionedGroup):
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
main.add_command(fleet)
main.add_command(import_plan)
main.add_command(hang)
main.add_command(completion)


@main.command()
@click.argument("files", metavar="[PLAN]...", type=PlanFile(), nargs=-1)
@click.option(
    "--from",
    "kind",
    type=KindName(),
    shell_complete=complete_importer,
    help="Judge files of another tool; `docs/importing.md` has the kinds.",
)
@import_options
@click.option("--program", type=click.Path(path_type=Path),
              help="Judge this program text alone, without a plan.")  # fmt: skip
@click.option("--backend", metavar="NAME", help="Whose promises hold for --program, such as paddle-gloo.")
@log_options
@click.option("--format", "form", type=click.Choice(["text", "json", "sarif"]), default="text", show_default=True)
@click.option("--select", multiple=True, metavar="CODES",
              help="Run only these rules: codes or their beginnings, as in PP401,3xx.")  # fmt: skip
@click.option("--ignore", multiple=True, metavar="CODES", help="Leave these rules out; nothing is certified then.")
@click.option("--strict", is_flag=True, help="Let warnings fail the check, too.")
@baseline_options
@click.option("--all", "everything", is_flag=True, help="Show all findings, however many of one code, and all of each.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def check(
    files: tuple[Path, ...],
    kind: str | None,
    settings: dict[KeyPath, object],
    model_config: Path | None,
    world_size: int | None,
    program: Path | None,
    backend: str | None,
    log: Path | None,
    log_plan: Path | None,
    channels: Queue | None,
    form: Form,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    strict: bool,
    baseline: Path | None,
    new_baseline: Path | None,
    reason: str | None,
    everything: bool,
    color: str,
) -> None:
    """Prove that a plan's communication is right, or say where it is wrong."""
    if bool(files) + (program is not None) + (log is not None) != 1 or (kind is not None and not files):
        raise click.UsageError("give one of PLAN, --from KIND FILE..., --program FILE and --log DIR")
    if log is None and (log_plan is not None or channels is not None):
        raise click.UsageError("--plan and --channels go with --log DIR")
    if kind is None and (settings or model_config is not None or world_size is not None):
        raise click.UsageError("--set, --model-config and --world-size go with --from KIND")
    file = files[0] if files else log or program or Path()
    if backend is not None and program is None:
        raise click.BadParameter("a plan says its backend itself, in `run`", param_hint="--backend")
    from pipeproof.commands.check import selection_of, show_all
    from pipeproof.commands.judged import held_against, judge_all, write_baseline
    from pipeproof.commands.log import check_log, codes_of_logs
    from pipeproof.interop.codes import IMPORT_CODES
    from pipeproof.interop.imported import Flags

    others = [doc.code for doc in IMPORT_CODES] if kind is not None else codes_of_logs() if log is not None else []
    selection = selection_of(select, ignore, others)
    items: list[Item] = [((plan,), partial(_check_file, plan, selection)) for plan in files]
    if kind is not None:
        flags = Flags(settings, model_config, world_size)
        items = [(files, partial(_check_files, kind, files, flags, selection))]
    elif program is not None:
        items = [((program,), partial(_check_program, program, backend, selection))]
    elif log is not None:
        items = [((log,), partial(check_log, log, log_plan, channels, selection))]
    known = None if baseline is None else _load_baseline(baseline, form, color)
    with refusing_bad_plans(form, file, color), _not_collecting():
        judged = judge_all(items)
    if new_baseline is not None:
        with refusing_bad_plans(form, new_baseline, color):
            known = write_baseline(new_baseline, judged, selection, reason)
    if known is not None:
        judged = held_against(known, judged, selection)
    sys.exit(show_all(judged, form, partial(console_for, color=color), strict=strict, everything=everything))


@main.command()
@click.argument("code", metavar="CODE", shell_complete=complete_code)
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
@rank_options("Run")
@kept_options
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
    share_gpus: bool,
    kept: KeptState,
) -> None:
    """Run a verified plan on real processes and compare it with a single-process reference."""
    if share_gpus and profile_file is not None:
        raise click.UsageError("--profile: ranks that share a GPU take turns on it, and their times are of that")
    if record_directory is None and (record_layers or record_values):
        raise click.UsageError("--record-layers and --record-values say what --record DIR writes")
    from pipeproof.exec.command import run_command
    from pipeproof.exec.record import RecordOptions
    from pipeproof.exec.run import RunOptions

    with refusing_bad_plans("text", plan):
        report = _check(_load(plan))
    record = None if record_directory is None else RecordOptions(record_directory, record_layers, record_values)
    options = RunOptions(
        timeout_s,
        logs,
        fault,
        unsafe=unsafe,
        profile=profile_file is not None,
        record=record,
        share_gpus=share_gpus,
        kept=kept,
    )
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
    help="Whose transports to probe.",
)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="gloo on the CPU, or NCCL on one or two GPUs.")  # fmt: skip
def doctor(as_json: bool, backend: str, device: str) -> None:
    """Show versions, whether a backend behaves on this machine as our table says, and what messages take."""
    from pipeproof.exec.doctor import run_doctor
    from pipeproof.exec.doctor_report import doctor_to_json, render_doctor

    report = run_doctor(backend=backend, device=device)
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


def _load_baseline(file: Path, form: Form, color: str) -> LoadedBaseline:
    from pipeproof.specs.baseline_file import load_baseline

    with refusing_bad_plans(form, file, color):
        return load_baseline(file)


def _check_file(plan: Path, selection: Selection) -> Report:
    return _check(_load(plan), selection)


def _check(loaded: LoadedPlan, selection: Selection | None = None) -> Report:
    from pipeproof.verify.check import check as check_plan
    from pipeproof.verify.selection import ALL_RULES

    return check_plan(loaded, selection or ALL_RULES)


def _check_files(kind: str, files: tuple[Path, ...], flags: Flags, selection: Selection) -> Report:
    from pipeproof.interop.judge import check_imported

    return check_imported(import_from(kind, files, flags), selection)


def _check_program(file: Path, backend: str | None, selection: Selection) -> Report:
    from pipeproof.comm.backends import table_named
    from pipeproof.verify.check import check_subject
    from pipeproof.verify.program import load_program

    try:
        table = None if backend is None else table_named(backend)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--backend") from error
    return check_subject(load_program(file, backend=table), selection)
