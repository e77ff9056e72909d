"""What messages between two ranks take over sizes: each direction alone, and both at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from pipeproof.exec.group_endpoint import CHANNELS
from pipeproof.exec.link_fit import LinkFit, fit_link
from pipeproof.exec.pings import Wire, crossing_us, one_way_us
from pipeproof.testing.endpoint import Endpoint, Outcome, World

SIZES = tuple(2**power for power in (3, 6, 9, 12, 15, 18, 21, 24, 27, 28))
"""Bytes, 8 to 256 Mi."""
BUDGET_S = 8.0
"""The curve ends before the size that would bring it beyond this."""
POINT_TIMEOUT_S = 30.0
"""After this long a size counts as one that does not come through."""

_FORWARD, _BACKWARD = CHANNELS[0], CHANNELS[1]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size: medians in microseconds, from rank 0 to 1, from 1 to 0, and until both have it from each other."""

    num_bytes: int
    forward_us: float
    backward_us: float
    both_us: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The points, smallest first; ``ended`` says why they end before the largest size, empty where they do not.

    ``is_broken`` where that is because messages of a size did not come through.
    """

    points: tuple[CurvePoint, ...]
    ended: str = ""
    is_broken: bool = False

    @property
    def forward(self) -> LinkFit:
        """The line through messages from rank 0 to 1."""
        return fit_link([(point.num_bytes, point.forward_us) for point in self.points])

    @property
    def backward(self) -> LinkFit:
        """The line through messages from rank 1 to 0."""
        return fit_link([(point.num_bytes, point.backward_us) for point in self.points])

    @property
    def both(self) -> LinkFit:
        """The line through messages that cross each other; the bandwidth is that of each direction."""
        return fit_link([(point.num_bytes, point.both_us) for point in self.points])

    @property
    def one_way(self) -> LinkFit:
        """The line through messages of either direction, each alone."""
        return fit_link([(p.num_bytes, us) for p in self.points for us in (p.forward_us, p.backward_us)])


def time_size(end: Endpoint, num_bytes: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a rank does for one size: microseconds of its messages, and of those that cross; a body of a probe."""
    wire: Wire = end.wire  # type: ignore[attr-defined]  # of endpoints that stand on the adapter
    ways = [
        one_way_us(wire, there, back, [num_bytes])[num_bytes]
        for there, back in ((_FORWARD, _BACKWARD), (_BACKWARD, _FORWARD))
    ]
    return ways[wire.rank], crossing_us(wire, _FORWARD, _BACKWARD, num_bytes)


def facts(end: Endpoint) -> Any:
    """What a rank's framework says of itself and of the device; a body of a probe."""
    return end.facts()  # type: ignore[attr-defined]


def what_befell(outcomes: Sequence[Outcome]) -> str:
    """What became of ranks that did not return; empty where all did."""
    return "; ".join(
        f"rank {rank} {one.kind}{f': {one.detail}' if one.detail else ''}"
        for rank, one in enumerate(outcomes)
        if one.kind != "returned"
    )


def measure_curve(world: World, sizes: Sequence[int] = SIZES) -> Curve:
    """Time one size after the other, until the budget is used up or a size does not come through."""
    points: list[CurvePoint] = []
    began = time.monotonic()
    for num_bytes in sizes:
        before = time.monotonic()
        outcomes = world.run(partial(time_size, num_bytes=num_bytes), POINT_TIMEOUT_S)
        if odd := what_befell(outcomes):
            return Curve(tuple(points), f"messages of {num_bytes} bytes did not come through: {odd}", is_broken=True)
        (forward, both), (backward, _) = (one.value for one in outcomes)
        points.append(CurvePoint(num_bytes, *(round(median(times), 3) for times in (forward, backward, both))))
        now, larger = time.monotonic(), [size for size in sizes if size > num_bytes]
        if larger and now - began + (now - before) * larger[0] / num_bytes > BUDGET_S and num_bytes >= 2**20:
            return Curve(tuple(points), f"messages of {larger[0]} bytes would take the curve beyond {BUDGET_S:g} s")
    return Curve(tuple(points))
