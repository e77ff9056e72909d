"""Values of any framework as numpy arrays, by what they can do and without importing what they come from."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def dtype_name(value: Any) -> str:
    """The element type without its framework's prefix: ``bfloat16``, ``float32``."""
    dtype = getattr(value, "dtype", None)
    return str(np.asarray(value).dtype if dtype is None else dtype).rpartition(".")[2]


def as_array(value: Any) -> NDArray[Any]:
    """A number, a list, an array, or a tensor of PyTorch or Paddle as numpy's array; not always a copy.

    bfloat16, which numpy lacks, comes as float32, in which each of its values is exact.

    Raises:
        ValueError: this is no array of numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach()
    if dtype_name(value) == "bfloat16":
        value = value.astype("float32") if hasattr(value, "astype") else value.float()
    if hasattr(value, "cpu"):
        value = value.cpu()
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype == object:
        raise ValueError(f"{type(value).__name__} is no array of numbers")
    return array


def digest(array: NDArray[Any]) -> str:
    """The first 16 hexadecimal digits of SHA-256 over shape, type and bytes in C order."""
    head = f"{array.shape} {array.dtype.newbyteorder('<').str} ".encode()
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(head + little.tobytes()).hexdigest()[:16]
