"""Ranks whose logs have no end: the ranks that each of them waits for, and the cycle of these waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from pipeproof.diagnostics.finding import CycleWitness, Finding, OpsWitness, WitnessOp
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED
from pipeproof.interop.traces.trace_graph import channels_of
from pipeproof.interop.traces.trace_log import LoggedCall, LoggedGroup, RankLog
from pipeproof.interop.traces.trace_text import call_text, position_text


def stuck_findings(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Find PP931, a cycle of ranks that wait for each other, or else PP933, operations that were never issued.

    A rank waits for another rank if the operation that blocks its host needs an
    operation that the other rank has not issued.
    """
    graph = _waits(logs)
    cycle = _shortest_cycle(graph)
    if cycle:
        yield _cycle_finding(graph, cycle)
        return
    by_rank = {log.rank: log for log in logs}
    for rank, other in sorted(graph.edges):
        if graph.out_degree(other):
            continue
        call: LoggedCall = graph.edges[rank, other]["call"]
        last = by_rank[other].calls[-1:]
        last_text = f"its log ends after {call_text(last[0])}" if last else "its log has no operation"
        yield NEVER_ISSUED.finding(
            f"rank {rank} waits in {call_text(call)}{position_text(call)}, and rank {other} never issued its part",
            call.line, f"rank {other}: {last_text}", OpsWitness((WitnessOp(rank, call_text(call)),)),
        )  # fmt: skip


def _waits(logs: Sequence[RankLog]) -> nx.DiGraph[int]:
    """Return a graph with an edge, which has the call, from each blocked rank to every rank that it waits for."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(log.rank for log in logs)
    has_partner = {}
    for channel in channels_of(logs):
        for calls, partner_calls in ((channel.sends, channel.receives), (channel.receives, channel.sends)):
            for position, call in enumerate(calls):
                has_partner[call.rank, call.seq] = position < len(partner_calls)
    collectives = {log.rank: _collectives(log) for log in logs}
    for log in logs:
        waiting_for = set(log.waiting_for)
        for call in log.calls:
            if call.seq not in waiting_for:
                continue
            if call.is_message:
                if call.peer is not None and has_partner.get((call.rank, call.seq)) is False:
                    graph.add_edge(log.rank, call.peer, call=call)
                continue
            position = collectives[log.rank][call.group].index(call.seq)
            for member in call.group.ranks:
                if member in collectives and len(collectives[member].get(call.group, ())) <= position:
                    graph.add_edge(log.rank, member, call=call)
    return graph


def _collectives(log: RankLog) -> dict[LoggedGroup, list[int]]:
    seqs_by_group: dict[LoggedGroup, list[int]] = {}
    for call in log.calls:
        if not call.is_message:
            seqs_by_group.setdefault(call.group, []).append(call.seq)
    return seqs_by_group


def _shortest_cycle(graph: nx.DiGraph[int]) -> list[int]:
    cycles = [
        nx.shortest_path(graph, after, rank)
        for component in nx.strongly_connected_components(graph)
        if len(component) > 1
        for rank in sorted(component)
        for after in sorted(graph.successors(rank))
        if after in component
    ]
    best = min(cycles, key=lambda path: (len(path), path), default=[])
    first = best.index(min(best)) if best else 0
    return best[first:] + best[:first]


def _cycle_finding(graph: nx.DiGraph[int], cycle: Sequence[int]) -> Finding:
    calls: list[LoggedCall] = [
        graph.edges[rank, other]["call"] for rank, other in zip(cycle, (*cycle[1:], cycle[0]), strict=True)
    ]
    lines = [
        f"rank {rank} waits in {call_text(call)}{position_text(call)} for rank {other}, which has not issued its part"
        for rank, other, call in zip(cycle, (*cycle[1:], cycle[0]), calls, strict=True)
    ]
    ranks = f"ranks {', '.join(map(str, sorted(cycle)))}"
    witness = CycleWitness(tuple(WitnessOp(call.rank, call_text(call)) for call in calls))
    suggested_fix = "let one of them issue the operation that the other waits for before it waits itself, "
    suggested_fix += "or issue both ends in one batch"
    message = "\n".join((f"{ranks} wait for each other, and none of them continues", *lines))
    return HANG_CYCLE.finding(message, calls[0].line, suggested_fix, witness)
