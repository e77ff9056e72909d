"""``pipeproof show --costs``: what each stage takes by ``cost.analytic``, and what bounds it."""

from __future__ import annotations

from fractions import Fraction

from rich.console import Console
from rich.table import Table

from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.stages.describe.op_work import Phase


def render_costs(costs: AnalyticCosts, console: Console) -> None:
    """A row for each phase of each run of stages with equal work."""
    table = Table(box=None, pad_edge=False)
    for column in ("stage", ""):
        table.add_column(column, no_wrap=True)
    for column in ("us", "TFLOP", "GB", "GB sent", "TFLOP/s", "compute", "memory", "links"):
        table.add_column(column, justify="right", no_wrap=True)
    stages = costs.stages
    first = 0
    for stage in range(len(stages)):
        if stage + 1 < len(stages) and stages[stage + 1] == stages[first]:
            continue
        name = str(first) if first == stage else f"{first}-{stage}"
        for phase in Phase:
            table.add_row("" if phase is not Phase.FORWARD else name, phase, *_figures(stages[first][phase]))
        first = stage + 1
    console.print("one rank's work for one micro-batch; shares of its time that compute, memory and links bound")
    console.print(table)
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
    shares = (
        f"{float(100 * us / time.us):.0f} %" for us in (time.compute_us, time.memory_us, time.links_us) if time.us
    )
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
    spec = costs.analytic
    return (
        f"{spec.device} in {costs.dtype}, {spec.attention} attention, assumed to reach {spec.matmul_efficiency:g} of "
        f"peak in matrix products, {spec.attention_efficiency:g} in attention, {spec.memory_efficiency:g} of memory "
        f"and {spec.link_efficiency:g} of link bandwidth; {costs.num_splits} x {costs.size.num_rows} x "
        f"{costs.size.seq_length} tokens"
    )


def _us(time: Fraction) -> str:
    return f"{float(time):.1f}"
