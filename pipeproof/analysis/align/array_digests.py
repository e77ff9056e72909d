"""Arrays in records: the MD5 of their bytes, their norm, and the distance of two arrays."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

FAST = "sum64:"
"""The prefix of a ``fast_digest``."""
FAR = -1
"""Represents a distance that no number of ulps measures: not both finite, and not the same bits."""


def md5_of(array: Array) -> str:
    """MD5 of the elements' bytes in C order, little-endian, in the array's own dtype: no shape, no header."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.md5(plain.tobytes(), usedforsecurity=False).hexdigest()


def norm_of(array: Array) -> float:
    """The square root of the sum of squares, in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.sum(np.square(array.astype(np.float64)))))


_HALF = 2**18
"""Bytes of half a block: with two arrays computed from it, it fits into the processor's cache."""
_FACTORS = np.random.Generator(np.random.PCG64(49)).integers(2**64 - 1, size=_HALF // 8, dtype=np.uint64) | np.uint64(1)
_SHIFT = np.uint64(33)


def fast_digest(array: Array) -> tuple[str, float]:
    """A digest of the bits that is many times faster than MD5, and the norm, to about six digits.

    The bytes of a block's second half are added to the bytes of its first half, shifted by one: then a sign never meets
    a sign. The upper bits of the sum's 64-bit words are mixed into the lower ones: a sum modulo 2^64 has only the
    parity of the factors of highest bits. The digest is the sum of all words, each multiplied by a number that depends
    on its position, modulo 2^64. A tensor that differs by accident has the same digest with a probability of 2^-31: the
    changes of both halves cancel in all bytes, or the changes of the words cancel in the sum.
    """
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    flat = plain.reshape(-1)
    if flat.itemsize == 1:
        flat = flat.astype(np.uint16)  # else highest bits would meet
    octets = flat.view(np.uint8)
    end = len(octets) // 16 * 16
    rest = octets[end:].tobytes()
    total = len(octets) + _mixed(int.from_bytes(rest[:8], "little")) + 3 * _mixed(int.from_bytes(rest[8:], "little"))
    squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for number, start in enumerate(range(0, end, 2 * _HALF)):
            block = octets[start : min(start + 2 * _HALF, end)]
            half = len(block) // 2
            added, mixed = (scratch[: half // 8] for scratch in _scratch())
            octets_added = added.view(np.uint8)
            np.add(block[: half - 1], block[half + 1 :], out=octets_added[:-1])
            np.add(block[half - 1 : half], block[half : half + 1], out=octets_added[-1:])
            np.right_shift(added, _SHIFT, out=mixed)
            np.bitwise_xor(added, mixed, out=mixed)
            total += int(np.dot(mixed, _FACTORS[: len(mixed)])) * (2 * _mixed(number) + 1)
            if flat.dtype == np.float32:  # here the block is in the processor's cache
                floats = block.view(np.float32)
                squares += float(np.dot(floats, floats))
        squares += float(np.square(flat[end // 4 :]).sum()) if flat.dtype == np.float32 else math.inf
    return f"{FAST}{total % 2**64:016x}", math.sqrt(squares) if math.isfinite(squares) else norm_of(flat)


_OF_THREAD = threading.local()


def _scratch() -> tuple[Array, Array]:
    """Two arrays for half a block, per thread: new arrays cost as much as reading the block."""
    if not hasattr(_OF_THREAD, "arrays"):
        _OF_THREAD.arrays = np.empty(_HALF // 8, dtype=np.uint64), np.empty(_HALF // 8, dtype=np.uint64)
    arrays: tuple[Array, Array] = _OF_THREAD.arrays
    return arrays


def is_fast(digest: str) -> bool:
    """True for a ``fast_digest``, False for an MD5."""
    return digest.startswith(FAST)


def _mixed(number: int) -> int:
    """A number's bits, mixed as in SplitMix64."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def ulps_between(a: Array, b: Array) -> Array:
    """Number of representable values from ``a`` to ``b``, elementwise, as int64; ``FAR`` where it is undefined.

    Both are of one floating dtype and shape. +0 and -0 are 1 apart, because their bits differ.
    """
    if not np.issubdtype(a.dtype, np.floating):
        return np.where(a == b, 0, FAR)
    places_a, places_b = _places(a), _places(b)
    distance = np.where(places_a > places_b, places_a - places_b, places_b - places_a)
    comparable = np.isfinite(a) & np.isfinite(b)
    same = places_a == places_b
    # a distance of more than 2^63 wraps to a negative number: it is the largest distance
    return np.where(same, 0, np.where(comparable, np.where(distance < 0, np.iinfo(np.int64).max, distance), FAR))


def _places(array: Array) -> Array:
    """The rank of each element in the order of all floating-point numbers of its dtype, as int64."""
    bits = np.ascontiguousarray(array).view({2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize])
    wide = bits.astype(np.int64)
    lowest = np.int64(np.iinfo(bits.dtype).min)
    return np.where(wide < 0, lowest - wide - 1, wide)


def max_ulps(a: Array, b: Array) -> int:
    """The largest of ``ulps_between``; ``FAR`` if any element is."""
    distances = ulps_between(a, b)
    if distances.size == 0:
        return 0
    return FAR if bool((distances == FAR).any()) else int(distances.max())


def have_same_bits(a: Array, b: Array) -> bool:
    """True if two arrays of one shape and dtype have the same bits: +0 and -0 differ, equal NaNs do not."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return np.array_equal(a.view(bits), b.view(bits))


def largest(array: Array) -> float:
    """max|b| in float64, 0 without elements."""
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(array.astype(np.float64)), initial=0.0))


def largest_difference(a: Array, b: Array) -> float:
    """max|a - b| in float64, 0 without elements."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, and NaN is infinitely far
        return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))


def relative_difference(difference: float, scale: float) -> float:
    """max|a - b| / max|b|; 0 if there is no difference, infinite if only ``b`` is zero, or for NaN."""
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale > 0.0 else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def max_relative(a: Array, b: Array) -> float:
    """``max|a - b| / max|b|`` in float64, see ``relative_difference``."""
    return relative_difference(largest_difference(a, b), largest(b))


ROUNDINGS = 64
"""Differences up to this many roundoffs of the largest element count as rounding."""
_GROWTH = 32
"""Factor by which an operation may enlarge the relative rounding of its inputs."""
_COARSE = 4, 8
"""Both for types of 16 bits and less: sums are in float32 and rounded once, and larger bounds would hide all faults."""


def rounding_bound(dtype: str, noise: float = 0.0) -> float:
    """The relative distance that rounding can make if earlier tensors are ``noise`` apart by rounding."""
    eps = eps_of(dtype)
    roundings, growth = _COARSE if eps > eps_of("float32") else (ROUNDINGS, _GROWTH)
    return roundings * eps + growth * noise


class Distance(NamedTuple):
    """Distance of two tensors in ulps and relative to the largest element, and the distance that rounding can make.

    Comparisons of records and ``Pipeline.compare`` call a difference within the relative ``bound`` rounding.
    """

    ulps: int
    relative: float
    bound: float


def distance(
    a: Array, b: Array, dtype: str, noise: float = 0.0, cancellation: Callable[[], float] = lambda: 1.0
) -> Distance:
    """Measure the distance of ``a`` from ``b``, which were computed in ``dtype``.

    ``noise``: distance by rounding of the tensors that these are computed from. ``cancellation``: the ratio of a sum's
    terms to the sum; sums of terms that cancel round more.
    """
    relative, bound = max_relative(a, b), rounding_bound(dtype, noise)
    if bound < relative < math.inf:
        bound *= cancellation()
    return Distance(max_ulps(a, b), relative, bound)


_EPS = {
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}  # fmt: skip


def eps_of(dtype: str) -> float:
    """The distance from 1 to the next number of a type; 0 for integers, which do not round."""
    return _EPS.get(dtype, 0.0)
