"""Arrays as records know them: the MD5 of their bytes, their norm, and how far apart two of them are."""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

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


def ulps_between(a: Array, b: Array) -> Array:
    """Number of representable values from ``a`` to ``b``, elementwise, as int64; ``FAR`` where it is undefined.

    Both are of one floating dtype and shape. +0 and -0 are next to each other, 1
    apart: they are other bits.
    """
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
