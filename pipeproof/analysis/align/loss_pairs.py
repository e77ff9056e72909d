"""Losses of two sides, paired as they come and counted by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import zip_longest
from typing import TypeAlias

import numpy as np

from pipeproof.analysis.align.array_digests import FAR, max_relative, max_ulps
from pipeproof.analysis.align.record_format import WIDE
from pipeproof.analysis.align.training_logs import Observed

Key: TypeAlias = tuple[int, str, str, int, int]

_LARGEST_TERM = 16
"""Limit of numerator and denominator of a factor between losses."""
_ROUNDING = 5e-7
"""Relative: four roundoffs of float32."""

WINDOW = 100_000
"""Most losses of one side that wait for a partner: beyond, the oldest counts as unpaired."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance of equality: one of the two suffices; without both, bits must be equal.

    With ``rounding``, tensors and losses within the bound of rounding are equal, too.
    """

    ulps: int = 0
    relative: float = 0.0
    rounding: bool = False

    @property
    def bitwise(self) -> bool:
        """True if bits must be equal."""
        return self.ulps == 0 and self.relative == 0.0

    def allows(self, ulps: int, relative: float) -> bool:
        """True if a distance is within the tolerance; ``FAR`` ulps never are."""
        return ulps != FAR and (ulps <= self.ulps or relative <= self.relative)


@dataclass(frozen=True, slots=True)
class LossDifference:
    """The two sides of one loss, and their distance in ``dtype``; None without values.

    ``factor`` is A divided by B, if it is a rational number with small terms
    to within rounding, such as 2 or 1/4.
    """

    a: Observed
    b: Observed
    ulps: int | None
    relative: float | None
    factor: Fraction | None = None


@dataclass(slots=True)
class Matches:
    """Steps of one kind of loss: the number of common steps, the steps that differ, and the first difference."""

    steps: set[int] = field(default_factory=set)
    differing: set[int] = field(default_factory=set)
    first: LossDifference | None = None

    @property
    def num_equal(self) -> int:
        """Steps in which every loss of this kind is equal."""
        return len(self.steps) - len(self.differing)


@dataclass(slots=True)
class LossAlignment:
    """All losses of two sides; ``routers`` has their losses, and their biases after each step.

    ``unpaired`` counts, for A and for B, losses without a partner, with one of
    them as an example. ``by_value`` is true if for some losses only printed
    values could be compared.
    """

    main: Matches = field(default_factory=Matches)
    mtp: Matches = field(default_factory=Matches)
    routers: Matches = field(default_factory=Matches)
    unpaired: list[int] = field(default_factory=lambda: [0, 0])
    examples: list[Observed | None] = field(default_factory=lambda: [None, None])
    by_value: bool = False

    @property
    def equal(self) -> bool:
        """True if every loss has a partner, and they are equal."""
        return not (self.main.differing or self.mtp.differing or self.routers.differing or any(self.unpaired))

    def put(self, a: Observed, b: Observed, tolerance: Tolerance, dtype: str) -> None:
        """Compare one pair."""
        matches = self._of(a.loss)
        matches.steps.add(a.step)
        if a.md5 is not None and b.md5 is not None:
            equal = a.md5 == b.md5
        elif a.value is not None and b.value is not None:
            self.by_value = True
            equal = float(a.value) == float(b.value) or (math.isnan(float(a.value)) and math.isnan(float(b.value)))
        else:
            self.miss(0, a)
            self.miss(1, b)
            return
        if equal:
            return
        ulps, relative = _distance(a, b, dtype)
        if ulps is not None and relative is not None and not tolerance.bitwise and tolerance.allows(ulps, relative):
            return
        matches.differing.add(a.step)
        if matches.first is None or a.key < matches.first.a.key:
            matches.first = LossDifference(a, b, ulps, relative, _factor(a, b))

    def _of(self, loss: str) -> Matches:
        """The losses of one kind; other losses than the main and MTP losses belong to routers."""
        if loss.startswith("mtp"):
            return self.mtp
        return self.main if loss.partition("/")[0] == "main" else self.routers

    def miss(self, side: int, observed: Observed) -> None:
        """Count a loss without a partner."""
        self.unpaired[side] += 1
        self.examples[side] = self.examples[side] or observed


def align_losses(a: Iterable[Observed], b: Iterable[Observed], tolerance: Tolerance) -> LossAlignment:
    """Pair the losses of two logs by kind and position, in any order; in ulps of float32.

    Raises:
        AlignmentError: a stream cannot be read on.
    """
    alignment = LossAlignment()
    waiting: tuple[dict[Key, Observed], dict[Key, Observed]] = ({}, {})
    for pair in zip_longest(a, b):
        for side, observed in enumerate(pair):
            if observed is None:
                continue
            partner = waiting[1 - side].pop(observed.key, None)
            if partner is None:
                if (replaced := waiting[side].pop(observed.key, None)) is not None:
                    alignment.miss(side, replaced)
                waiting[side][observed.key] = observed
            else:
                first, second = (observed, partner) if side == 0 else (partner, observed)
                alignment.put(first, second, tolerance, "float32")
            if len(waiting[side]) > WINDOW:
                alignment.miss(side, waiting[side].pop(next(iter(waiting[side]))))
    for side, left in enumerate(waiting):
        for observed in left.values():
            alignment.miss(side, observed)
    return alignment


def _factor(a: Observed, b: Observed) -> Fraction | None:
    """The rational number A / B; two losses of one kind are rarely so near to one by chance."""
    if a.value is None or b.value is None:
        return None
    x, y = float(a.value), float(b.value)
    if not (math.isfinite(x) and math.isfinite(y)) or y == 0.0:
        return None
    factor = Fraction(x / y).limit_denominator(_LARGEST_TERM)
    if factor in (0, 1) or abs(factor.numerator) > _LARGEST_TERM:
        return None
    return factor if abs(x / y / float(factor) - 1.0) <= _ROUNDING else None


def _distance(a: Observed, b: Observed, dtype: str) -> tuple[int | None, float | None]:
    """In ulps of ``dtype``, and, in the digits that were printed, relative to B."""
    if a.value is None or b.value is None:
        return None, None
    with np.errstate(over="ignore"):
        x, y = (np.asarray([float(value)]) for value in (a.value, b.value))
        wide = WIDE.get(dtype, dtype)
        return max_ulps(x.astype(wide), y.astype(wide)), max_relative(x, y)
