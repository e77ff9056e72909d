"""Latency and bandwidth of every edge, from messages timed on it, in the form that the simulator takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeproof.exec.link_fit import LinkFit, fit_link
from pipeproof.exec.profile import by_size
from pipeproof.exec.rehearse.pinged import EdgeTimes
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.network import NetworkSpec
from pipeproof.specs.profile_file import SizedSpread


@dataclass(frozen=True, slots=True)
class Edge:
    """One channel as measured: ``messages``, and the line through them."""

    channel: str
    source: int
    destination: int
    link: LinkFit
    messages: tuple[SizedSpread, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "channel": self.channel,
            "source": self.source,
            "destination": self.destination,
            "latency_us": self.link.latency_us,
            "bandwidth": self.link.bandwidth,
            "residual": self.link.residual,
            "messages": [message.model_dump(mode="json", by_alias=True) for message in self.messages],
        }


def edges_of(graph: OpGraph, times: EdgeTimes) -> tuple[Edge, ...]:
    """Each channel of a graph on which messages were timed."""
    found = []
    for channel in graph.channels:
        name = str(channel)
        if name in times:
            messages = spread_of([times[name]])
            found.append(Edge(name, channel.src, channel.dst, fitted(messages), messages))
    return tuple(found)


def network_of(num_ranks: int, edges: Sequence[Edge], times: EdgeTimes) -> dict[str, Any] | None:
    """``cost.network`` of a plan whose ranks are all on this machine; None without an edge.

    ``node`` is the line through the messages of all edges, for what has none of its own; of several channels between
    two ranks the slowest is their edge.
    """
    if not edges:
        return None
    node = fitted(spread_of(list(times.values())))
    slowest: dict[tuple[int, int], LinkFit] = {}
    for edge in edges:
        pair, largest = (edge.source, edge.destination), edge.messages[-1].num_bytes
        if pair not in slowest or edge.link.time_us(largest) > slowest[pair].time_us(largest):
            slowest[pair] = edge.link
    network = {
        "ranks_per_node": num_ranks,
        "node": _link(node),
        "edges": [{"source": a, "destination": b, **_link(link)} for (a, b), link in slowest.items()],
    }
    NetworkSpec.model_validate(network)
    return network


def spread_of(times: Sequence[Mapping[int, Sequence[float]]]) -> tuple[SizedSpread, ...]:
    """By bytes, how long messages took; several channels together."""
    nanoseconds = defaultdict[int, list[int]](list)
    for of_channel in times:
        for num_bytes, microseconds in of_channel.items():
            nanoseconds[num_bytes] += [round(time * 1000) for time in microseconds]
    return by_size((num_bytes, time) for num_bytes, of_size in nanoseconds.items() for time in of_size)


def fitted(messages: Sequence[SizedSpread]) -> LinkFit:
    """The line through their medians."""
    return fit_link([(message.num_bytes, message.median_us) for message in messages])


def _link(link: LinkFit) -> dict[str, float]:
    return {"latency_us": link.latency_us, "bandwidth": link.bandwidth}
