"""The commands. Each loads what it needs when it runs, so that ``check`` starts fast."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pipeproof import __version__
from pipeproof.commands.advise import advise
from pipeproof.commands.align import align
from pipeproof.commands.aoa import aoa
from pipeproof.commands.check_command import check
from pipeproof.commands.compare import compare
from pipeproof.commands.complete import PlanFile, complete_code
from pipeproof.commands.completion import completion
from pipeproof.commands.convert import convert
from pipeproof.commands.describe import describe
from pipeproof.commands.fleet import fleet
from pipeproof.commands.hang import hang
from pipeproof.commands.help import SectionedGroup
from pipeproof.commands.import_plan import import_plan
from pipeproof.commands.jitter import jitter
from pipeproof.commands.line import console_for, refused_by_system, refusing_bad_plans
from pipeproof.commands.rehearse import rehearse
from pipeproof.commands.reshard import reshard
from pipeproof.commands.run import run
from pipeproof.commands.schedule import schedule
from pipeproof.commands.state import state
from pipeproof.commands.sweep import sweep
from pipeproof.commands.timeline_file import timeline_file, write_timeline
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.sim.simulate import Engine
    from pipeproof.specs.load import LoadedPlan

_PLAN = click.argument("plan", metavar="PLAN", type=PlanFile())


class _Commands(SectionedGroup):
    """The group of commands; each ends with our own status when it is interrupted, or refused by the system."""

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text, as on standard error
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read our output has gone: click ends quietly
        except OSError as error:  # such as of a path that is too long to look at, before a command has begun
            refused_by_system(error)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(ExitStatus.INTERRUPTED)
        finally:
            # CPython ends `python -m` by SIGINT, whatever the status, if an interrupt ever went through code that was
            # executed from a string (dataclasses are made so), caught or not; executing another one resets that
            # (pythonrun.c, run_eval_code_obj).
            exec("")  # noqa: S102 - nothing


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipeproof")
def main() -> None:
    """Prove, time and run a pipeline-parallel training plan.

    Exit status: 0 clean, 1 errors found or a run that does not match, 2 bad input or a missing backend,
    3 a worker died or hung, 130 interrupted, 143 told to end.
    """


main.add_command(check)
main.add_command(run)
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
main.add_command(reshard)
main.add_command(state)
main.add_command(aoa)
main.add_command(completion)


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
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--engine", type=click.Choice(["auto", "fast", "simpy"]), default="auto", show_default=True,
              help="Longest paths, the reference model, or whichever applies; the times are the same.")  # fmt: skip
def simulate(plan: Path, output: Path | None, form: Literal["text", "json"], engine: Engine) -> None:
    """Predict a plan's timeline, bubbles and activation peaks."""
    with refusing_bad_plans(form, plan):
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
    if form == "json":
        click.echo(json.dumps(simulation_to_json(simulation), indent=2))
        return
    console = console_for()
    render_timeline(simulation.timeline, console)
    render_figures(simulation, console)
    render_memory(simulation, lowered, console)
    if output is not None:
        console.print(written, soft_wrap=True)


@main.command()
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    from pipeproof.specs.schema import plan_json_schema

    click.echo(json.dumps(plan_json_schema(), indent=2))


@main.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--backend",
    type=click.Choice(["paddle", "torch"]),
    default="paddle",
    show_default=True,
    help="Whose transports to probe.",
)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="gloo on the CPU, or NCCL on one or two GPUs.")  # fmt: skip
def doctor(form: Literal["text", "json"], backend: str, device: str) -> None:
    """Show versions, whether a backend behaves on this machine as our table says, and what messages take."""
    from pipeproof.exec.doctor import run_doctor
    from pipeproof.exec.doctor_report import doctor_to_json, render_doctor

    report = run_doctor(backend=backend, device=device)
    if form == "json":
        click.echo(json.dumps(doctor_to_json(report), indent=2))
    else:
        render_doctor(report, console_for())
    sys.exit(report.exit_status)


def _load(path: Path) -> LoadedPlan:
    from pipeproof.specs.load import load_plan

    return load_plan(path)
