"""Matching as it is defined, on the networkx graph: to be read, and for the column version to agree with.

``OpGraph.match`` computes the same pairs for graphs of any size; the rules
use that. A test compares the two on random programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS, parse_op
from pipeproof.verify.fifo_matching import partner_of

if TYPE_CHECKING:
    import networkx as nx


def fifos(graph: nx.DiGraph[int]) -> dict[int, tuple[list[int], list[int]]]:
    """By channel: its sends and its receives as op ids, each in the order in which their rank issues them."""
    channels: dict[int, tuple[list[int], list[int]]] = {}
    for op_id in sorted(graph.nodes):  # ids count up along each rank's program
        node = graph.nodes[op_id]
        if "channel" in node:
            sends, receives = channels.setdefault(node["channel"], ([], []))
            side = sends if parse_op(node["op"]).kind in SEND_KINDS else receives
            side.append(op_id)
    return channels


def matched(graph: nx.DiGraph[int]) -> set[tuple[int, int]]:
    """(send, receive): the k-th send of a channel meets its k-th receive, independent of their contents."""
    return {
        pair for sends, receives in fifos(graph).values() for pair in zip(sends, receives, strict=False)
    }  # the rest on one side has no counterpart


def unmatched(graph: nx.DiGraph[int]) -> set[int]:
    """The sends and receives without a partner."""
    met = {op_id for pair in matched(graph) for op_id in pair}
    return {op_id for op_id, node in graph.nodes(data=True) if "channel" in node and op_id not in met}


def mismatched(graph: nx.DiGraph[int]) -> set[tuple[int, int]]:
    """The pairs of a send with another receive than its counterpart."""
    text = {op_id: node["op"] for op_id, node in graph.nodes(data=True)}
    return {
        (send, receive)
        for send, receive in matched(graph)
        if partner_of(parse_op(text[send])) != parse_op(text[receive])
    }


def out_of_order(graph: nx.DiGraph[int], groups: dict[int, tuple[int, ...]]) -> set[tuple[int, int]]:
    """(group, rank): the members that issue other collectives than the group's first, or in another order."""
    calls: dict[tuple[int, int], list[str]] = {}
    for op_id in sorted(graph.nodes):
        node = graph.nodes[op_id]
        if "group" in node and parse_op(node["op"]).kind in COLLECTIVE_KINDS:
            calls.setdefault((node["group"], node["rank"]), []).append(node["op"])
    return {
        (group, rank)
        for group, members in groups.items()
        for rank in members
        if calls.get((group, rank), []) != calls.get((group, members[0]), [])
    }
