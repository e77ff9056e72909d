"""Edges of a rehearsal: messages timed after its steps, and latency and bandwidth in the form of the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipeproof.comm.channel_models import message_bytes
from pipeproof.exec.rank.framework_protocol import Arrays, World
from pipeproof.exec.rank.idle_messages import TOKEN_BYTES, PingClock, Wire, one_way_us, way_back
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.specs.cost import NetworkSpec
from pipeproof.specs.profile_file import SizedSpread, by_size

USUAL_BYTES = (TOKEN_BYTES, 2**16, 2**20)
"""Sizes in addition to the plan's smallest and largest message."""
LARGE_BYTES = 2**24
"""Additional size on GPUs, whose links smaller messages do not saturate."""

_ROUNDS = 60
_LEAST_LOG = -40.0
"""Logarithm of a latency or a time per byte that is zero."""
_LEAST_US = 1e-3
_LEAST_SHARE = 1e-3
"""Least part of the largest message's time that its bytes must take for a measurable bandwidth."""

EdgeTimes = dict[str, dict[int, tuple[float, ...]]]
"""Microseconds of each message, by the channel's text and the message's bytes."""


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
    """Return the line through (bytes, microseconds) with the least relative error: twice counts as much as half.

    So the smallest messages determine the latency and the largest the bandwidth. If more bytes take no longer, the
    largest message's whole time counts for its bytes. The method is least squares of the logarithms, by Gauss-Newton
    steps on the logarithms of latency and time per byte, which keeps both positive.
    """
    sizes = np.array([num_bytes for num_bytes, _ in points], dtype=float)
    times = np.maximum([time for _, time in points], _LEAST_US)
    line = np.log([times.min(), times[-1] / sizes[-1]])
    for _ in range(_ROUNDS):
        parts = np.exp(line) * np.stack([np.ones(len(points)), sizes], axis=1)
        by_line = parts.sum(axis=1)
        step = np.linalg.lstsq(parts / by_line[:, None], np.log(times / by_line), rcond=None)[0]
        line = np.maximum(line + np.clip(step, -1, 1), _LEAST_LOG)
    latency, per_byte = np.exp(line)
    if len(points) < 2 or per_byte * sizes[-1] < _LEAST_SHARE * times[-1]:
        latency, per_byte = 0.0, float(times[-1] / sizes[-1])
    rounded = LinkFit(round(float(latency), 3), float(f"{1e-3 / float(per_byte):.5g}"), 0.0)
    off = max(abs(rounded.time_us(int(n)) / t - 1) for n, t in zip(sizes, times, strict=True))
    return LinkFit(rounded.latency_us, rounded.bandwidth, round(float(off), 3))


def ping_sizes(graph: OpGraph, device: str) -> tuple[int, ...]:
    """Return the bytes of the messages to time, in order; the result is the same on every rank."""
    planned = message_bytes(graph)[np.flatnonzero(graph.is_kind(SEND_KINDS))]
    extremes = (int(planned.min()), int(planned.max())) if len(planned) else ()
    return tuple(sorted({*extremes, *USUAL_BYTES, *((LARGE_BYTES,) if device == "gpu" else ())}))


def ping_edges(
    world: World,
    arrays: Arrays,
    clock: PingClock,
    graph: OpGraph,
    device: str,
    progress: Callable[[str], None],
) -> EdgeTimes:
    """Time every channel that has a way back, one after the other; every rank must call this.

    The result has the channels on which this rank sends. All ranks wait at a barrier before each channel: nothing else
    is then under way.
    """
    wire, sizes = Wire(world.rank, world.channels, arrays, clock), ping_sizes(graph, device)
    measured = {}
    for channel in graph.channels:
        progress(f"timing {channel}")
        world.barrier()
        back = way_back(graph.channels, channel)
        if back is not None and world.rank in (channel.src, channel.dst):
            times = one_way_us(wire, channel, back, sizes)
            if world.rank == channel.src:
                measured[str(channel)] = times
    return measured


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
            messages = spread_of([times[name]])
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
        key: fitted(spread_of(of_kind))
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


def spread_of(times: Sequence[Mapping[int, Sequence[float]]]) -> tuple[SizedSpread, ...]:
    """Return the spread of message times by bytes, for several channels together."""
    nanoseconds = defaultdict[int, list[int]](list)
    for of_channel in times:
        for num_bytes, microseconds in of_channel.items():
            nanoseconds[num_bytes] += [round(time * 1000) for time in microseconds]
    return by_size((num_bytes, time) for num_bytes, of_size in nanoseconds.items() for time in of_size)


def fitted(messages: Sequence[SizedSpread]) -> LinkFit:
    """Return the line through the medians of messages."""
    return fit_link([(message.num_bytes, message.median_us) for message in messages])


def _link(link: LinkFit) -> dict[str, float]:
    return {"latency_us": link.latency_us, "bandwidth": link.bandwidth}
