"""Tables of everything derived from a plan: stages, groups, boundary, programs, and the costs of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from rich.console import Console
from rich.text import Text

from pipeproof.comm.accumulation_order import accumulation_of
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.diagnostics.problems import grouped, names_text, ranges_text, runs
from pipeproof.diagnostics.units import time_text
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import CHILD_KINDS
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.op_work import Phase
from pipeproof.views.tables import print_table

MOST_SHOWN = 100
"""Computations of a program that are shown."""


def render_show(plan: LoweredPlan, console: Console) -> None:
    """Print the derived stages, ranks, groups and boundary tensor."""
    rows = []
    for stage, names in enumerate(plan.stages):
        ranks = plan.ranks_of_stage(stage)
        numel = sum(prod(p.shape) for layer in plan.layers_of(stage) for p in layer.parameters)
        rows.append((str(stage), ranges_text(ranks, ", "), names_text(names), f"{numel:,}"))
    print_table(("stage", "ranks", "layers", ">parameters"), rows, console)
    if plan.spec.modules:
        console.print()
        table = [
            (module.name, ranges_text([*range(module.stages[0], module.stages[1] + 1)], ", "), str(module.dp),
             "none, frozen" if module.frozen else "all")
            for module in plan.spec.modules
        ]  # fmt: skip
        print_table(("module", "stages", ">replicas", "trained weights"), table, console)
    console.print()
    for line in _boundaries(plan):
        console.print(line)
    if plan.graph.channels or plan.graph.groups:
        _print_groups(plan, console)
    console.print(f"weight gradients are added: {accumulation_of(plan)}")
    console.print("programs (transfers, waits and collectives: `--rank N`)")
    for rank, program in enumerate(plan.programs):
        more = f" and {len(program) - MOST_SHOWN} more" if len(program) > MOST_SHOWN else ""
        console.print(f"  pp {rank}: {' '.join(map(str, program[:MOST_SHOWN]))}{more}", soft_wrap=True)


def _boundaries(plan: LoweredPlan) -> Iterator[str]:
    """Tensors that cross between stages, in the largest micro-batch; by edge where the edges differ."""

    def size(tensors: Sequence[Boundary]) -> int:
        return sum(prod(one.shape) for one in tensors)

    edges_of = grouped((max(edge.variants, key=size), number) for number, edge in enumerate(plan.edges))
    for tensors, edges in edges_of.items():
        after = f" after stage {ranges_text(edges, ', ')}" if len(edges_of) > 1 else ""
        for one in tensors:
            member = f" {one.member}" if one.member else ""
            back = f"its gradient is {one.grad_placement()}" if one.has_gradient else "it has no gradient"
            yield (
                f"boundary tensor{member}{after}: {one.dims} {list(one.shape)} {one.dtype}, {one.tp} over tp; each "
                f"rank holds {list(one.local_shape)}; {back}"
            )


def _print_groups(plan: LoweredPlan, console: Console) -> None:
    """Print the communicators; for a folded graph, of the replica whose ranks represent all others."""
    graph, mesh = plan.graph, plan.mesh
    where = f", of {graph.num_ranks:,} of {mesh.num_ranks:,} ranks: the others have the same" if plan.folded else ""
    rows = [
        (channel.communicator, f"{graph.global_rank[channel.src]} -> {graph.global_rank[channel.dst]}")
        for channel in graph.channels
    ]
    for group in graph.groups:
        ranks = [graph.global_rank[rank] for rank in group.ranks]
        copies = f" and {group.size - len(ranks):,} more" if group.copies > 1 else ""
        rows.append((group.axis, ranges_text(ranks, ", ") + copies))
    console.print(Text(f"\ngroups, in the order of creation{where}"), soft_wrap=True)
    print_table(("communicator", "ranks"), rows, console)
    console.print()


def render_program(plan: LoweredPlan, rank: int, console: Console) -> None:
    """Print one rank's whole program, an operation a line; children are indented below their parent."""
    graph = plan.graph
    console.print(f"program of rank {rank}")
    for op_id in graph.rank_ops(rank):
        op, peer = graph.ops[op_id], int(graph.peer[op_id])
        indent = "    " if op.kind in CHILD_KINDS else "  "
        numel = int(graph.stop[op_id] - graph.start[op_id])
        facts = f"  elements {int(graph.start[op_id])}..{int(graph.stop[op_id])}" if numel else ""
        if peer != NONE:
            facts += f", peer rank {peer}"
        if graph.group[op_id] != NONE:
            facts += f", ranks {list(graph.groups[int(graph.group[op_id])].ranks)}"
        console.print(f"{indent}{op}{facts}", soft_wrap=True)


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
    headings = (">time", ">TFLOP", ">GB", ">GB sent", ">TFLOP/s", ">compute", ">memory", ">links", ">host")
    print_table(("stage", "", *headings), rows, console)
    console.print(_assumptions(costs), soft_wrap=True, highlight=False)
    most = max(costs.updates)
    few = (
        "" if min(costs.updates) == most else f" on the slowest stage (on the fastest {time_text(min(costs.updates))})"
    )
    console.print(f"the optimizer's step takes {time_text(most)}{few}", highlight=False)
    if messages := costs.links.messages():
        slowest = max(messages)
        where = "between nodes" if costs.links.crosses("pp") else "inside a node"
        few = "" if min(messages) == slowest else f" (the fastest edge {time_text(min(messages))})"
        console.print(
            f"a message between stages takes {time_text(slowest)}, {where}; schedules count it for every edge{few}",
            highlight=False,
        )


def _figures(time: PhaseTime) -> tuple[str, ...]:
    parts = (time.compute_us, time.memory_us, time.links_us, time.us - time.device_us)
    shares = (f"{float(100 * us / time.us):.0f} %" if time.us else "" for us in parts)
    rate = f"{float(time.flops / time.us) / 10**6:.0f}" if time.us else ""
    return (
        time_text(time.us),
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
