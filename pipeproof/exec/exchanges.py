"""The log of exchanges with experts: rows go as counts announced them.

How many tokens go where is for the router to say, so the graph has an
estimate. What a rank announced to each member, and what each announced to it,
is in its log; the rows of the exchanges that follow, forward and backward,
must be those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeproof.exec.codes import LOG_DIFFERS
from pipeproof.exec.oplog import LogEntry, Traffic, is_of_rows
from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.finding import Finding, OpsWitness, Severity, WitnessOp


def compare_exchanges(graph: OpGraph, rank: int, entries: Sequence[LogEntry]) -> Iterator[Finding]:
    """The exchanges of a rank that moved other rows than were announced; for a log whose operations are the graph's.

    A forward announces once for each layer with experts, and sends rows there
    and back; its backward sends gradients likewise, from the last layer on. A backward that computes a layer again
    first announces and sends like the forward: that announcement holds for these rows alone.
    """
    estimates = {
        str(graph.ops[i]): int(graph.stop[i] - graph.start[i])
        for i in graph.rank_ops(rank)
        if graph.ops[i].kind is OpKind.ALL_TO_ALL
    }
    announced: dict[tuple[int, int, int | None, int | None], list[Traffic]] = {}
    sent_there = False
    for entry in entries:
        if not entry.traffic:
            continue
        op = parse_op(entry.op)
        layers = announced.setdefault((entry.step, op.stage, op.micro_batch, op.split), [])
        if not is_of_rows(op.kind, entry.dtype):
            layers.append(entry.traffic)
            continue
        told = layers[-1]
        wanted = tuple((there, here) for here, there in told) if sent_there else told
        visits, rows = (sum(sent for sent, _ in traffic) for traffic in (told, entry.traffic))
        if entry.traffic != wanted:
            yield _finding(rank, entry, f"rows {_text(entry.traffic)} moved, and {_text(wanted)} were announced")
        elif entry.numel * visits != estimates[entry.op] * rows:
            yield _finding(rank, entry, f"{rows} rows make {entry.numel} elements, and {visits} {estimates[entry.op]}")
        if sent_there and _is_backward(op):
            layers.pop()
        sent_there = not sent_there


def _is_backward(op: Op) -> bool:
    return op.target is not None and op.target.kind is not OpKind.FORWARD


def _text(traffic: Traffic) -> str:
    sent, received = zip(*traffic, strict=True)
    return f"{list(sent)} to and {list(received)} from the members"


def _finding(rank: int, entry: LogEntry, fact: str) -> Finding:
    return Finding(
        LOG_DIFFERS.code,
        Severity.ERROR,
        f"rank {rank}, step {entry.step}, {entry.op}: {fact}",
        witness=OpsWitness((WitnessOp(rank, entry.op),)),
    )
