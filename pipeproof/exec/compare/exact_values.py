"""Values whose bits survive JSON: numpy arrays, and floats that may be infinite or NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np
from pydantic import BeforeValidator, PlainSerializer

from pipeproof.exec.rank.job_files import Loss

ExactFloat = Annotated[
    float,
    PlainSerializer(float.hex, return_type=str),
    BeforeValidator(lambda value: float.fromhex(value) if isinstance(value, str) else value),
]
"""A float64 as hexadecimal text: JSON has neither infinity nor NaN."""


@dataclass(frozen=True, slots=True)
class ExactArray:
    """A small array: numpy's name of its dtype with the byte order, its shape, its bytes in C order as hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    content: str

    @classmethod
    def of(cls, value: np.ndarray | np.floating[Any]) -> ExactArray:
        """Return the form of an array, or of a scalar, which has no dims."""
        array = np.asarray(value)
        return cls(array.dtype.str, array.shape, array.tobytes().hex())

    def array(self) -> np.ndarray:
        """Return the array."""
        return np.frombuffer(bytes.fromhex(self.content), np.dtype(self.dtype)).reshape(self.shape)

    def loss(self) -> Loss:
        """Return a loss: a scalar, or a vector of several losses."""
        value: Any = self.array()[()]
        return cast("Loss", value)


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
