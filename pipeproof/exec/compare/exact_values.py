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
