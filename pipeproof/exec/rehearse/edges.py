"""Latency and bandwidth of every edge, from bare messages, in the form that the simulator takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeproof.exec.bare import BareEnd
from pipeproof.exec.profile import bare_samples, by_size
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.network import LinkSpec
from pipeproof.specs.profile_file import SizedSpread


@dataclass(frozen=True, slots=True)
class Edge:
    """One channel as measured: ``messages``, and the line through them.

    ``latency_us`` are microseconds, ``bandwidth`` is in GB/s (10^9 bytes).
    """

    channel: str
    source: int
    destination: int
    latency_us: float
    bandwidth: float
    messages: tuple[SizedSpread, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "channel": self.channel,
            "source": self.source,
            "destination": self.destination,
            "latency_us": self.latency_us,
            "bandwidth": self.bandwidth,
            "messages": [message.model_dump(mode="json", by_alias=True) for message in self.messages],
        }


def edges_of(graph: OpGraph, bare: Mapping[int, Sequence[BareEnd]]) -> tuple[Edge, ...]:
    """Each channel of a graph on which a message was timed; ``bare`` has the ends by rank."""
    found = []
    for channel in graph.channels:
        name = str(channel)
        ends = {rank: [end for end in bare[rank] if end.channel == name] for rank in (channel.src, channel.dst)}
        messages = by_size(bare_samples(ends))
        if messages:
            found.append(Edge(name, channel.src, channel.dst, *fitted(messages), messages))
    return tuple(found)


def network_of(num_ranks: int, bare: Mapping[int, Sequence[BareEnd]]) -> dict[str, Any] | None:
    """``cost.network`` of a plan whose ranks are all on this machine, every edge alike; None without a message."""
    messages = by_size(bare_samples(bare))
    if not messages:
        return None
    latency_us, bandwidth = fitted(messages)
    LinkSpec.model_validate({"latency_us": latency_us, "bandwidth": bandwidth})
    return {"ranks_per_node": num_ranks, "node": {"latency_us": latency_us, "bandwidth": bandwidth}}


def fitted(messages: Sequence[SizedSpread]) -> tuple[float, float]:
    """Microseconds and GB/s of the line through the medians of the smallest and the largest messages.

    Neither is negative: where larger messages took no longer, all the time of the largest is for its bytes.
    """
    small, large = messages[0], messages[-1]
    times = [max(message.median_us, 1e-3) for message in (small, large)]
    if times[1] > times[0]:
        per_byte = (times[1] - times[0]) / (large.num_bytes - small.num_bytes)
    else:
        per_byte = times[1] / large.num_bytes
    latency_us = max(0.0, times[0] - per_byte * small.num_bytes) if times[1] > times[0] else 0.0
    return round(latency_us, 3), round(1e-3 / per_byte, 4)
