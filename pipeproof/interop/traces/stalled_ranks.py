"""Ranks whose logs have no end: the ranks that each of them waits for, and the cycle of these waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, absence_finding, cycle_finding
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED
from pipeproof.interop.traces.trace_graph import channels_of, collectives_of
from pipeproof.interop.traces.trace_log import LoggedCall, RankLog
from pipeproof.interop.traces.trace_text import call_text


def stuck_findings(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Find PP931, a cycle of ranks that wait for each other, or else PP933, operations that were never issued.

    A rank waits for another rank if the operation that blocks its host needs an
    operation that the other rank has not issued.
    """
    graph = _waits(logs)
    if cycle := graph.cycle():
        suggested_fix = "let one of them issue the operation that the other waits for before it waits itself, "
        yield cycle_finding(HANG_CYCLE, cycle, suggested_fix + "or issue both ends in one batch")
        return
    by_rank = {log.rank: log for log in logs}
    for (rank,) in graph.ends():
        if graph.waiters(rank):
            last = by_rank[rank].calls[-1:]
            last_text = f"ends after {call_text(last[0])}" if last else "has no operation"
            what, lines = f"rank {rank} never issued its part of", (f"the log of rank {rank} {last_text}",)
            yield absence_finding(NEVER_ISSUED, graph, {rank: rank}, what, lines)


def _waits(logs: Sequence[RankLog]) -> WaitGraph[int]:
    known = {log.rank for log in logs}
    graph = WaitGraph(sorted(known))
    blocking = {(log.rank, seq) for log in logs for seq in log.waiting_for}
    for channel in channels_of(logs):
        matched = min(len(channel.sends), len(channel.receives))
        for call in (*channel.sends[matched:], *channel.receives[matched:]):
            other = channel.dst if call.rank == channel.src else channel.src
            _add(graph, call, other, blocking)
    for (group, _), calls in collectives_of(logs).items():
        for call in calls.values():
            for member in sorted(known & set(group.ranks) - calls.keys()):
                _add(graph, call, member, blocking)
    return graph


def _add(graph: WaitGraph[int], call: LoggedCall, other: int, blocking: set[tuple[int, int]]) -> None:
    if (call.rank, call.seq) in blocking:
        why = "which has not issued its part"
        graph.add(call.rank, other, Wait(call.rank, call_text(call), f"rank {other}", why, call.at, call.line))
