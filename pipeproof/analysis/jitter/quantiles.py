"""Quantiles of a sample, and how far they may be from those of what it was drawn from.

The interval of a quantile lies between two values of the sample and assumes
nothing of the distribution: how many of n values lie below the true quantile q
is binomial with (n, q). See David and Nagaraja, Order Statistics, 3rd edition,
section 7.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure of a sample, with the bounds between which it lies at ``CONFIDENCE``; None where the sample has none."""

    value: Fraction
    low: Fraction | None
    high: Fraction | None


def quantile(ordered: Sequence[Fraction], share: Fraction) -> Estimate:
    """The smallest value that at least ``share`` (above 0, below 1) of the sample, in order, does not exceed.

    Raises:
        ValueError: there is no value.
    """
    size = len(ordered)
    if not size:
        raise ValueError("an empty sample has no quantiles")
    low, high = _ranks(size, float(share))
    return Estimate(
        ordered[math.ceil(size * share) - 1],
        ordered[low - 1] if low >= 1 else None,
        ordered[high - 1] if high <= size else None,
    )


def mean(sample: Sequence[Fraction]) -> Estimate:
    """The mean; its bounds are those of a normal variable, and None for fewer than two values.

    Raises:
        ValueError: there is no value.
    """
    size = len(sample)
    if not size:
        raise ValueError("an empty sample has no mean")
    centre = sum(sample, Fraction(0)) / size
    if size < 2:
        return Estimate(centre, None, None)
    variance = sum(((value - centre) ** 2 for value in sample), Fraction(0)) / (size - 1)
    around = Fraction(_NORMAL * math.sqrt(variance / size))
    return Estimate(centre, centre - around, centre + around)


_NORMAL = 1.959964
"""A normal variable is within that many standard deviations of its mean with probability ``CONFIDENCE``."""


def _ranks(size: int, share: float) -> tuple[int, int]:
    """Places, from 1, of the values that bound the quantile; 0 and ``size + 1`` where no value does."""
    from scipy.stats import binom  # slow to import

    tail = (1 - CONFIDENCE) / 2
    low, high = binom.ppf((tail, 1 - tail), size, share)
    return int(low), int(high) + 1
