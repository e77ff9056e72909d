"""Histogram: number of values in each of several equal ranges."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def histogram(ordered: Sequence[Fraction], num_bins: int) -> list[tuple[Fraction, Fraction, int]]:
    """(from, to, how many values) for ``num_bins`` equal ranges between the extremes; one range if all are equal.

    A value on a border is of the range above it, the longest of the last.

    Raises:
        ValueError: there is no value.
    """
    if not ordered:
        raise ValueError("an empty sample has no histogram")
    low, high = ordered[0], ordered[-1]
    if low == high:
        return [(low, high, len(ordered))]
    width = (high - low) / num_bins
    counts = [0] * num_bins
    for value in ordered:
        counts[min(num_bins - 1, int((value - low) / width))] += 1
    return [(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]
