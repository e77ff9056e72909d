"""``pipeproof show``: stages, groups, boundary layouts and programs of a plan, its computed costs, or its memory."""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.cli.console import console_for, refusing_bad_plans
from pipeproof.cli.option_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options(device=True)
@click.option("--rank", type=int, help="Also print the whole program of this global rank.")
@click.option("--costs", is_flag=True,
              help="Show instead the times of each stage by cost.analytic, and their bounds.")  # fmt: skip
@click.option("--memory", is_flag=True, help="Show instead the memory of each stage, operation by operation.")
def show(plan: Path, source: PlanSource, rank: int | None, costs: bool, memory: bool) -> None:
    """Show what is derived from a plan: stages, groups, boundary layouts, programs."""
    if (rank is not None) + costs + memory > 1:
        raise click.UsageError("give one of --rank, --costs and --memory")
    if memory:
        _show_memory(plan, source)
    elif costs:
        _show_costs(plan, source)
    else:
        _show_plan(plan, source, rank)


def _show_plan(plan: Path, source: PlanSource, rank: int | None) -> None:
    with refusing_bad_plans("text", plan), showing_progress(f"lowering {plan}"):
        from pipeproof.comm.lower import lower_loaded
        from pipeproof.views.plan_tables import render_program, render_show

        lowered = lower_loaded(source.load(plan))
    if rank is not None and not 0 <= rank < lowered.mesh.num_ranks:
        raise click.BadParameter(f"{rank}: the plan has ranks 0..{lowered.mesh.num_ranks - 1}", param_hint="--rank")
    render_show(lowered, console_for())
    if rank is not None:
        render_program(lowered, rank, console_for())


def _show_memory(plan: Path, source: PlanSource) -> None:
    with refusing_bad_plans("text", plan), showing_progress(f"lowering {plan}"):
        from pipeproof.comm.lower import blaming_plan, lower_loaded
        from pipeproof.views.memory_table import render_stage_memory

        loaded = source.load(plan)
        with blaming_plan(loaded):
            lowered = lower_loaded(loaded)
    render_stage_memory(lowered, console_for())


def _show_costs(plan: Path, source: PlanSource) -> None:
    """Print the computed costs of a plan."""
    with refusing_bad_plans("text", plan), showing_progress(f"lowering {plan}"):
        from pipeproof.comm.lower import blaming_plan
        from pipeproof.cost.analytic_times import AnalyticCosts
        from pipeproof.views.plan_tables import render_costs

        loaded = source.load(plan)
        analytic = loaded.spec.cost.analytic
        if loaded.spec.is_custom:
            raise click.UsageError(
                f"{plan} has custom layers, whose work is not known; `Pipeline.profile` of their script measures them"
            )
        if analytic is None:
            has = "gives its times itself" if loaded.spec.cost_source != "placeholder" else "names no device"
            raise click.UsageError(
                f"{plan} {has}; --costs shows times computed for a device: write `cost: {{analytic: h200}}` in the plan"
            )
        with blaming_plan(loaded):
            costs = AnalyticCosts(loaded.spec, analytic)
            costs.resolved(loaded.spec.cost.p2p)
    render_costs(costs, console_for())
