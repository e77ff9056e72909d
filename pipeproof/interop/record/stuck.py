"""Ranks whose logs break off: whom each of them waits for, and the circle in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from pipeproof.interop.hang.codes import HANG_CYCLE, NEVER_ISSUED
from pipeproof.interop.record.channels import channels_of
from pipeproof.interop.record.log import LoggedCall, LoggedGroup, RankLog
from pipeproof.interop.record.words import call_text, place_text
from pipeproof.specs.finding import CycleWitness, Finding, OpsWitness, Severity, WitnessOp


def stuck_findings(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """PP931 for a circle of ranks that wait for each other, else PP933 for what a rank waits for in vain.

    A rank waits for another one if the operation that holds its host needs
    something that the other has not issued.
    """
    graph = _waits(logs)
    cycle = _shortest_cycle(graph)
    if cycle:
        yield _circle(graph, cycle)
        return
    by_rank = {log.rank: log for log in logs}
    for rank, other in sorted(graph.edges):
        if graph.out_degree(other):
            continue
        call: LoggedCall = graph.edges[rank, other]["call"]
        last = by_rank[other].calls[-1:]
        did = f"its log ends after {call_text(last[0])}" if last else "its log has no operation"
        yield Finding(
            NEVER_ISSUED.code, Severity.ERROR,
            f"rank {rank} waits in {call_text(call)}{place_text(call)}, and rank {other} never issued its part",
            call.line, f"rank {other}: {did}", OpsWitness((WitnessOp(rank, call_text(call)),)),
        )  # fmt: skip


def _waits(logs: Sequence[RankLog]) -> nx.DiGraph[int]:
    """An edge from each rank that is held to every rank that has not issued what it needs, with the call."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(log.rank for log in logs)
    partners = {}
    for channel in channels_of(logs):
        for mine, theirs in ((channel.sends, channel.receives), (channel.receives, channel.sends)):
            for place, call in enumerate(mine):
                partners[call.rank, call.seq] = place < len(theirs)
    counts = {log.rank: _collectives(log) for log in logs}
    for log in logs:
        held = set(log.held_by)
        for call in log.calls:
            if call.seq not in held:
                continue
            if call.is_message:
                if call.peer is not None and partners.get((call.rank, call.seq)) is False:
                    graph.add_edge(log.rank, call.peer, call=call)
                continue
            place = counts[log.rank][call.group].index(call.seq)
            for member in call.group.ranks:
                if member in counts and len(counts[member].get(call.group, ())) <= place:
                    graph.add_edge(log.rank, member, call=call)
    return graph


def _collectives(log: RankLog) -> dict[LoggedGroup, list[int]]:
    found: dict[LoggedGroup, list[int]] = {}
    for call in log.calls:
        if not call.is_message:
            found.setdefault(call.group, []).append(call.seq)
    return found


def _shortest_cycle(graph: nx.DiGraph[int]) -> list[int]:
    ways = [
        nx.shortest_path(graph, after, rank)
        for part in nx.strongly_connected_components(graph)
        if len(part) > 1
        for rank in sorted(part)
        for after in sorted(graph.successors(rank))
        if after in part
    ]
    best = min(ways, key=lambda way: (len(way), way), default=[])
    first = best.index(min(best)) if best else 0
    return best[first:] + best[:first]


def _circle(graph: nx.DiGraph[int], cycle: Sequence[int]) -> Finding:
    calls: list[LoggedCall] = [
        graph.edges[rank, other]["call"] for rank, other in zip(cycle, (*cycle[1:], cycle[0]), strict=True)
    ]
    lines = [
        f"rank {rank} waits in {call_text(call)}{place_text(call)} for rank {other}, which has not issued its part"
        for rank, other, call in zip(cycle, (*cycle[1:], cycle[0]), calls, strict=True)
    ]
    ranks = f"ranks {', '.join(map(str, sorted(cycle)))}"
    witness = CycleWitness(tuple(WitnessOp(call.rank, call_text(call)) for call in calls))
    mend = "let one of them issue what the other waits for before it waits itself, or both ends in one batch"
    message = "\n".join((f"{ranks} wait for each other, and none of them goes on", *lines))
    return Finding(HANG_CYCLE.code, Severity.ERROR, message, calls[0].line, mend, witness)
