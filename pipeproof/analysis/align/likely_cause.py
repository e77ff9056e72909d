"""A guess why two tensors differ, with its evidence. It is a guess: the evidence counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np

from pipeproof.analysis.align.array_digests import (
    ROUNDINGS,
    Array,
    eps_of,
    have_same_bits,
    largest,
    largest_difference,
    max_relative,
    norm_of,
    ulps_between,
)
from pipeproof.analysis.align.operations import Surroundings
from pipeproof.analysis.align.read_record import Values
from pipeproof.analysis.align.record_format import Recorded
from pipeproof.diagnostics.problems import grouped


class Family(StrEnum):
    """Kind of mistake that causes such a difference."""

    LAYOUT = "layout"
    SCALE = "scale"
    ACCUMULATION_ORDER = "accumulation order"
    MISSING_REDUCTION = "missing reduction"
    ROTARY = "rotary"
    RESIDUAL = "residual"
    NORM = "norm"
    DROPOUT = "dropout"
    CAST = "cast"
    OPTIMIZER = "optimizer"
    COMPUTATION = "computation"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Cause:
    """A family, and the evidence for it in words."""

    family: Family
    evidence: str


_LARGEST_TERM = 128
"""Limit of numerator and denominator of a rational factor: numbers of micro-batches and ranks are smaller."""


def guess(
    a: Values, b: Values, recorded_a: Recorded, recorded_b: Recorded, around: Surroundings | None = None
) -> Cause:
    """Why ``a`` is not ``b``, from their values; both of one shape and dtype, and some bits differ.

    ``around`` has the other tensors of the step, as evidence.
    """
    reduction = missing_reduction(a, b)
    if reduction is not None:
        return reduction
    x, y = a.whole, b.whole
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        bad = f"{np.count_nonzero(~np.isfinite(x))} elements of A and {np.count_nonzero(~np.isfinite(y))} of B"
        return Cause(Family.UNKNOWN, f"{bad} are not finite")
    if have_same_bits(x, y):
        return Cause(Family.UNKNOWN, "all elements are equal, and the digests differ: not the record's values")
    eps = eps_of(recorded_b.dtype)
    for cause in (_layout, _scale, _order, _foreign, _dropout, _cast, _normalized):
        likely_cause = cause(x, y, eps)
        if likely_cause is not None:
            return likely_cause
    if around is not None:
        for cause_around in (_lost_addend, _rotary, _residual):
            likely_cause = cause_around(x, y, recorded_b, around)
            if likely_cause is not None:
                return likely_cause
    same = np.count_nonzero(ulps_between(x, y) == 0)
    norms = f"norms {norm_of(x):.6g} and {norm_of(y):.6g}"
    disagreement = _disagreement(recorded_a, "A") or _disagreement(recorded_b, "B")
    return Cause(Family.UNKNOWN, f"{same} of {x.size} elements are equal{_equal_rows(x, y)}; {norms}{disagreement}")


def guess_from_norms(a: Recorded, b: Recorded) -> Cause:
    """The guess if only MD5s and norms were kept."""
    disagreement = _disagreement(a, "A") or _disagreement(b, "B")
    if disagreement:
        return Cause(Family.MISSING_REDUCTION, f"by MD5s alone{disagreement}")
    if not (a.norm > 0.0 and b.norm > 0.0 and math.isfinite(a.norm) and math.isfinite(b.norm)):
        return Cause(Family.UNKNOWN, f"by norms alone: {a.norm:.6g} and {b.norm:.6g}")
    ratio = a.norm / b.norm
    factor = _rational(ratio, b.shape)
    if factor not in (None, 1) and abs(ratio / float(factor) - 1.0) < 1e-6:
        return Cause(Family.SCALE, f"by norms alone: A's is {factor} of B's{_of_mean(factor, b.shape)}")
    if abs(ratio - 1.0) < 1e-13:
        return Cause(Family.LAYOUT, "by norms alone: they are equal, the MD5s are not")
    return Cause(Family.UNKNOWN, f"by norms alone: {a.norm:.9g} and {b.norm:.9g}")


def missing_reduction(a: Values, b: Values) -> Cause | None:
    """The cause, if ranks of one side hold addends of the other side's tensor."""
    return _addends(a, b, "A") or _addends(b, a, "B")


