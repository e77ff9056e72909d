"""A guess why two tensors differ, with what speaks for it. It is a guess: the evidence is what counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np

from pipeproof.analysis.align.array_digests import Array, max_relative, norm_of, ulps_between
from pipeproof.analysis.align.record_format import Recorded


class Family(StrEnum):
    """Kind of mistake that makes such a difference."""

    LAYOUT = "layout"
    SCALE = "scale"
    ACCUMULATION_ORDER = "accumulation order"
    MISSING_REDUCTION = "missing reduction"
    COMPUTATION = "computation"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Cause:
    """A family, and the evidence for it in words."""

    family: Family
    evidence: str


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor's whole value, and by rank what those ranks hold that disagree with it."""

    whole: Array
    others: Mapping[int, Array]


_LARGEST_TERM = 128
"""Of numerator and denominator of a factor that is called rational: micro-batches and ranks are not more often."""
_ROUNDINGS = 64
"""Roundoffs, of the largest element, within which a difference is taken for rounding of sums in another order."""


def guess(a: Values, b: Values, recorded_a: Recorded, recorded_b: Recorded) -> Cause:
    """Why ``a`` is not ``b``, from their values; both of one shape and dtype, and some bits differ."""
    reduction = missing_reduction(a, b)
    if reduction is not None:
        return reduction
    x, y = a.whole, b.whole
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        bad = f"{np.count_nonzero(~np.isfinite(x))} elements of A and {np.count_nonzero(~np.isfinite(y))} of B"
        return Cause(Family.UNKNOWN, f"{bad} are not finite")
    for found in (_layout(x, y), _scale(x, y), _order(x, y), _foreign(x, y)):
        if found is not None:
            return found
    same = np.count_nonzero(ulps_between(x, y) == 0)
    norms = f"norms {norm_of(x):.6g} and {norm_of(y):.6g}"
    disagreement = _disagreement(recorded_a, "A") or _disagreement(recorded_b, "B")
    return Cause(Family.UNKNOWN, f"{same} of {x.size} elements are equal{_equal_rows(x, y)}; {norms}{disagreement}")


def guess_from_norms(a: Recorded, b: Recorded) -> Cause:
    """The same where only MD5s and norms were kept."""
    disagreement = _disagreement(a, "A") or _disagreement(b, "B")
    if disagreement:
        return Cause(Family.MISSING_REDUCTION, f"by MD5s alone{disagreement}")
    if not (a.norm > 0.0 and b.norm > 0.0 and math.isfinite(a.norm) and math.isfinite(b.norm)):
        return Cause(Family.UNKNOWN, f"by norms alone: {a.norm:.6g} and {b.norm:.6g}")
    ratio = a.norm / b.norm
    factor = Fraction(ratio).limit_denominator(_LARGEST_TERM)
    if factor != 1 and factor.numerator <= _LARGEST_TERM and abs(ratio / float(factor) - 1.0) < 1e-6:
        return Cause(Family.SCALE, f"by norms alone: that of A is {factor} of B's")
    if abs(ratio - 1.0) < 1e-13:
        return Cause(Family.LAYOUT, "by norms alone: they are equal, the MD5s are not")
    return Cause(Family.UNKNOWN, f"by norms alone: {a.norm:.9g} and {b.norm:.9g}")


def missing_reduction(a: Values, b: Values) -> Cause | None:
    """The cause, if ranks of one side hold addends of what the other side holds."""
    return _addends(a, b, "A") or _addends(b, a, "B")


def _addends(parts: Values, total: Values, side: str) -> Cause | None:
    """Ranks that should hold one tensor hold different ones, and these add up to the other side's."""
    if not parts.others or any(part.shape != total.whole.shape for part in parts.others.values()):
        return None
    other = "B" if side == "A" else "A"
    everyone = list(parts.others.values())
    distinct = list({part.tobytes(): part for part in everyone}.values())
    for addends, who in ((everyone, "ranks"), (distinct, "groups of ranks")):  # groups have reduced over other axes
        summed = np.add.reduce([parts.whole, *addends], axis=0, dtype=np.float64)
        if max_relative(summed, total.whole) <= _ROUNDINGS * _eps(total.whole):
            return Cause(
                Family.MISSING_REDUCTION,
                f"{1 + len(addends)} {who} of {side} hold different tensors; their sum is {other}'s to within rounding",
            )
    return None


