"""Measured peak of matrix products: the rate of a large square product in one type, on the device of a rank."""

from __future__ import annotations

import time

import numpy as np

from pipeproof.exec.rank.framework_protocol import Arrays, Tensor

_FIRST_SIZE, _LARGEST_SIZE = 128, 8192
"""Rows of the smallest and of the largest product; the size doubles until a product is long enough."""
_LONG_ENOUGH_S = 0.005
_REPEATS_S = 0.1
"""Time in which the product of the last size is repeated; it runs once at least."""


def product_peak(arrays: Arrays, dtype: str) -> float:
    """Return the FLOP/s of the fastest of several square products on the device of ``arrays``, in a tenth of a second.

    The host waits for each product. Values are random, because a GPU multiplies zeros faster.
    """
    size = _FIRST_SIZE
    left, right = _matrix(arrays, size, dtype), _matrix(arrays, size, dtype)
    _seconds(arrays, left, right)  # loads the kernels
    while _seconds(arrays, left, right) < _LONG_ENOUGH_S and size < _LARGEST_SIZE:
        size *= 2
        left, right = _matrix(arrays, size, dtype), _matrix(arrays, size, dtype)
        _seconds(arrays, left, right)
    shortest, ends = _seconds(arrays, left, right), time.monotonic() + _REPEATS_S
    while time.monotonic() < ends:
        shortest = min(shortest, _seconds(arrays, left, right))
    return 2.0 * size**3 / shortest


def _seconds(arrays: Arrays, left: Tensor, right: Tensor) -> float:
    arrays.synchronize()
    start = time.perf_counter()
    left @ right
    arrays.synchronize()
    return time.perf_counter() - start


def _matrix(arrays: Arrays, size: int, dtype: str) -> Tensor:
    """Return a square matrix of values between -1 and 1."""
    values = np.random.default_rng(0).uniform(-1, 1, 2**16).astype("float32")
    is_upper_half = dtype == "bfloat16"  # of float32; numpy has no such type
    typed = (values.view(np.uint32) >> 16).astype(np.uint16) if is_upper_half else values.astype(dtype)
    return arrays.from_bytes(np.resize(typed, size * size).view(np.uint8), [size, size], dtype)