def _addends(parts: Values, total: Values, side: str) -> Cause | None:
    """Ranks that should hold one tensor hold different tensors, which add up to the other side's."""
    if not parts.others or any(part.shape != total.whole.shape for part in parts.others.values()):
        return None
    other = "B" if side == "A" else "A"
    everyone = list(parts.others.values())
    distinct = list({part.tobytes(): part for part in everyone}.values())
    for addends, who in ((everyone, "ranks"), (distinct, "groups of ranks")):  # groups have reduced over other axes
        summed = np.add.reduce([parts.whole, *addends], axis=0, dtype=np.float64)
        for words, whole in (("sum", summed), ("mean", summed / (1 + len(addends)))):
            if max_relative(whole, total.whole) <= ROUNDINGS * eps_of(total.whole.dtype.name):
                evidence = f"{1 + len(addends)} {who} of {side} hold different tensors; their {words} is {other}'s"
                return Cause(Family.MISSING_REDUCTION, f"{evidence} to within rounding")
    return None


def _layout(x: Array, y: Array, _: float) -> Cause | None:
    """The same values at other positions."""
    if not np.array_equal(np.sort(x, axis=None), np.sort(y, axis=None)):
        return None
    moved = int(np.count_nonzero(x != y))
    if moved == 0:
        return None  # they differ in the signs of zeros
    evidence = f"the same {x.size} values, {moved} of them at other positions"
    for dim in range(x.ndim):
        order = _permutation(np.moveaxis(x, dim, 0), np.moveaxis(y, dim, 0))
        if order is not None:
            first = next(position for position, source in enumerate(order) if position != source)
            return Cause(
                Family.LAYOUT,
                f"{evidence}: whole slices along dim {dim}, such as A's {first} which is B's {order[first]}",
            )
    return Cause(Family.LAYOUT, evidence)


