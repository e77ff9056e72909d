"""Whole tensors of a checkpoint as bytes in C order, block by block, whatever parts they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from pipeproof.state.boxes import Box, flat_boxes, meet, tiling_fault
from pipeproof.state.checkpoint import Checkpoint, StoredPart
from pipeproof.state.codes import StateError
from pipeproof.state.ranges import FileArray, RangeReader
from pipeproof.state.reshard.cast import Bits, bits_dtype

BLOCK = 2**24
"""Most bytes of a tensor that are in memory at once."""
_MEND = "copy the file anew from where it was saved, or name another checkpoint"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A box of a whole tensor that lies in C order in one file, as an array of its extents."""

    box: Box
    array: FileArray


def stretches_of(part: StoredPart, dtype: str) -> Iterator[Stretch]:
    """A part as boxes that are each one range of its file; ``dtype`` is the type of the elements."""
    bits = bits_dtype(dtype)
    for first, box in part.shard.boxes():
        yield Stretch(box, FileArray(part.file, part.start + first * bits.itemsize, box.extents, bits))


def read_stretches(
    reader: RangeReader,
    stretches: Iterable[Stretch],
    box: Box,
    out: Bits,
    change: Callable[[Bits], Bits] | None = None,
) -> None:
    """Put what some stretches have of a box of their tensor into ``out``, of the box's extents and any strides.

    ``change`` is as for ``RangeReader.read_box``.

    Raises:
        StateError: a file cannot be read, or ends before.
    """
    for stretch in stretches:
        common = meet(stretch.box, box)
        if common is not None:
            reader.read_box(stretch.array, common.within(stretch.box), out[common.within(box).slices], change)


def require_tiled(checkpoint: Checkpoint, name: str) -> list[Stretch]:
    """A tensor as the stretches that it lies in, every element in one of them.

    Raises:
        StateError: an element stands nowhere, or in several places.
    """
    entry = checkpoint.tensors[name]
    stretches = [one for part in checkpoint.parts.get(name, ()) for one in stretches_of(part, entry.dtype)]
    fault = tiling_fault(entry.shape, [stretch.box for stretch in stretches])
    if fault is None:
        return stretches
    where = " and ".join(sorted({str(stretches[number].array.path) for number in fault.holders})[:2]) or "no file"
    raise StateError(
        f"{checkpoint.place}: of {name}, {list(entry.shape)}, the part of {list(fault.box.extents)} "
        f"from {list(fault.box.offsets)} on stands in {where}, and must stand in one place",
        "the index was changed, or a file of another checkpoint lies there: copy it anew from where it was saved",
    )


def tensor_blocks(checkpoint: Checkpoint, name: str, block_bytes: int = BLOCK) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a whole tensor in C order, at most ``block_bytes`` of them at once (but a whole element).

    A block is overwritten by the next one.

    Raises:
        StateError: its parts do not make up the tensor, or a file cannot be read or is too short.
    """
    entry = checkpoint.tensors[name]
    bits, stretches = bits_dtype(entry.dtype), require_tiled(checkpoint, name)
    numel, row = prod(entry.shape), prod(entry.shape[1:])
    most = max(1, block_bytes // bits.itemsize)
    step = most // row * row or most if row else most  # whole rows where one fits: fewer and longer reads
    buffer = np.empty(min(step, numel), bits)
    with RangeReader(_MEND) as reader:
        for begin in range(0, numel, step):
            end, done = min(begin + step, numel), 0
            for box in flat_boxes(entry.shape, (begin, end)):
                read_stretches(reader, stretches, box, buffer[done : done + box.numel].reshape(box.extents))
                done += box.numel
            yield buffer[: end - begin].view(np.uint8)
