"""Arrays as records know them: the MD5 of their bytes, their norm, and how far apart two of them are."""

from __future__ import annotations

import hashlib
import math
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

FAST = "sum64:"
"""With what the text of a ``fast_digest`` begins."""
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


_BLOCK = 2**14
"""Elements of 64 bits that are read at a time: with their mixed copy they stay in the processor's cache."""
_FACTORS = np.random.Generator(np.random.PCG64(49)).integers(2**64 - 1, size=_BLOCK, dtype=np.uint64) | np.uint64(1)
_SHIFT = np.uint64(33)


def fast_digest(array: Array) -> tuple[str, float]:
    """A digest of the bits that is several times as fast as MD5, and the norm, to about six digits.

    The digest is the sum of all 64-bit words, each multiplied by a number that depends on its position, modulo 2^64.
    Before, the upper bits of a word are mixed into its lower ones: a sum modulo 2^64 has only the parity of the factors
    of highest bits, which are signs. Two tensors that differ by accident have one digest with a probability of 2^-32.
    """
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    flat = plain.reshape(-1)
    octets = flat.view(np.uint8)
    words = octets[: len(octets) // 8 * 8].view("<u8")
    total = len(octets) + _mixed(0) * int.from_bytes(octets[8 * len(words) :].tobytes(), "little")
    mixed, squares = _scratch(), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for number, start in enumerate(range(0, len(words), _BLOCK), start=1):
            block = words[start : start + _BLOCK]
            part = mixed[: len(block)]
            np.right_shift(block, _SHIFT, out=part)
            np.bitwise_xor(part, block, out=part)
            total += int(np.dot(part, _FACTORS[: len(block)])) * (2 * _mixed(number) + 1)
            if flat.dtype == np.float32:  # here the block is in the processor's cache
                floats = block.view(np.float32)
                squares += float(np.dot(floats, floats))
        squares += float(np.square(flat[2 * len(words) :]).sum()) if flat.dtype == np.float32 else math.inf
    return f"{FAST}{total % 2**64:016x}", math.sqrt(squares) if math.isfinite(squares) else norm_of(flat)


_OF_THREAD = threading.local()


def _scratch() -> Array:
    """An array for one block, of this thread: a new one costs as much as reading it."""
    if not hasattr(_OF_THREAD, "block"):
        _OF_THREAD.block = np.empty(_BLOCK, dtype=np.uint64)
    block: Array = _OF_THREAD.block
    return block


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

    Both are of one floating dtype and shape. +0 and -0 are next to each other, 1
    apart: they are other bits.
    """
    if not np.issubdtype(a.dtype, np.floating):
        return np.where(a == b, 0, FAR)
    places_a, places_b = _places(a), _places(b)
    distance = np.where(places_a > places_b, places_a - places_b, places_b - places_a)
    comparable = np.isfinite(a) & np.isfinite(b)
    same = places_a == places_b
    # a distance of more than 2^63 wraps to a negative number: it is as far as can be
    return np.where(same, 0, np.where(comparable, np.where(distance < 0, np.iinfo(np.int64).max, distance), FAR))


def _places(array: Array) -> Array:
    """The number of each element in the order of all floating-point numbers of its dtype, as int64."""
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


def max_relative(a: Array, b: Array) -> float:
    """``max|a - b| / max|b|`` in float64; infinite where it is not finite, 0 where both are zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))
        scale = float(np.max(np.abs(b.astype(np.float64)), initial=0.0))
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale > 0.0 else math.inf
    return ratio if math.isfinite(ratio) else math.inf


ROUNDINGS = 64
"""Roundoffs of the largest element within which a difference is taken for rounding."""
_GROWTH = 32
"""By how much an operation may enlarge the relative rounding of what it reads."""


def rounding_bound(dtype: str, noise: float = 0.0) -> float:
    """The relative distance that rounding can make, where earlier tensors are ``noise`` apart by rounding."""
    return ROUNDINGS * eps_of(dtype) + _GROWTH * noise


_EPS = {
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}  # fmt: skip


def eps_of(dtype: str) -> float:
    """The distance from one to the next number of a type; 0 for integers, which do not round."""
    return _EPS.get(dtype, 0.0)
