"""Comparison of op logs with the verified graph, of exchanged rows with their counts, and of times between hosts.

The router decides how many tokens go to which expert, so the graph has only an estimate. The counts that a rank sent to
each member, and received from each, are in its log; the exchanges of rows that follow must match them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest

from pipeproof.diagnostics.finding import Finding, OpsWitness, WitnessOp
from pipeproof.exec.rank.op_log import (
    HOST_QUEUE,
    LogEntry,
    Traffic,
    collective_dtype,
    log_queue,
    moves_rows,
)
from pipeproof.exec.store.run_codes import LOG_DIFFERS
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import TRANSFER_KINDS, Op, OpKind, parse_op

_Fact = tuple[str, tuple[int, ...], int, str]
"""Compared values: (operation, communicator's ranks, elements, dtype). An all-to-all of rows has 0 elements here: the
graph has only an estimate; ``compare_exchanges`` compares it with the counts."""


def expected_facts(graph: OpGraph, rank: int, dtype: str, weight_dtype: str | None = None) -> dict[str, list[_Fact]]:
    """Facts that a step of ``rank`` must log, by queue; gradients have ``weight_dtype``, other tensors ``dtype``."""
    facts: dict[str, list[_Fact]] = {HOST_QUEUE: []}
    for op_id in graph.rank_ops(rank):
        op, numel = graph.ops[op_id], int(graph.stop[op_id] - graph.start[op_id])
        if op.kind in TRANSFER_KINDS:
            channel = graph.channels[int(graph.channel[op_id])]
            tensor = graph.tensors[int(graph.tensor[op_id])]
            facts.setdefault(str(channel), []).append((str(op), (channel.src, channel.dst), numel, tensor.dtype))
        elif graph.group[op_id] != NONE:
            ranks = graph.groups[int(graph.group[op_id])].ranks
            moved = collective_dtype(graph, op_id, dtype, weight_dtype)
            fact = (str(op), ranks, 0 if moves_rows(op.kind, moved) else numel, moved)
            facts.setdefault(log_queue(graph, op_id), []).append(fact)
        else:
            facts[HOST_QUEUE].append((str(op), (), 0, ""))
    return facts


def compare_log(
    graph: OpGraph,
    rank: int,
    entries: Iterable[LogEntry],
    *,
    num_steps: int,
    dtype: str,
    weight_dtype: str | None = None,
    first_step: int = 0,
) -> Iterator[Finding]:
    """Yield the first difference on each queue of each step; nothing if the log matches the graph.

    The entries are read once, and only one step's entries are in memory at a time.

    ``num_steps`` is the number of steps with a log, from ``first_step`` on; replayed steps have none.

    The host's entries are compared in the order of the log. A transfer's entry is written when the host waits for it,
    so a channel's entries are compared in the order of execution.
    """
    one_step = expected_facts(graph, rank, dtype, weight_dtype)
    missing = {*range(first_step, first_step + num_steps)}
    for step, of_step in groupby(entries, key=lambda entry: entry.step):
        yield from _step_differences(rank, step, one_step if step in missing else {}, [*of_step])
        missing.discard(step)
    for step in sorted(missing):
        yield from _step_differences(rank, step, one_step, [])


def _step_differences(
    rank: int, step: int, expected: Mapping[str, list[_Fact]], entries: Sequence[LogEntry]
) -> Iterator[Finding]:
    logged: dict[str, list[_Fact]] = {}
    for entry in sorted(entries, key=lambda entry: 0 if entry.queue == HOST_QUEUE else entry.start_ns):
        is_estimate = entry.traffic and moves_rows(OpKind.ALL_TO_ALL, entry.dtype)
        fact = (entry.op, entry.ranks, 0 if is_estimate else entry.numel, entry.dtype)
        logged.setdefault(entry.queue, []).append(fact)
    for queue in sorted(expected.keys() | logged.keys()):
        for position, (planned, executed) in enumerate(zip_longest(expected.get(queue, []), logged.get(queue, []))):
            if planned != executed:
                yield LOG_DIFFERS.finding(
                    f"rank {rank}, step {step}, queue {queue}, position {position}: the graph has "
                    f"{_fact_text(planned)}, the log has {_fact_text(executed)}",
                    witness=OpsWitness(tuple(WitnessOp(rank, fact[0]) for fact in (planned, executed) if fact)),
                )
                break


def _fact_text(fact: _Fact | None) -> str:
    if fact is None:
        return "nothing more"
    op, ranks, numel, dtype = fact
    return f"{op} over ranks {list(ranks)}, {numel} elements {dtype}".rstrip() if ranks else op


def compare_exchanges(graph: OpGraph, rank: int, entries: Iterable[LogEntry]) -> Iterator[Finding]:
    """Yield the exchanges of a rank whose rows differ from the counts, for a log whose operations match the graph.

    A forward exchanges counts once for each layer with experts and sends rows there and back; its backward sends
    gradients in the same way, from the last layer on. A backward that recomputes a layer first exchanges counts and
    rows like the forward; those counts apply only to these rows.
    """
    estimates = {
        str(graph.ops[i]): int(graph.stop[i] - graph.start[i])
        for i in graph.rank_ops(rank)
        if graph.ops[i].kind is OpKind.ALL_TO_ALL
    }
    counts: dict[tuple[int, int, int | None, int | None], list[Traffic]] = {}
    on_way_back: set[tuple[int, Op | None]] = set()
    """Computations that have sent rows and not got them back; two may alternate."""
    for entry in entries:
        if not entry.traffic:
            continue
        op = parse_op(entry.op)
        layers = counts.setdefault((entry.step, op.stage, op.micro_batch, op.split), [])
        if not moves_rows(op.kind, entry.dtype):
            layers.append(entry.traffic)
            continue
        announced, computation = layers[-1], (entry.step, op.target)
        is_way_back = computation in on_way_back
        expected = tuple((received, sent) for sent, received in announced) if is_way_back else announced
        visits, rows = (sum(sent for sent, _ in traffic) for traffic in (announced, entry.traffic))
        if entry.traffic != expected:
            yield _exchange_finding(
                rank, entry, f"rows {_traffic_text(entry.traffic)} moved, and {_traffic_text(expected)} were announced"
            )
        elif entry.numel * visits != estimates[entry.op] * rows:
            yield _exchange_finding(
                rank, entry, f"{rows} rows make {entry.numel} elements, and {visits} {estimates[entry.op]}"
            )
        if is_way_back and op.target is not None and op.target.kind is not OpKind.FORWARD:
            layers.pop()
        on_way_back ^= {computation}


def _traffic_text(traffic: Traffic) -> str:
    sent, received = zip(*traffic, strict=True)
    return f"{list(sent)} to and {list(received)} from the members"


def _exchange_finding(rank: int, entry: LogEntry, fact: str) -> Finding:
    return LOG_DIFFERS.finding(
        f"rank {rank}, step {entry.step}, {entry.op}: {fact}",
        witness=OpsWitness((WitnessOp(rank, entry.op),)),
    )
