"""Elements that say where they come from: bytes made from the identity of what is sent and the index in it.

All is made and read on the host, with numpy: a framework only copies bytes, so
that one whose kernels compute nothing can be rehearsed with.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeproof.specs.dtypes import dtype_bytes

Bytes = npt.NDArray[np.uint8]
"""The elements of a tensor in C order, byte by byte."""
Numbers = npt.NDArray[np.int64]

_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK = 2**14
"""Elements that are made at a time: what is made of them on the way stays in the processor's caches."""
_MOST_BITS = 6
_EXACT = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24}
"""Up to which all whole numbers are numbers of the type."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that one rank gives to communication: its identity as a number, its elements, and what people call it.

    ``key`` is what it was made of; the same key means the same elements.
    """

    key: tuple[int, ...]
    rank: int
    numel: int
    text: str

    def content(self, start: int, stop: int, dtype: str) -> Bytes:
        """Elements ``start .. stop``: mixed with their identity by the finalizer of SplitMix64, cut to the type's size.

        A tensor of another identity, or the same one moved by any number of elements, has other bytes.
        """
        size = dtype_bytes(dtype)
        content = np.empty(stop - start, dtype=f"<u{size}")
        self._fill(content, start, 1 if dtype == "bool" else 8 * size)
        return content.view(np.uint8)

    def numbers(self, num_bits: int) -> Numbers:
        """Whole numbers of so many bits in place of bytes, for sums."""
        numbers = np.empty(self.numel, dtype=np.int64)
        self._fill(numbers, 0, num_bits)
        return numbers

    def _fill(self, into: np.ndarray, start: int, num_bits: int) -> None:
        """The uppermost bits of the elements from ``start`` on."""
        for at in range(0, len(into), _BLOCK):
            part = into[at : at + _BLOCK]
            part[:] = self._mixed(start + at, start + at + len(part)) >> np.uint64(64 - num_bits)

    def _mixed(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        base = np.uint64(int.from_bytes(hashlib.blake2b(repr(self.key).encode(), digest_size=8).digest(), "little"))
        with np.errstate(over="ignore"):
            x = np.arange(start, stop, dtype=np.uint64) * _STEP + base
            x = (x ^ (x >> np.uint64(30))) * _FIRST
            x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))


def addends(sources: list[Source], dtype: str) -> list[Numbers]:
    """What each member puts into a sum: whole numbers, so small that every sum of some of them is exact in the type.

    Where a group is so large that even ones would not be, a member's are 0 but at every so manieth element.
    """
    exact = _EXACT.get(dtype, 2**31)
    stride = -(-len(sources) // exact)
    num_bits = min(_MOST_BITS, max(1, (exact // len(sources) + 1).bit_length() - 1))
    found = []
    for place, source in enumerate(sources):
        numbers = source.numbers(num_bits)
        if stride > 1:
            numbers[(np.arange(source.numel) + place) % stride != 0] = 0
        found.append(numbers)
    return found


def encoded(numbers: Numbers, dtype: str) -> Bytes:
    """Whole numbers as elements of a type; those that it has exactly."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    return numbers.astype(np.dtype(dtype).newbyteorder("<")).view(np.uint8)


def decoded(content: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Elements of a type as numbers."""
    if dtype == "bfloat16":
        return (content.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return content.view(np.dtype(dtype).newbyteorder("<")).astype(np.float64)


def elements(content: Bytes, dtype: str) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    """The same bytes, an element at a time."""
    return content.view(f"<u{dtype_bytes(dtype)}")
