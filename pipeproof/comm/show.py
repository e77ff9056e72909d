"""What is derived from a plan, as tables: stages, groups, boundary, programs."""

from __future__ import annotations

from math import prod

from rich.console import Console
from rich.table import Table

from pipeproof.comm.accumulation import accumulation_of
from pipeproof.comm.lower import LoweredPlan
from pipeproof.schedule.ops import CHILD_KINDS
from pipeproof.schedule.optable import NONE


def render_show(plan: LoweredPlan, console: Console) -> None:
    """Print the derived stages, ranks, groups and boundary tensor."""
    stages = Table(title="stages", title_justify="left")
    for column in ("stage", "ranks", "layers", "parameters"):
        stages.add_column(column)
    for stage, names in enumerate(plan.stages):
        ranks = plan.ranks_of_stage(stage)
        numel = sum(prod(p.shape) for layer in plan.layers_of(stage) for p in layer.parameters)
        stages.add_row(str(stage), ", ".join(map(str, ranks)), ", ".join(names), f"{numel:,}")
    console.print(stages)
    boundary = plan.boundary
    if len(plan.stages) > 1:
        console.print(
            f"boundary tensor: {boundary.dims} {list(boundary.shape)} {boundary.dtype}, {boundary.tp} over tp; each "
            f"rank holds {list(boundary.local_shape)}; its gradient is {boundary.grad_placement()}"
        )
    groups = Table(title="groups, in the order of creation", title_justify="left", min_width=34)
    groups.add_column("communicator")
    groups.add_column("ranks")
    for channel in plan.graph.channels:
        groups.add_row(channel.communicator, f"{channel.src} -> {channel.dst}")
    for group in plan.graph.groups:
        groups.add_row(group.axis, ", ".join(map(str, group.ranks)))
    if groups.row_count:
        console.print(groups)
    console.print(f"weight gradients are added: {accumulation_of(plan)}")
    console.print("programs (transfers, waits and collectives: `--rank N`)")
    for rank, program in enumerate(plan.programs):
        console.print(f"  pp {rank}: {' '.join(map(str, program))}", soft_wrap=True)


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
