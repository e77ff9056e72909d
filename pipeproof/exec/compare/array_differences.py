"""Bits of arrays, and how far two of them are apart."""

from __future__ import annotations

import numpy as np


def have_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two arrays of one shape and dtype have the same bits: +0 and -0 differ, equal NaNs do not."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return np.array_equal(a.view(bits), b.view(bits))


def largest(array: np.ndarray) -> float:
    """max|b| in float64, 0 without elements."""
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(array.astype(np.float64)), initial=0.0))


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """max|a - b| in float64, 0 without elements."""
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and NaN is infinitely far
        return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))


def relative_difference(difference: float, scale: float) -> float:
    """max|a - b| / max|b|; 0 if there is no difference, infinite if only the reference is zero, or for NaN."""
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale > 0.0 else np.inf
    return ratio if np.isfinite(ratio) else float("inf")


def max_rel_diff(array: np.ndarray, reference: np.ndarray) -> float:
    """max|a - b| / max|b| in float64; 0 if both are zero, infinite if only the reference is zero, or for NaN."""
    return relative_difference(largest_difference(array, reference), largest(reference))
