"""Two timeline files as one page for a browser, one step of each above the other."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pipeproof.analysis.compare.timeline_files import TimedOp, TimelineFile
from pipeproof.schedule.op_table import EdgeKind, OpGraph
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.html.timeline_page import timeline_html


def comparison_html(a: TimelineFile, b: TimelineFile, step: int | None = None, note: str = "") -> str:
    """The page of one step of each: ``step`` where a file has several, else the last that both have.

    ``note`` is about the costs of two plans, and is added to the title of B.

    Steps begin at 0 and count as the same one. Messages and bytes are shown
    where the graph is known: that of a plan, which serves the other side too
    if that has no operation to compare with.

    Raises:
        ValueError: there is no such step, or the two have several steps and none in common.
    """
    steps = _chosen(a, b, step)
    graphs = [file.graph for file in (a, b) if file.graph is not None]
    titled = []
    for file, number in zip((a, b), steps, strict=True):
        ops = [op for op in file.ops if op.step == number]
        graph = next((graph for graph in (file.graph, *graphs) if graph is not None and _is_of(ops, graph)), None)
        several = len({op.step for op in file.ops}) > 1
        title = f"{file.file}, step {number}" if several else file.file
        if notes := "; ".join(filter(None, (file.note, note if file is b else ""))):
            title += f" ({notes})"
        titled.append((title, step_timeline(file, ops, graph), graph))
    return timeline_html(titled)


def _chosen(a: TimelineFile, b: TimelineFile, step: int | None) -> tuple[int, int]:
    of_a, of_b = ({op.step for op in file.ops} for file in (a, b))
    several = [steps for steps in (of_a, of_b) if len(steps) > 1]
    common = set.intersection(*several) if several else of_a
    if several and step is not None:
        common &= {step}
    if not common:
        raise ValueError("no step is in both" if step is None else f"there is no step {step}")
    last = max(common)
    return (last if len(of_a) > 1 else min(of_a), last if len(of_b) > 1 else min(of_b))


def _ids(graph: OpGraph) -> dict[tuple[int, str], int]:
    return {(rank, str(graph.ops[op_id])): op_id for rank in range(graph.num_ranks) for op_id in graph.rank_ops(rank)}


def _is_of(ops: Sequence[TimedOp], graph: OpGraph) -> bool:
    ids = _ids(graph)
    return all((op.rank, str(op.op)) in ids for op in ops)


def step_timeline(file: TimelineFile, ops: Sequence[TimedOp], graph: OpGraph | None) -> Timeline:
    """The operations from time 0 on, with the ids of ``graph`` or, without one, their places."""
    ids = {} if graph is None else _ids(graph)
    origin = min((op.start for op in ops), default=Fraction(0))
    spans = tuple(
        Span(op.rank, op.queue, ids.get((op.rank, str(op.op)), place), str(op.op), op.start - origin, op.end - origin)
        for place, op in enumerate(ops)
    )
    num_ranks = max((op.rank for op in ops), default=-1) + 1
    matches = () if graph is None else tuple((a, b) for a, b in graph.edges[EdgeKind.MATCH].tolist())
    return Timeline(spans, ({},) * num_ranks, clock="measured" if file.measured else "simulated", matches=matches)
