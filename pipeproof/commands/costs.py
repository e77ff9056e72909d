"""What ``pipeproof show PLAN --costs`` does."""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.commands.line import console_for, refusing_bad_plans


def show_costs(plan: Path) -> None:
    """Print the computed costs of a plan.

    Raises:
        click.UsageError: the plan gives its times itself, or has layers whose times cannot be computed.
    """
    with refusing_bad_plans("text", plan):
        from pipeproof.comm.analytic.resolve import AnalyticCosts
        from pipeproof.comm.analytic.show import render_costs
        from pipeproof.comm.loaded import blaming_plan
        from pipeproof.specs.load import load_plan

        loaded = load_plan(plan)
        analytic = loaded.spec.cost.analytic
        if loaded.spec.own_layers is not None:
            raise click.UsageError(
                f"{plan} has own layers, whose work is not known; `pipeproof run {plan} --profile FILE` measures "
                "their times"
            )
        if analytic is None:
            raise click.UsageError(
                f"{plan} gives its times itself; --costs shows those computed for a device: write "
                "`cost: {analytic: h200}` in the plan"
            )
        with blaming_plan(loaded):
            costs = AnalyticCosts(loaded.spec, analytic)
            costs.resolved(loaded.spec.cost.p2p)
            render_costs(costs, console_for())
