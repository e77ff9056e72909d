"""Tables of everything derived from a plan: stages, groups, boundary, programs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from rich.console import Console
from rich.text import Text

from pipeproof.comm.accumulation_order import accumulation_of
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import names_text, ranges_text
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import CHILD_KINDS
from pipeproof.stages.describe.boundary import Boundary
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
    edges_of: dict[tuple[Boundary, ...], list[int]] = {}
    for number, edge in enumerate(plan.edges):
        largest = max(edge.variants, key=lambda tensors: sum(prod(one.shape) for one in tensors))
        edges_of.setdefault(largest, []).append(number)
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
    """Print the communicators; of a folded graph, those of the replica whose ranks represent all others."""
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
