"""Edges of a rehearsal: messages timed after its steps, and latency and bandwidth in the form of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeproof.exec.rank.idle_messages import EdgeTimes, spread_by_size
from pipeproof.schedule.op_table import OpGraph
from pipeproof.specs.cost import NetworkSpec
from pipeproof.specs.profile_file import SizedSpread

_LEAST_US = 1e-3
_LEAST_SHARE = 1e-3
"""Least part of the largest message's time that its bytes must take for a measurable bandwidth."""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Line of a link: ``latency_us`` in microseconds, ``bandwidth`` in GB/s (10^9 bytes), neither negative.

    ``residual`` is the largest relative distance of a point to the line: 0.1 is a tenth.
    """

    latency_us: float
    bandwidth: float
    residual: float

    def time_us(self, num_bytes: int) -> float:
        """Return a message's microseconds by the line."""
        return self.latency_us + num_bytes / self.bandwidth / 1000


def fit_link(points: Sequence[tuple[int, float]]) -> LinkFit:
    """Return the line through the smallest and the largest of (bytes, microseconds), which are in order of the bytes.

    If more bytes take no longer, the largest message's whole time counts for its bytes.
    """
    times = [max(time, _LEAST_US) for _, time in points]
    (smallest, _), (largest, _) = points[0], points[-1]
    per_byte = (times[-1] - times[0]) / max(largest - smallest, 1)
    latency = max(0.0, times[0] - smallest * per_byte)
    if per_byte * largest < _LEAST_SHARE * times[-1]:
        latency, per_byte = 0.0, times[-1] / largest
    rounded = LinkFit(round(latency, 3), float(f"{1e-3 / per_byte:.5g}"), 0.0)
    off = max(abs(rounded.time_us(num_bytes) / time - 1) for (num_bytes, _), time in zip(points, times, strict=True))
    return replace(rounded, residual=round(off, 3))


@dataclass(frozen=True, slots=True)
class Edge:
    """One measured channel: its messages and the line through them."""

    channel: str
    source: int
    destination: int
    link: LinkFit
    messages: tuple[SizedSpread, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "channel": self.channel,
            "source": self.source,
            "destination": self.destination,
            **asdict(self.link),
            "messages": [message.model_dump(mode="json", by_alias=True) for message in self.messages],
        }


def edges_of(graph: OpGraph, times: EdgeTimes) -> tuple[Edge, ...]:
    """Return each channel of a graph on which messages were timed."""
    edges = []
    for channel in graph.channels:
        name = str(channel)
        if name in times:
            messages = spread_by_size([times[name]])
            edges.append(Edge(name, channel.src, channel.dst, fitted(messages), messages))
    return tuple(edges)


def network_of(hosts: Sequence[str], edges: Sequence[Edge], times: EdgeTimes) -> dict[str, Any] | None:
    """Return ``cost.network`` of a plan whose rank r is on ``hosts[r]``; None without an edge.

    ``node`` is the line through the messages of all edges within hosts, and ``between`` of all edges between hosts;
    they are for pairs of ranks without an edge. ``between`` is left out if all ranks are on one host, or if no edge
    between hosts was timed. Of several channels between two ranks the slowest is their edge.
    """
    if not edges:
        return None
    inside = {edge.channel for edge in edges if hosts[edge.source] == hosts[edge.destination]}
    lines = {
        key: fitted(spread_by_size(of_kind))
        for key, of_kind in (
            ("node", [of_channel for channel, of_channel in times.items() if channel in inside]),
            ("between", [of_channel for channel, of_channel in times.items() if channel not in inside]),
        )
        if of_kind
    }
    slowest: dict[tuple[int, int], LinkFit] = {}
    for edge in edges:
        pair, largest = (edge.source, edge.destination), edge.messages[-1].num_bytes
        if pair not in slowest or edge.link.time_us(largest) > slowest[pair].time_us(largest):
            slowest[pair] = edge.link
    network = {
        "ranks_per_node": _ranks_per_node(hosts),
        # Required even if no two ranks share a host; it is not used then.
        "node": _link(lines.get("node") or lines["between"]),
        **({"between": _link(lines["between"])} if "between" in lines else {}),
        "edges": [{"source": a, "destination": b, **_link(link)} for (a, b), link in slowest.items()],
    }
    NetworkSpec.model_validate(network)
    return network


def _ranks_per_node(hosts: Sequence[str]) -> int:
    """Return the number of consecutive ranks of each host; 1 if this number differs or ranks are not consecutive.

    ``cost.network`` knows only equal numbers. With 1 every pair without an edge counts as a pair on two hosts.
    """
    size = len(hosts) // len({*hosts})
    blocks = [{*hosts[start : start + size]} for start in range(0, len(hosts), size)]
    is_regular = len(blocks) == len({*hosts}) and all(len(block) == 1 for block in blocks)
    return size if is_regular else 1


def fitted(messages: Sequence[SizedSpread]) -> LinkFit:
    """Return the line through the medians of messages."""
    return fit_link([(message.num_bytes, message.median_us) for message in messages])


def _link(link: LinkFit) -> dict[str, float]:
    return {"latency_us": link.latency_us, "bandwidth": link.bandwidth}
