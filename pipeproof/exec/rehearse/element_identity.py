"""Elements that identify their origin, and the search for the origin of wrong elements.

An element's bytes are made from the identity of the sent tensor and the element's index. They are made and read on the
host with numpy; the framework only copies bytes, so a framework whose kernels compute nothing can be rehearsed.
"""

# ruff: noqa: D102 - `Arrays` documents the methods
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from pipeproof.exec.rank.framework_protocol import Array, Arrays, Tensor
from pipeproof.specs.axis_layout import dtype_bytes

Bytes = npt.NDArray[np.uint8]
"""Bytes of a tensor's elements in C order."""
Numbers = npt.NDArray[np.int64]

_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK = 2**14
"""Elements that are made at a time: intermediate values then stay in the processor's caches."""
_MOST_BITS = 6
_EXACT = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24}
"""Limit below which the type represents all integers exactly."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that one rank communicates: its identity, its elements, and its name for messages.

    ``key`` determines the elements: equal keys mean equal elements.
    """

    key: tuple[int, ...]
    rank: int
    numel: int
    text: str

    def content(self, start: int, stop: int, dtype: str) -> Bytes:
        """Return elements ``start .. stop``: index and identity mixed by SplitMix64, cut to the type.

        A tensor with another identity, or the same tensor moved by any number of elements, has other bytes.
        """
        size = dtype_bytes(dtype)
        content = np.empty(stop - start, dtype=f"<u{size}")
        self._fill(content, start, 1 if dtype == "bool" else 8 * size)
        return content.view(np.uint8)

    def numbers(self, num_bits: int) -> Numbers:
        """Return integers of ``num_bits`` bits instead of bytes, for sums."""
        numbers = np.empty(self.numel, dtype=np.int64)
        self._fill(numbers, 0, num_bits)
        return numbers

    def _fill(self, into: np.ndarray, start: int, num_bits: int) -> None:
        """Write the highest bits of the elements from ``start`` on."""
        for offset in range(0, len(into), _BLOCK):
            part = into[offset : offset + _BLOCK]
            part[:] = self._mixed(start + offset, start + offset + len(part)) >> np.uint64(64 - num_bits)

    def _mixed(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        base = np.uint64(int.from_bytes(hashlib.blake2b(repr(self.key).encode(), digest_size=8).digest(), "little"))
        with np.errstate(over="ignore"):
            x = np.arange(start, stop, dtype=np.uint64) * _STEP + base
            x = (x ^ (x >> np.uint64(30))) * _FIRST
            x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))