def _layout(x: Array, y: Array) -> Cause | None:
    """The same values in other places."""
    if not np.array_equal(np.sort(x, axis=None), np.sort(y, axis=None)):
        return None
    moved = int(np.count_nonzero(x != y))
    if moved == 0:
        return None  # they differ in the signs of zeros
    evidence = f"the same {x.size} values, {moved} of them in other places"
    for dim in range(x.ndim):
        order = _permutation(np.moveaxis(x, dim, 0), np.moveaxis(y, dim, 0))
        if order is not None:
            first = next(place for place, source in enumerate(order) if place != source)
            return Cause(
                Family.LAYOUT,
                f"{evidence}: whole slices along dim {dim}, such as A's {first} which is B's {order[first]}",
            )
    return Cause(Family.LAYOUT, evidence)


def _foreign(x: Array, y: Array) -> Cause | None:
    """Values of the right tensor at wrong places, others lost: what arrives when slices are mistaken for wholes."""
    ours, counts_a = np.unique(x, return_counts=True)
    theirs, counts_b = np.unique(y, return_counts=True)
    if len(ours) < max(2, x.size // 8) or not np.isin(ours, theirs).all():
        return None  # so few values are found in many tensors
    lost = int(counts_b[~np.isin(theirs, ours)].sum())
    again = int((counts_a - counts_b[np.isin(theirs, ours)]).clip(0).sum())
    return Cause(
        Family.LAYOUT,
        f"every value of A is one of B's, but {lost} of B's {y.size} are lost, others repeated in {again} places",
    )


def _equal_rows(x: Array, y: Array) -> str:
    """Number of equal rows (such as tokens of an activation), if every other row differs in all elements."""
    if x.ndim < 2 or x.shape[-1] < 2:
        return ""
    equal = (ulps_between(x, y) == 0).reshape(-1, x.shape[-1])
    whole, some = equal.all(axis=1), equal.any(axis=1)
    if not whole.any() or np.count_nonzero(some & ~whole) > np.count_nonzero(~whole) // 2:
        return ""
    return f", which are {np.count_nonzero(whole)} of {len(whole)} rows along the last dim"


def _permutation(x: Array, y: Array) -> list[int] | None:
    """For each slice of ``x`` which slice of ``y`` it is, if each is one."""
    places: dict[bytes, list[int]] = {}
    for place in reversed(range(len(y))):
        places.setdefault(np.ascontiguousarray(y[place]).tobytes(), []).append(place)
    slices = [np.ascontiguousarray(piece).tobytes() for piece in x]
    if Counter(slices) != Counter({piece: len(found) for piece, found in places.items()}):
        return None
    return [places[piece].pop() for piece in slices]


def _scale(x: Array, y: Array) -> Cause | None:
    """One rational factor for all elements."""
    nonzero = y != 0
    if not nonzero.any() or np.count_nonzero(x[~nonzero]):
        return None
    wide, base = x.astype(np.float64), y.astype(np.float64)
    factor = Fraction(float(np.median(wide[nonzero] / base[nonzero]))).limit_denominator(_LARGEST_TERM)
    if factor in (0, 1) or abs(factor.numerator) > _LARGEST_TERM:
        return None
    error = max_relative(wide, float(factor) * base)
    if error > _ROUNDINGS * _eps(x):
        return None
    exactly = "exactly" if error == 0.0 else f"to within {error:.1g} of the largest element"
    return Cause(
        Family.SCALE, f"all {int(nonzero.sum())} elements of A that are not zero are {factor} of B's, {exactly}"
    )


def _order(x: Array, y: Array) -> Cause | None:
    """No more than rounding."""
    error = max_relative(x, y)
    if error > _ROUNDINGS * _eps(x):
        return None
    distances = ulps_between(x, y)
    differing = distances[distances != 0]
    return Cause(
        Family.ACCUMULATION_ORDER,
        f"{differing.size} of {x.size} elements differ, half of them by {int(np.median(differing))} ulps or less, "
        f"none by more than {error:.1g} of the largest element",
    )


def _disagreement(recorded: Recorded, side: str) -> str:
    """Ranks that hold another MD5 of the same part."""
    held: dict[object, tuple[int, str]] = {}
    for shard in recorded.shards:
        rank, md5 = held.setdefault(shard.index, (shard.rank, shard.md5))
        if md5 != shard.md5:
            return f"; ranks {rank} and {shard.rank} of {side} hold different values of the same part"
    return ""


def _eps(array: Array) -> float:
    return float(np.finfo(array.dtype).eps)
