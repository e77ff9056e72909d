"""Tensors of a rehearsal: elements with an origin, held by the framework only while they are communicated.

Nothing computes with them. The framework under the rehearsal only makes tensors of bytes and reads their bytes, so a
framework whose kernels compute nothing can be rehearsed.
"""

# ruff: noqa: D102 - `Arrays` documents the methods
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pipeproof.exec.rank.framework_protocol import Array, Arrays, Tensor
from pipeproof.exec.rehearse.element_identity import Bytes, FoundRange, Source
from pipeproof.specs.axis_layout import dtype_bytes


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
    """Operations on tensors of a rehearsal over those of a framework; an ``Arrays``."""

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
        """Return zeros without memory of their own: a rehearsal has no values."""
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
            tensor.buffer = self._zeros(tensor)
            return tensor.buffer
        content = tensor.source.content(tensor.start, tensor.start + tensor.numel, tensor.dtype)
        return self.real.from_bytes(content, [tensor.numel], tensor.dtype)

    def _zeros(self, tensor: RehearsalTensor) -> Tensor:
        content = np.zeros(tensor.numel * dtype_bytes(tensor.dtype), dtype=np.uint8)
        return self.real.from_bytes(content, [tensor.numel], tensor.dtype)