def addends(sources: list[Source], dtype: str) -> list[Numbers]:
    """Return each member's addend of a sum: integers so small that every partial sum is exact in the type.

    Where even 1-bit integers are too large for the group, each member has nonzero values only at every n-th element.
    """
    exact = _EXACT.get(dtype, 2**31)
    stride = -(-len(sources) // exact)
    num_bits = min(_MOST_BITS, max(1, (exact // len(sources) + 1).bit_length() - 1))
    members = []
    for index, source in enumerate(sources):
        numbers = source.numbers(num_bits)
        if stride > 1:
            numbers[(np.arange(source.numel) + index) % stride != 0] = 0
        members.append(numbers)
    return members


def encoded(numbers: Numbers, dtype: str) -> Bytes:
    """Return integers, exact in the type, as elements of the type."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    return numbers.astype(np.dtype(dtype).newbyteorder("<")).view(np.uint8)


def decoded(content: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Return elements of a type as numbers."""
    if dtype == "bfloat16":
        return (content.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return content.view(np.dtype(dtype).newbyteorder("<")).astype(np.float64)


def elements(content: Bytes, dtype: str) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    """Return the same bytes as unsigned integers, one per element."""
    return content.view(f"<u{dtype_bytes(dtype)}")


_ENOUGH_BYTES = 8
"""Length of the searched pattern: ranges of this many bytes are never equal by chance."""
_MOST_SEARCHED = 2**28
"""Most elements of other tensors that are searched for the origin of a wrong element."""


@dataclass(frozen=True, slots=True)
class FoundRange:
    """Positions ``start .. stop`` of an arrived tensor: the elements of ``source`` from ``source_start`` on.

    Without a ``source`` the elements are zeros (``is_zero``) or of unknown origin.
    """

    start: int
    stop: int
    source: Source | None
    source_start: int = 0
    is_zero: bool = False

    @property
    def text(self) -> str:
        """Name of the elements."""
        if self.source is None:
            return "zeros" if self.is_zero else "elements that no rank sends"
        return f"{self.range_text} of {self.source.text}"

    @property
    def range_text(self) -> str:
        """Indices in the source."""
        return f"elements {self.source_start}..{self.source_start + self.stop - self.start}"


def found_ranges(
    content: Bytes, dtype: str, expected: Sequence[FoundRange], others: Callable[[], Iterable[Source]]
) -> tuple[FoundRange, ...]:
    """Return the origin of all elements of ``content``; it equals ``expected`` if all elements are correct.

    ``others`` are the tensors to search if elements differ, the most likely ones first.
    """
    origins: list[FoundRange] = []
    for part in expected:
        assert part.source is not None
        arrived = elements(content[part.start * dtype_bytes(dtype) : part.stop * dtype_bytes(dtype)], dtype)
        stop = part.source_start + part.stop - part.start
        sent = elements(part.source.content(part.source_start, stop, dtype), dtype)
        if len(arrived) == len(sent) and np.array_equal(arrived, sent):
            origins.append(part)
        else:
            origins += _Search(arrived, sent, part, dtype, [part.source, *others()]).ranges()
    return tuple(origins)


class _Search:
    """Search for the origin of one range with wrong elements."""

    def __init__(
        self, arrived: np.ndarray, sent: np.ndarray, expected: FoundRange, dtype: str, candidates: Sequence[Source]
    ) -> None:
        if len(arrived) < len(sent):  # missing elements count as elements that no rank sends
            arrived = np.concatenate([arrived, ~sent[len(arrived) :]])
        self._arrived, self._sent, self._expected, self._dtype = arrived, sent, expected, dtype
        self._candidates = candidates
        self._window = -(-_ENOUGH_BYTES // dtype_bytes(dtype)) * (8 if dtype == "bool" else 1)

    def ranges(self) -> list[FoundRange]:
        wrong = np.flatnonzero(self._arrived != self._sent)
        size = len(self._sent)
        origins: list[FoundRange] = []
        start = 0
        while start < size:
            next_wrong = int(wrong[np.searchsorted(wrong, start)]) if start <= int(wrong[-1]) else size
            if next_wrong > start:
                source_start = self._expected.source_start + start
                origins.append(self._range(start, next_wrong, self._expected.source, source_start))
            if next_wrong < size:
                origins.append(self._identify(next_wrong))
            start = origins[-1].stop - self._expected.start
        return _joined(origins)

    def _range(
        self, start: int, stop: int, source: Source | None, source_start: int = 0, *, zero: bool = False
    ) -> FoundRange:
        offset = self._expected.start
        return FoundRange(start + offset, stop + offset, source, source_start, zero)

    def _identify(self, start: int) -> FoundRange:
        """Return the longest range from ``start`` on with one origin."""
        arrived = self._arrived
        stop = self._next_correct(start)
        if not arrived[start:stop].any():
            return self._range(start, stop, None, zero=True)
        window = arrived[start : start + self._window].tobytes()
        if len(window) >= _ENOUGH_BYTES:
            searched = 0
            for source in self._candidates:
                searched += source.numel
                if searched > _MOST_SEARCHED:
                    break
                whole = elements(source.content(0, source.numel, self._dtype), self._dtype)
                index = _find(whole.tobytes(), window, whole.itemsize)
                if index >= 0:
                    length = min(len(arrived) - start, len(whole) - index)
                    same = arrived[start : start + length] == whole[index : index + length]
                    length = length if same.all() else int(np.argmin(same))
                    return self._range(start, start + length, source, index)
        return self._range(start, stop, None)

    def _next_correct(self, start: int) -> int:
        """Return the first index after ``start`` where the number of consecutive correct elements excludes chance."""
        counted = np.concatenate([[0], np.cumsum((self._arrived == self._sent)[start:])])
        window = min(self._window, len(counted) - 1)
        begins = np.flatnonzero(counted[window:] - counted[:-window] == window)
        return start + int(begins[0]) if len(begins) else len(self._arrived)


def _find(whole: bytes, window: bytes, size: int) -> int:
    """Return the index of the elements ``window`` in ``whole``, elements of ``size`` bytes; -1 if they do not occur."""
    position = whole.find(window)
    while position >= 0 and position % size:
        position = whole.find(window, position + 1)
    return position // size if position >= 0 else -1


def _joined(ranges: Iterable[FoundRange]) -> list[FoundRange]:
    joined: list[FoundRange] = []
    for part in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.source == part.source and last.is_zero == part.is_zero:
            next_start = last.source_start + last.stop - last.start
            if part.source is None or part.source_start == next_start:
                joined[-1] = FoundRange(last.start, part.stop, last.source, last.source_start, last.is_zero)
                continue
        joined.append(part)
    return joined


@dataclass(slots=True, eq=False)
class RehearsalTensor:
    """Tensor with elements ``start ..`` of ``source``, with a ``buffer`` of the framework, or without elements.

    ``ranges`` are the origins of the elements that arrived in it, found on arrival; ``receive`` is the operation that
    received it, if its ``buffer`` is a slot, which is read again. ``gradient`` is set by backward. An output of a stage
    has the ``work_item`` and the ``inputs`` that it was computed from.
    """

    shape: tuple[int, ...]
    dtype: str
    source: Source | None = None
    start: int = 0
    buffer: Tensor = None
    is_slot: bool = False
    ranges: tuple[FoundRange, ...] = ()
    receive: int | None = None
    gradient: RehearsalTensor | None = None
    work_item: int = -1
    inputs: tuple[RehearsalTensor, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def detach(self) -> RehearsalTensor:
        """Return the tensor: there is no autograd."""
        return self

    clone = contiguous = detach

    def reshape(self, shape: Sequence[int]) -> RehearsalTensor:
        """Return the same elements in another shape."""
        return replace(self, shape=tuple(shape))

    def flatten(self) -> RehearsalTensor:
        """Return the same elements as a vector."""
        return self.reshape((self.numel,))

    def __getitem__(self, part: slice) -> RehearsalTensor:
        """Return a range of a vector."""
        return replace(self, shape=(part.stop - part.start,), start=self.start + part.start)

    def __setitem__(self, part: slice, arrived: RehearsalTensor) -> None:
        """Take the origins of a received range; the elements are not copied."""
        by = part.start
        self.ranges += tuple(replace(r, start=r.start + by, stop=r.stop + by) for r in arrived.ranges)


class RehearsalArrays:
    """Operations on tensors of a rehearsal, by a framework's operations; an ``Arrays``."""

    def __init__(self, arrays: Arrays) -> None:
        self.real = arrays
        """Operations on the tensors that are communicated."""

    def empty(self, shape: Sequence[int], dtype: str) -> RehearsalTensor:
        return RehearsalTensor(tuple(shape), dtype)

    zeros = empty

    def shaped(self, memory: RehearsalTensor, shape: Sequence[int], dtype: str, start: int = 0) -> RehearsalTensor:
        assert start == 0, "packed messages are not rehearsed"
        if memory.buffer is None:
            memory.buffer = self.real.zeros(memory.shape, memory.dtype)
        buffer = self.real.shaped(memory.buffer, [prod(shape)], dtype)
        return RehearsalTensor(tuple(shape), dtype, buffer=buffer, is_slot=True)

    def copy_into(self, target: RehearsalTensor, source: RehearsalTensor) -> RehearsalTensor:
        self.real.copy_into(target.buffer, self.buffer_of(source))
        return target

    def numel(self, tensor: RehearsalTensor) -> int:
        return tensor.numel

    def dtype(self, tensor: RehearsalTensor) -> str:
        return tensor.dtype

    def to_numpy(self, tensor: RehearsalTensor) -> Array:
        """Return zeros that take no memory: a rehearsal has no values."""
        return np.broadcast_to(np.zeros(()), tensor.shape)

    def from_bytes(self, content: Bytes, shape: Sequence[int], dtype: str) -> RehearsalTensor:
        return RehearsalTensor(tuple(shape), dtype, buffer=self.real.from_bytes(content, [prod(shape)], dtype))

    def to_bytes(self, tensor: RehearsalTensor) -> Bytes:
        return self.real.to_bytes(self.buffer_of(tensor))

    def synchronize(self) -> None:
        self.real.synchronize()

    def want_gradient(self, tensor: RehearsalTensor, *, wanted: bool) -> None:
        """Do nothing: each stage makes the gradients of its inputs anew."""

    def gradient(self, tensor: RehearsalTensor) -> RehearsalTensor | None:
        return tensor.gradient

    def release(self, tensor: RehearsalTensor) -> None:
        """Do nothing: elements that a stage makes have no memory."""

    def buffer_of(self, tensor: RehearsalTensor) -> Tensor:
        """Return the flat tensor of the framework to communicate: its buffer, its source's elements, or zeros."""
        if tensor.buffer is not None:
            return tensor.buffer
        if tensor.source is None:
            content = np.zeros(tensor.numel * dtype_bytes(tensor.dtype), dtype=np.uint8)
            tensor.buffer = self.real.from_bytes(content, [tensor.numel], tensor.dtype)
            return tensor.buffer
        content = tensor.source.content(tensor.start, tensor.start + tensor.numel, tensor.dtype)
        return self.real.from_bytes(content, [tensor.numel], tensor.dtype)
