"""Time over bytes, through measured points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Self


@dataclass(frozen=True, slots=True)
class Curve:
    """A time that never falls with the bytes: lines through the points.

    Below the smallest size it is constant, beyond the largest it goes on with
    the slope of the last line; through one point it is constant.
    """

    sizes: tuple[int, ...]
    times: tuple[Fraction, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[int, Fraction, int]]) -> Self:
        """The curve through (bytes, microseconds, how often measured), one or more, in order of their bytes.

        Where a larger size took less, the two count as one time, the mean by how often each was measured (isotonic
        regression by pooling adjacent violators; Barlow et al., Statistical inference under order restrictions, 1972).
        """
        pools: list[tuple[Fraction, int, list[int]]] = []
        for size, time, count in points:
            pool = (time, count, [size])
            while pools and pools[-1][0] > pool[0]:
                before, weight, sizes = pools.pop()
                total = weight + pool[1]
                pool = ((before * weight + pool[0] * pool[1]) / total, total, sizes + pool[2])
            pools.append(pool)
        pairs = [(size, time) for time, _, sizes in pools for size in sizes]
        return cls(tuple(size for size, _ in pairs), tuple(time for _, time in pairs))

    def at(self, num_bytes: int) -> Fraction:
        """Microseconds at a size, exact."""
        sizes, times = self.sizes, self.times
        if num_bytes <= sizes[0] or len(sizes) == 1:
            return times[0]
        after = min(bisect_right(sizes, num_bytes), len(sizes) - 1)
        low, high = sizes[after - 1], sizes[after]
        return times[after - 1] + (times[after] - times[after - 1]) * Fraction(num_bytes - low, high - low)
