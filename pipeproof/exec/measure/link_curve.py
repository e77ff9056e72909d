"""Times of messages between two ranks by size, in each direction alone and in both, and the line through them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from pipeproof.exec.rank.group_endpoint import CHANNELS
from pipeproof.exec.rank.ping_pong import Wire, crossing_us, one_way_us
from pipeproof.testing.endpoint_protocol import Endpoint, Outcome, World

_ROUNDS = 60
_LEAST_LOG = -40.0
"""Logarithm of a latency or a time per byte that is zero."""
_LEAST_US = 1e-3
_LEAST_SHARE = 1e-3
"""Least share of the bytes in the largest message's time for which a bandwidth is measurable."""


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

    So the smallest messages determine the latency and the largest the bandwidth. Where more bytes take no longer, all
    of the largest message's time counts for its bytes. The method is least squares of the logarithms, by Gauss-Newton
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
    rounded = LinkFit(round(float(latency), 3), _to_digits(1e-3 / float(per_byte)), 0.0)
    off = max(abs(rounded.time_us(int(n)) / t - 1) for n, t in zip(sizes, times, strict=True))
    return LinkFit(rounded.latency_us, rounded.bandwidth, round(float(off), 3))


def _to_digits(value: float) -> float:
    return float(f"{value:.5g}")


SIZES = tuple(2**power for power in (3, 6, 9, 12, 15, 18, 21, 24, 27, 28))
"""Bytes, 8 to 256 Mi."""
BUDGET_S = 8.0
"""Time limit of the curve, which ends before the size that would exceed it."""
POINT_TIMEOUT_S = 30.0
"""Timeout of one size."""

_FORWARD, _BACKWARD = CHANNELS[0], CHANNELS[1]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size: median microseconds from rank 0 to 1, from 1 to 0, and of messages in both directions at once."""

    num_bytes: int
    forward_us: float
    backward_us: float
    both_us: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of the curve, smallest first; ``ended`` is the reason if it ends before the largest size.

    ``is_broken`` is True if messages of a size did not arrive.
    """

    points: tuple[CurvePoint, ...]
    ended: str = ""
    is_broken: bool = False

    @property
    def forward(self) -> LinkFit:
        """Line through messages from rank 0 to 1."""
        return fit_link([(point.num_bytes, point.forward_us) for point in self.points])

    @property
    def backward(self) -> LinkFit:
        """Line through messages from rank 1 to 0."""
        return fit_link([(point.num_bytes, point.backward_us) for point in self.points])

    @property
    def both(self) -> LinkFit:
        """Line through messages in both directions at once; the bandwidth is that of each direction."""
        return fit_link([(point.num_bytes, point.both_us) for point in self.points])

    @property
    def one_way(self) -> LinkFit:
        """Line through messages of either direction, each alone."""
        return fit_link([(p.num_bytes, us) for p in self.points for us in (p.forward_us, p.backward_us)])


def time_size(end: Endpoint, num_bytes: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Time the messages of one size on a rank, and messages in both directions at once; a body of a probe."""
    wire: Wire = end.wire  # type: ignore[attr-defined]  # endpoints built on the adapter have it
    ways = [
        one_way_us(wire, channel, back, [num_bytes])[num_bytes]
        for channel, back in ((_FORWARD, _BACKWARD), (_BACKWARD, _FORWARD))
    ]
    return ways[wire.rank], crossing_us(wire, _FORWARD, _BACKWARD, num_bytes)


def device_facts(end: Endpoint) -> Any:
    """Return a rank's facts about its framework and device; a body of a probe."""
    return end.facts()  # type: ignore[attr-defined]


def failure_text(outcomes: Sequence[Outcome]) -> str:
    """Text on the ranks that did not return; empty if all did."""
    return "; ".join(
        f"rank {rank} {outcome.kind}{f': {outcome.detail}' if outcome.detail else ''}"
        for rank, outcome in enumerate(outcomes)
        if outcome.kind != "returned"
    )


def measure_curve(world: World, sizes: Sequence[int] = SIZES) -> Curve:
    """Time one size after the other, until the time limit is reached or messages of a size do not arrive."""
    points: list[CurvePoint] = []
    began = time.monotonic()
    for num_bytes in sizes:
        before = time.monotonic()
        outcomes = world.run(partial(time_size, num_bytes=num_bytes), POINT_TIMEOUT_S)
        if failure := failure_text(outcomes):
            return Curve(tuple(points), f"messages of {num_bytes} bytes did not arrive: {failure}", is_broken=True)
        (forward, both), (backward, _) = (outcome.value for outcome in outcomes)
        points.append(CurvePoint(num_bytes, *(round(median(times), 3) for times in (forward, backward, both))))
        now, larger = time.monotonic(), [size for size in sizes if size > num_bytes]
        if larger and now - began + (now - before) * larger[0] / num_bytes > BUDGET_S and num_bytes >= 2**20:
            return Curve(tuple(points), f"messages of {larger[0]} bytes would exceed the time limit of {BUDGET_S:g} s")
    return Curve(tuple(points))
