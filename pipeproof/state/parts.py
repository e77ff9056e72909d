"""What a rank holds of a saved state, put together from whichever parts meet it, wherever these stand.

Ranges of bytes are read, and no files: what is in memory is what the rank
holds, and one block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.boxes import Box, meet
from pipeproof.state.codes import StateError
from pipeproof.state.files import ByteArray
from pipeproof.state.header import Header, read_header
from pipeproof.state.index import Shard, ShardFile, StateIndex
from pipeproof.state.layout import COUNTERS_AT_FIRST, Piece, pieces_of
from pipeproof.state.load import SavedState

_BLOCK = 2**26
"""Most bytes that are read at once beside where they go."""
_GAP = 2**18
"""Up to so many bytes are read at once although not all are asked for: many short reads take longer."""
_MEND = "copy the file anew from where it was saved, or name another state"


def shards_of(index: StateIndex) -> dict[str, list[tuple[Shard, ShardFile]]]:
    """By tensor the parts that there are, each with its file."""
    found: dict[str, list[tuple[Shard, ShardFile]]] = {}
    for file in index.files:
        for shard in file.shards:
            found.setdefault(shard.tensor, []).append((shard, file))
    return found


def read_part(state: SavedState, plan: LoweredPlan, rank: int) -> dict[tuple[str, str], ByteArray]:
    """What a rank holds of the state, by weight and slot, as ``require_fits`` has looked at it.

    Where the state is of weights alone, all else is as it is before the first step.

    Raises:
        StateError: a file changed since.
    """
    held, content = shards_of(state.index), {}
    with ExitStack() as stack:
        files = _Files(state.directory, stack)
        for piece in pieces_of(plan, rank):
            of_piece = held.get(piece.shard.tensor)
            values = _at_first(piece) if of_piece is None else _read(piece, of_piece, files)
            content[piece.weight, piece.slot] = ByteArray(piece.tensor.dtype, piece.shape, values.reshape(-1))
    return content


def _at_first(piece: Piece) -> npt.NDArray[np.uint8]:
    """What no step has made yet: moments and biases are zero; counters are of types that numpy has."""
    if piece.tensor.kind == "counter":
        return np.array([COUNTERS_AT_FIRST[piece.slot]], dtype=piece.tensor.dtype).view(np.uint8)
    return np.zeros(prod(piece.shape) * dtype_bytes(piece.tensor.dtype), dtype=np.uint8)


def _read(piece: Piece, held: Sequence[tuple[Shard, ShardFile]], files: _Files) -> npt.NDArray[np.uint8]:
    """The elements of a piece; whatever parts hold them tile it."""
    item = dtype_bytes(piece.tensor.dtype)
    values = np.empty((prod(piece.shape), item), dtype=np.uint8)
    there = Box(piece.shard.offsets, piece.shard.extents)
    near = [(shard, file) for shard, file in held if meet(Box(shard.offsets, shard.extents), there) is not None]
    for mine, own in piece.shard.boxes():
        target = values[mine : mine + own.numel].reshape(*own.extents, item)
        for shard, file in near:
            for theirs, box in shard.boxes():
                common = meet(own, box)
                if common is not None:
                    start = files.start(file.name, file.key_of(shard.tensor)) + theirs * item
                    for block in _blocks(common.within(box), box.extents, item):
                        inside = block.moved(box.offsets).within(own)
                        place = tuple(map(slice, inside.offsets, inside.stops))
                        target[place] = files.read(file.name, start, block, box.extents, item)
    return values


def _blocks(box: Box, extents: Sequence[int], item: int) -> Iterator[Box]:
    """A box of an array of those extents in pieces, each one range of the array, or a short one with gaps."""
    span = _span(box, extents) * item
    if span <= (_BLOCK if span == box.numel * item else _GAP) or box.numel == 1:
        yield box
        return
    dim = next(dim for dim, extent in enumerate(box.extents) if extent > 1)
    half = box.extents[dim] // 2
    for start, extent in ((0, half), (half, box.extents[dim] - half)):
        by = [start if one == dim else 0 for one in range(len(extents))]
        part = tuple(extent if one == dim else size for one, size in enumerate(box.extents))
        yield from _blocks(Box(box.offsets, part).moved(by), extents, item)


def _flat(place: Sequence[int], extents: Sequence[int]) -> int:
    """The number of an element in C order."""
    number = 0
    for at, extent in zip(place, extents, strict=True):
        number = number * extent + at
    return number


def _span(box: Box, extents: Sequence[int]) -> int:
    """Elements from the first to the last one of a box."""
    return _flat([stop - 1 for stop in box.stops], extents) - _flat(box.offsets, extents) + 1


@dataclass(frozen=True, slots=True)
class _Files:
    """A state's files, each opened, and its header read, when it is first asked for."""

    directory: Path
    stack: ExitStack
    opened: dict[str, tuple[int, Header]] = field(default_factory=dict)

    def start(self, file: str, key: str) -> int:
        """The byte where an array begins."""
        array = self._open(file)[1].arrays.get(key)
        if array is None:
            raise StateError(f"{self.directory / file} was changed: {key} is not there", _MEND)
        return array.start

    def read(self, file: str, start: int, box: Box, extents: Sequence[int], item: int) -> npt.NDArray[np.uint8]:
        """A box of the array of those extents that begins at ``start``: [*box.extents, item]."""
        size, at = _span(box, extents) * item, start + _flat(box.offsets, extents) * item
        content = np.empty(size, dtype=np.uint8)
        done = 0
        while done < size:  # a network's disk may give less than was asked for
            try:
                read = os.preadv(self._open(file)[0], [content.data[done:]], at + done)
            except OSError as error:
                raise StateError(f"{self.directory / file} cannot be read: {error.strerror}", _MEND) from error
            if not read:
                raise StateError(f"{self.directory / file} is cut short: it ends before the byte {at + size}", _MEND)
            done += read
        strides = [prod(extents[dim + 1 :]) * item for dim in range(len(extents))]
        return np.ndarray((*box.extents, item), np.uint8, content, strides=(*strides, 1))

    def _open(self, file: str) -> tuple[int, Header]:
        if file not in self.opened:
            path = self.directory / file
            header = read_header(path)
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise StateError(f"{path} cannot be read: {error.strerror}", _MEND) from error
            self.stack.callback(os.close, handle)
            self.opened[file] = handle, header
        return self.opened[file]
