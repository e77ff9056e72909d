"""Casts between element types on bit patterns.

Numpy has no bfloat16, so elements are unsigned integers of their size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.specs.axis_layout import dtype_bytes

Bits = npt.NDArray[Any]
"""Elements as unsigned integers of their size."""

CAST_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Types between which elements can be cast."""


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer type that has the size of a type."""
    return np.dtype(f"<u{dtype_bytes(dtype)}")


def cast(bits: Bits, dtype: str, to: str) -> Bits:
    """Cast elements of ``dtype`` to ``to``, rounding to nearest, ties to even.

    A cast to 16 bits goes through float32, as in Paddle and PyTorch: a float64 is rounded twice. NaN stays NaN.
    """
    if dtype == to:
        return bits
    with np.errstate(all="ignore"):  # too large is infinite, as in the frameworks
        if to == "float64":
            return _floats(bits, dtype).astype("<f8").view("<u8")
        single = _floats(bits, dtype).astype("<f4", copy=False)
        if to == "float32":
            return single.view("<u4")
        if to == "float16":
            return single.astype("<f2").view("<u2")
        return _bfloat16(single.view("<u4"))


def _floats(bits: Bits, dtype: str) -> Bits:
    """Return elements in a floating type that numpy has."""
    if dtype == "bfloat16":
        return (bits.astype("<u4") << 16).view("<f4")
    return bits.view({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype])


def _bfloat16(bits: Bits) -> Bits:
    """Round float32 bits to bfloat16.

    Half a unit in the last place is added, less one where that place is even, then the rest is cut off.
    """
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40  # a NaN with all its set bits in the lower half must not become infinite
    return np.where(is_nan, quiet, rounded).astype("<u2")
