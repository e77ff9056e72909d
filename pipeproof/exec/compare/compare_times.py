"""Comparison of the times of messages between hosts, which are corrected to one clock, with their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeproof.diagnostics.finding import Finding, OpsWitness, WitnessOp
from pipeproof.exec.rank.op_log import LogEntry, Timing, accuracy_between_ns, op_ids_of
from pipeproof.exec.run_codes import LOG_DIFFERS
from pipeproof.schedule.op_table import EdgeKind, OpGraph


def compare_times(
    graph: OpGraph, logs: Mapping[int, Sequence[LogEntry]], timings: Mapping[int, Timing]
) -> Iterator[Finding]:
    """Yield, for each pair of ranks on two hosts, the message that was received the longest before it was sent.

    A message counts if its receive ended before its send was posted by more than the possible error of the difference.
    ``logs`` are by rank, match the graph, and have times of one clock.
    """
    posted_ns, ended_ns = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for rank, entries in logs.items():
        for op_id, entry in zip(op_ids_of(graph, rank, entries), entries, strict=True):
            if op_id is not None:
                posted_ns[op_id, entry.step], ended_ns[op_id, entry.step] = entry.posted_ns, entry.end_ns
    earliest: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    steps = sorted({entry.step for entries in logs.values() for entry in entries})
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        pair = int(graph.rank[send]), int(graph.rank[receive])
        for step in steps if timings[pair[0]].host != timings[pair[1]].host else ():
            early_ns = posted_ns[send, step] - ended_ns[receive, step]
            earliest[pair] = max(earliest.get(pair, (0, 0, 0, 0)), (early_ns, step, send, receive))
    for (source, destination), (early_ns, step, send, receive) in sorted(earliest.items()):
        error_ns = accuracy_between_ns(timings[source], timings[destination])
        if early_ns > error_ns:
            sent, received = str(graph.ops[send]), str(graph.ops[receive])
            yield LOG_DIFFERS.finding(
                f"rank {destination}, step {step}: {received} ended {early_ns / 1000:g} us before rank {source} posted "
                f"{sent}, and the clocks of their hosts are compared with an error of at most {error_ns / 1000:g} us",
                help="the log has a message of another step, or a clock was slewed or stepped during the run",
                witness=OpsWitness((WitnessOp(source, sent, send), WitnessOp(destination, received, receive))),
            )