def _foreign(x: Array, y: Array, _: float) -> Cause | None:
    """Values of the right tensor at wrong positions, others lost: slices were mistaken for wholes."""
    ours, counts_a = np.unique(x, return_counts=True)
    theirs, counts_b = np.unique(y, return_counts=True)
    if len(ours) < max(2, x.size // 8) or not np.isin(ours, theirs).all():
        return None  # so few values occur in many tensors
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
    """For each slice of ``x`` the index of the equal slice of ``y``, if all have one."""
    places = grouped((np.ascontiguousarray(y[row]).tobytes(), row) for row in reversed(range(len(y))))
    slices = [np.ascontiguousarray(piece).tobytes() for piece in x]
    if Counter(slices) != Counter({piece: len(rows) for piece, rows in places.items()}):
        return None
    return [places[piece].pop() for piece in slices]


def _scale(x: Array, y: Array, eps: float) -> Cause | None:
    """One factor for all elements: rational, the root of a rational one, or any."""
    nonzero = y != 0
    if not nonzero.any() or np.count_nonzero(x[~nonzero]):
        return None
    wide, base = x.astype(np.float64), y.astype(np.float64)
    ratio = float(np.median(wide[nonzero] / base[nonzero]))
    mean = ""
    for power in (1, 2):
        factor = _rational(ratio**power, x.shape)
        if factor in (None, 1):
            continue
        error = max_relative(wide, math.copysign(abs(float(factor)) ** (1 / power), ratio) * base)
        if error <= ROUNDINGS * eps:
            words = f"{factor}" if power == 1 else f"the root of {factor}"
            mean = _of_mean(factor, x.shape) if power == 1 else ""
            break
    else:
        error, words = max_relative(wide, ratio * base), f"{ratio:.7g}"
        is_rounding = abs(ratio - 1.0) <= ROUNDINGS * eps
        if is_rounding or ratio == 0.0 or error > ROUNDINGS * eps or np.count_nonzero(nonzero) < _LEAST_COUNT:
            return None
        mean = _of_mean(Fraction(words), x.shape)
    exactly = "exactly" if error == 0.0 else f"to within {error:.1g} of the largest element"
    return Cause(
        Family.SCALE,
        f"all {int(nonzero.sum())} elements of A that are not zero are {words} of B's, {exactly}{mean}",
    )


def _rational(ratio: float, shape: Sequence[int]) -> Fraction | None:
    """The nearest factor with small terms, or a number of elements or its inverse; None without one."""
    if ratio == 0.0:
        return None
    small = Fraction(ratio).limit_denominator(_LARGEST_TERM)
    counts = [Fraction(n) for n in _counts(shape) if n > _LARGEST_TERM]
    candidates = [each for count in counts for each in (count, 1 / count)]
    if small != 0 and abs(small.numerator) <= _LARGEST_TERM:
        candidates.append(small)
    return min(candidates, key=lambda each: abs(float(each) / ratio - 1.0), default=None)


def _of_mean(factor: Fraction, shape: Sequence[int]) -> str:
    """The cause of a factor that is a number of elements, in words; empty for other factors."""
    number = max(factor.numerator, factor.denominator)
    if min(factor.numerator, factor.denominator) != 1 or number < _LEAST_COUNT or number not in _counts(shape):
        return ""
    return (
        f"; the tensor has {number} elements along some dims: a loss may be their mean on one side and their sum on "
        "the other, as with PyTorch's former `size_average=False` or `reduce=False`"
    )


_LEAST_COUNT = 16
"""Smaller factors have other possible causes: micro-batches, ranks."""


def _counts(shape: Sequence[int]) -> set[int]:
    """Products of the sizes of any dims."""
    counts = {1}
    for size in shape:
        counts |= {size * count for count in counts}
    return counts - {1}


def _order(x: Array, y: Array, eps: float) -> Cause | None:
    """Only rounding."""
    error = max_relative(x, y)
    if error > ROUNDINGS * eps:
        return None
    distances = ulps_between(x, y)
    differing = distances[distances != 0]
    return Cause(
        Family.ACCUMULATION_ORDER,
        f"{differing.size} of {x.size} elements differ, half of them by {int(np.median(differing))} ulps or less, "
        f"none by more than {error:.1g} of the largest element",
    )


# --- A factor within the bound of rounding ---


@dataclass(frozen=True, slots=True)
class CommonFactor:
    """A factor that all rows of a result have in common, and its cause."""

    words: str
    deviation: float
    """The factor less one."""
    cause: Cause


_MIN_ROWS = 8
_MIN_ROUNDOFFS = 4
"""No library function is off by more on average: PyTorch's and Paddle's measured 0.1, a constant 0.6."""
_MIN_ERRORS = 6
"""Standard errors that a mean over rows has to be off by."""


def common_factor(a: Array, b: Array, read: Array | None, dtype: str) -> CommonFactor | None:
    """The factor of ``a``'s rows to ``b``'s, if they have one: rounding has no direction, and is averaged out.

    Both are results in ``dtype`` of an operation whose inputs have equal bits. ``read`` is its input: if it has the
    same rows, and small rows have larger factors, a norm's epsilon is the cause. Equal rows round in the same way, and
    count once.
    """
    if a.ndim < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    shape = -1, b.shape[-1]
    distinct = sorted({row.tobytes(): number for number, row in enumerate(b.reshape(shape)) if row.any()}.values())
    if len(distinct) < _MIN_ROWS:
        return None
    x, y = (one.reshape(shape)[distinct].astype(np.float64) for one in (a, b))
    deviations = (x * y).sum(axis=1) / np.square(y).sum(axis=1) - 1.0
    mean = float(deviations.mean())
    amounts = [deviations]
    if read is not None and read.shape == b.shape:
        rows = read.reshape(shape)[distinct].astype(np.float64)
        amounts += [-2.0 * deviations * squares for squares in (np.square(rows).mean(axis=1), rows.var(axis=1))]
    errors = [_standard_errors(each) for each in amounts]  # a constant; an epsilon of RMSNorm; one of LayerNorm
    if abs(mean) <= _MIN_ROUNDOFFS * eps_of(dtype) or max(errors) <= _MIN_ERRORS:
        return None
    words = f"1 {'-' if mean < 0 else '+'} {abs(mean):.2g}"
    evidence = f"{len(distinct)} rows of A are B's times {words} on average, and rounding has no direction"
    best = errors.index(max(errors))
    if best == 0:
        return CommonFactor(words, mean, Cause(Family.SCALE, f"{evidence}: a constant that differs"))
    epsilon = float(amounts[best].mean())
    larger = f"{abs(epsilon):.2g} {'larger' if epsilon > 0 else 'smaller'} in A"
    because = f"{evidence}: small rows by more than large ones, by a norm's epsilon that is about {larger}"
    return CommonFactor(words, mean, Cause(Family.NORM, because))


def _standard_errors(sample: Array) -> float:
    """Distance of the mean from zero in standard errors."""
    error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return abs(float(sample.mean())) / error if error > 0.0 else math.inf


# --- Known causes whose evidence is in the values of both sides ---


def _dropout(x: Array, y: Array, eps: float) -> Cause | None:
    """Other elements are zero; elements that are nonzero in both are equal, or have one factor."""
    kept = (x != 0) & (y != 0)
    lost_a, lost_b = (int(np.count_nonzero((one == 0) & (other != 0))) for one, other in ((x, y), (y, x)))
    if min(int(np.count_nonzero(kept)), lost_a + lost_b) < max(2, x.size // 64):
        return None
    ratio = float(np.median(x[kept].astype(np.float64) / y[kept]))
    if max_relative(x[kept], ratio * y[kept].astype(np.float64)) > ROUNDINGS * eps:
        return None
    evidence = (
        f"{lost_a} elements are zero only in A and {lost_b} only in B; where both have one, A is {ratio:.4g} of B"
    )
    lost = ((x == 0) != (y == 0)).reshape(-1, x.shape[-1])
    if x.shape[-1] > 1 and (lost.any(axis=1) == lost.all(axis=1)).all():
        return Cause(Family.COMPUTATION, f"{evidence}: whole rows, of tokens that a loss's mask leaves out")
    return Cause(Family.DROPOUT, f"{evidence}: another random stream, or none")


_COARSE = {"bfloat16": 8, "float16": 11}
"""Bits of the significand of 16-bit types."""


def _cast(x: Array, y: Array, eps: float) -> Cause | None:
    """The distance is the rounding of a 16-bit type that holds all numbers of one side, or of both."""
    if eps != eps_of("float32"):
        return None
    for name, bits in _COARSE.items():
        coarse = [bool((_rounded(one, bits) == one).all()) for one in (x, y)]
        if any(coarse) and max_relative(x, y) <= 4 * 2.0 ** (1 - bits):
            who = "both sides" if all(coarse) else "A" if coarse[0] else "B"
            return Cause(
                Family.CAST,
                f"all numbers of {who} are {name}'s, and the distance is its rounding: a cast before or after",
            )
    return None


def _rounded(array: Array, bits: int) -> Array:
    """Elements to so many bits of the significand."""
    significand, exponent = np.frexp(array)
    rounded: Array = np.ldexp(np.rint(np.ldexp(significand, bits)), exponent - bits).astype(array.dtype)
    return rounded


def _normalized(x: Array, y: Array, eps: float) -> Cause | None:
    """Each row of one side is the other's row, shifted and scaled by its own numbers."""
    if x.ndim < 2 or x.shape[-1] < 4:
        return None
    plain = [one.reshape(-1, x.shape[-1]).astype(np.float64) for one in (x, y)]
    centered = [row - row.mean(axis=1, keepdims=True) for row in plain]
    for rows, kind in ((centered, "LayerNorm"), (plain, "RMSNorm")):
        sizes = [np.sqrt(np.square(row).mean(axis=1, keepdims=True)) for row in rows]
        if min(float(size.min()) for size in sizes) == 0.0:
            continue
        units = [row / size for row, size in zip(rows, sizes, strict=True)]
        flat = [float(size.max() / size.min()) < _FLAT for size in sizes]
        if flat[0] != flat[1] and max_relative(*units) <= 16 * ROUNDINGS * eps:
            sides = ("A", "B") if flat[0] else ("B", "A")
            return Cause(
                Family.NORM,
                f"rows of {sides[0]} are rows of {sides[1]} after a {kind}: {sides[1]} has it before or later",
            )
    return None


_FLAT = 1.01
"""Largest ratio of the sizes of two normalized rows."""


# --- Known causes whose evidence is in other tensors of the step ---


def _lost_addend(x: Array, y: Array, recorded: Recorded, around: Surroundings) -> Cause | None:
    """A gradient of weights has the addends of some micro-batches only."""
    parts = around.parts(recorded) if recorded.parameter else []
    if len(parts) < 2:
        return None
    for side, value in (("A", x), ("B", y)):
        for number, part in enumerate(parts):
            if max_relative(value, part) <= 16 * ROUNDINGS * eps_of(recorded.dtype):
                return Cause(
                    Family.MISSING_REDUCTION,
                    f"{side} is the addend of micro-batch {number} alone, of {len(parts)}: the others are lost",
                )
    return None


def _rotary(x: Array, y: Array, recorded: Recorded, around: Surroundings) -> Cause | None:
    """Both sides rotate pairs of one tensor's elements, but other pairs, or by other angles."""
    for name, source in around.near(recorded):
        if source.shape != x.shape or x.shape[-1] % 2:
            continue
        pairs = [
            [_pairs_rotated(one, source, halves, eps_of(recorded.dtype)) for halves in (True, False)] for one in (x, y)
        ]
        if not all(any(each) for each in pairs):
            continue
        words = [
            "halves, elements i and i + D/2" if each[0] else "neighbours, elements 2i and 2i + 1" for each in pairs
        ]
        if words[0] == words[1]:
            return Cause(
                Family.ROTARY, f"A and B rotate {words[0]}, of {name}, by other angles, or in other directions"
            )
        return Cause(Family.ROTARY, f"of {name}, A rotates {words[0]}, and B {words[1]}")
    return None


def _pairs_rotated(result: Array, source: Array, halves: bool, eps: float) -> bool:
    """True if each pair of elements keeps its length."""
    size = source.shape[-1]
    shape = (*source.shape[:-1], 2, size // 2) if halves else (*source.shape[:-1], size // 2, 2)
    lengths = [
        np.square(one.astype(np.float64).reshape(shape)).sum(axis=-2 if halves else -1) for one in (result, source)
    ]
    return max_relative(*lengths) <= 16 * ROUNDINGS * eps


def _residual(x: Array, y: Array, recorded: Recorded, around: Surroundings) -> Cause | None:
    """The difference is an earlier tensor, in another order of dims, or in place of another one."""
    difference = x.astype(np.float64) - y
    allowed = ROUNDINGS * eps_of(recorded.dtype) * max(largest(x), largest(y))

    def explains(value: Array) -> bool:
        return largest_difference(difference, value) <= allowed

    near = [(name, one.astype(np.float64).reshape(x.shape)) for name, one in around.near(recorded)]
    for name, one in near:
        factor = float(np.vdot(one, difference) / (np.vdot(one, one) or 1.0))
        for sign, side in ((1, "B"), (-1, "A")):
            if explains(sign * one):
                return Cause(Family.RESIDUAL, f"the difference is {name}, which {side} does not add")
        if explains(factor * one):
            return Cause(Family.RESIDUAL, f"the difference is {factor:.6g} times {name}: A and B scale it otherwise")
        for words, moved in _transposed(one):
            for sign, side in ((1, "A"), (-1, "B")):
                if explains(sign * (moved - one)):
                    return Cause(Family.RESIDUAL, f"{side} adds {name} {words}")
    for name, one in near:
        for other_name, other in near:
            if one is not other and explains(one - other):
                family = Family.NORM if "norm" in name + other_name else Family.RESIDUAL
                return Cause(family, f"A adds {name} where B adds {other_name}")
    return None


def _transposed(array: Array) -> Iterator[tuple[str, Array]]:
    """The array with two dims exchanged, in its own shape."""
    if array.ndim > 1 and array.shape[0] > 1 and array.shape[1] > 1:
        exchanged = np.swapaxes(array, 0, 1)
        yield "with its first two dims exchanged", exchanged.reshape(array.shape)
        yield "read as if its first two dims were exchanged", array.reshape(exchanged.shape).swapaxes(0, 1)
    if array.ndim > 2 and array.shape[-1] == array.shape[-2]:
        yield "with its last two dims exchanged", np.swapaxes(array, -1, -2)


def _disagreement(recorded: Recorded, side: str) -> str:
    """Ranks that hold another MD5 of the same part."""
    held: dict[object, tuple[int, str]] = {}
    for shard in recorded.shards:
        rank, md5 = held.setdefault(shard.index, (shard.rank, shard.md5))
        if md5 != shard.md5:
            return f"; ranks {rank} and {shard.rank} of {side} hold different values of the same part"
    return ""
