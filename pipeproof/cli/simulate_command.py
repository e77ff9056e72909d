"""``pipeproof simulate``: the predicted timeline of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeproof.cli.console import console_for, format_option, refusing_bad_plans
from pipeproof.cli.option_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.cli.timeline_option import timeline_file, write_timeline

if TYPE_CHECKING:
    from pipeproof.sim.simulate import Engine


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options(device=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=timeline_file,
              help="Write the timeline: .html (a page for a browser), .json (Chrome trace), .csv, "
                   "or .svg (a picture).")  # fmt: skip
@format_option()
@click.option("--engine", type=click.Choice(["auto", "fast", "simpy"]), default="auto", show_default=True,
              help="fast: longest paths; simpy: the reference model; auto: the one that applies. Times are "
                   "equal.")  # fmt: skip
def simulate(
    plan: Path, source: PlanSource, output: Path | None, form: Literal["text", "json"], engine: Engine
) -> None:
    """Predict a plan's timeline, bubbles and activation peaks."""
    with refusing_bad_plans(form, plan), showing_progress(f"lowering {plan}") as on_progress:
        from pipeproof.comm.lower import blaming_plan, lower_loaded
        from pipeproof.cost.step_error import step_error_of
        from pipeproof.sim.simulate import simulate as run_simulation
        from pipeproof.sim.simulate import simulation_to_json
        from pipeproof.views.memory_table import render_memory
        from pipeproof.views.timeline_text import render_figures, render_interval, render_timeline

        loaded = source.load(plan)
        note = loaded.spec.placeholder_note
        with blaming_plan(loaded):
            lowered = lower_loaded(loaded)
            if lowered.foreign is not None:  # a generated schedule is whole: the rules need not be loaded
                from pipeproof.verify.check_plan import require_whole_step

                require_whole_step(lowered, loaded.source)
            on_progress(f"simulating {plan}", 0, 0)
            simulation = run_simulation(lowered, engine=engine)
            error = step_error_of(loaded.spec)
        if output is not None:
            on_progress(f"writing {output}", 0, 0)
            written = write_timeline(
                output, plan.stem, simulation.timeline, lowered.graph, simulation.memory, plan=loaded.spec
            )
    if form == "json":
        click.echo(json.dumps(simulation_to_json(simulation, loaded.spec.cost_source, error), indent=2))
        return
    console = console_for()
    render_timeline(simulation.timeline, console)
    render_figures(simulation, console, note)
    if loaded.spec.cost.analytic is not None:
        render_interval(simulation, error, console)
    render_memory(simulation, lowered, console)
    if output is not None:
        console.print(written, soft_wrap=True)
