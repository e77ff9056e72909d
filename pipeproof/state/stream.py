"""Whole tensors of a checkpoint as bytes in C order, block by block, whatever parts they lie in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.boxes import Box, flat_boxes, meet, tiling_fault
from pipeproof.state.checkpoint import Checkpoint, StoredPart
from pipeproof.state.codes import StateError

BLOCK = 2**24
"""Most bytes of a tensor that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A box of a whole tensor that lies in C order in one file, from the byte ``start`` on."""

    box: Box
    file: Path
    start: int


def stretches_of(part: StoredPart, item: int) -> Iterator[Stretch]:
    """A part as boxes that are each one range of its file; ``item`` is the bytes of an element."""
    return (Stretch(box, part.file, part.start + first * item) for first, box in part.shard.boxes())


def require_tiled(checkpoint: Checkpoint, name: str) -> list[Stretch]:
    """A tensor as the stretches that it lies in, every element in one of them.

    Raises:
        StateError: an element stands nowhere, or in several places.
    """
    item = dtype_bytes(checkpoint.tensors[name].dtype)
    stretches = [one for part in checkpoint.parts.get(name, ()) for one in stretches_of(part, item)]
    fault = tiling_fault(checkpoint.tensors[name].shape, [stretch.box for stretch in stretches])
    if fault is None:
        return stretches
    where = " and ".join(sorted({str(stretches[number].file) for number in fault.holders})[:2]) or "no file"
    raise StateError(
        f"{checkpoint.place}: of {name}, {list(checkpoint.tensors[name].shape)}, the part of {list(fault.box.extents)} "
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
    item = dtype_bytes(entry.dtype)
    stretches = require_tiled(checkpoint, name)
    numel, row = prod(entry.shape), prod(entry.shape[1:])
    most = max(1, block_bytes // item)
    step = most // row * row or most if row else most  # whole rows where one fits: fewer and longer reads
    buffer = np.empty((min(step, numel), item), dtype=np.uint8)
    with ExitStack() as opened:
        handles: dict[Path, int] = {}
        for begin in range(0, numel, step):
            end, done = min(begin + step, numel), 0
            for box in flat_boxes(entry.shape, (begin, end)):
                values = buffer[done : done + box.numel].reshape(*box.extents, item)
                for stretch in stretches:
                    common = meet(stretch.box, box)
                    if common is not None:
                        handle = _opened(stretch.file, handles, opened)
                        inside = common.within(box)
                        place = tuple(map(slice, inside.offsets, inside.stops))
                        values[place] = _read(handle, stretch, common, item).reshape(*common.extents, item)
                done += box.numel
            yield buffer[: end - begin].reshape(-1)


def _opened(file: Path, handles: dict[Path, int], opened: ExitStack) -> int:
    if file not in handles:
        try:
            handles[file] = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise StateError(f"{file} cannot be read: {error.strerror}", _MEND) from error
        opened.callback(os.close, handles[file])
    return handles[file]


def _read(handle: int, stretch: Stretch, common: Box, item: int) -> npt.NDArray[np.uint8]:
    """What a stretch has of a box that is a range of the flattened tensor, and so one of the stretch, too."""
    first = 0
    for place, extent in zip(common.within(stretch.box).offsets, stretch.box.extents, strict=True):
        first = first * extent + place
    start, size = stretch.start + first * item, common.numel * item
    content, done = np.empty(size, dtype=np.uint8), 0
    while done < size:  # a network's disk may give less than was asked for
        try:
            read = os.preadv(handle, [content.data[done:]], start + done)
        except OSError as error:
            raise StateError(f"{stretch.file} cannot be read: {error.strerror}", _MEND) from error
        if not read:
            raise StateError(f"{stretch.file} is cut short: it ends before the byte {start + size}", _MEND)
        done += read
    return content


_MEND = "copy the file anew from where it was saved, or name another checkpoint"
