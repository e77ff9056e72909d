"""``pipeproof show --costs``: what each stage takes by ``cost.analytic``, and what bounds it."""

from __future__ import annotations

from fractions import Fraction

from rich.console import Console

from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.diagnostics.problems import ranges_text, runs
from pipeproof.stages.describe.op_work import Phase
from pipeproof.views.tables import print_table


def render_costs(costs: AnalyticCosts, console: Console) -> None:
    """A row for each phase of each run of stages with equal work."""
    rows = [
        (
            ranges_text(range(first, last + 1)) if phase is Phase.FORWARD else "",
            phase,
            *_figures(costs.stages[first][phase]),
        )
        for first, last in runs(costs.stages)
        for phase in Phase
    ]
    console.print("one rank's work for one micro-batch; shares of its time that compute, memory, links and host bound")
    headings = (">us", ">TFLOP", ">GB", ">GB sent", ">TFLOP/s", ">compute", ">memory", ">links", ">host")
    print_table(("stage", "", *headings), rows, console)
    console.print(_assumptions(costs), soft_wrap=True, highlight=False)
    most = max(costs.updates)
    few = "" if min(costs.updates) == most else f" on the slowest stage (on the fastest {_us(min(costs.updates))} us)"
    console.print(f"the optimizer's step takes {_us(most)} us{few}", highlight=False)
    if costs.messages:
        slowest = max(costs.messages)
        where = "between nodes" if costs.links.crosses("pp") else "inside a node"
        few = "" if min(costs.messages) == slowest else f" (the fastest edge {_us(min(costs.messages))} us)"
        console.print(
            f"a message between stages takes {_us(slowest)} us, {where}; schedules count it for every edge{few}",
            highlight=False,
        )


def _figures(time: PhaseTime) -> tuple[str, ...]:
    parts = (time.compute_us, time.memory_us, time.links_us, time.us - time.device_us)
    shares = (f"{float(100 * us / time.us):.0f} %" if time.us else "" for us in parts)
    rate = f"{float(time.flops / time.us) / 10**6:.0f}" if time.us else ""
    return (
        _us(time.us),
        f"{float(time.flops) / 10**12:.3f}",
        f"{float(time.num_bytes) / 10**9:.3f}",
        f"{float(time.link_bytes) / 10**9:.3f}",
        rate,
        *shares,
    )


def _assumptions(costs: AnalyticCosts) -> str:
    spec, shares = costs.analytic, costs.shares
    products = "measured curves of products" if shares.products is None else f"{shares.products:g} of peak in products"
    attention = "measured shares of it" if shares.attention is None else f"{shares.attention:g} of peak in it"
    links = "measured curves of collectives" if shares.links is None else f"{shares.links:g} of link bandwidth"
    return (
        f"{spec.device} in {costs.dtype}, {spec.execution}: {products}, {spec.attention} attention, {attention}, "
        f"{shares.memory:g} of memory bandwidth, {links}; {costs.num_splits} x {costs.size.num_rows} x "
        f"{costs.size.seq_length} tokens"
    )


def _us(time: Fraction) -> str:
    return f"{float(time):.1f}"
