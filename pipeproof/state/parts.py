"""What a rank holds of a saved state, put together from whichever parts meet it, wherever these stand.

Ranges of bytes are read, and no files: what is in memory is what the rank
holds, and one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.boxes import Box, meet
from pipeproof.state.checkpoint import StoredPart
from pipeproof.state.files import ByteArray
from pipeproof.state.header import Header, read_header, require_array
from pipeproof.state.index import Shard, ShardFile, StateIndex
from pipeproof.state.layout import COUNTERS_AT_FIRST, Piece, pieces_of
from pipeproof.state.load import SavedState
from pipeproof.state.ranges import RangeReader
from pipeproof.state.reshard.cast import Bits, bits_dtype
from pipeproof.state.stream import Stretch, read_stretches, stretches_of

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

    Where the state is of weights alone, all else is as it is before the first step: buffers that it has not are not
    among the result, and stay as the layers were built.

    Raises:
        StateError: a file changed since.
    """
    held, content, files = shards_of(state.index), {}, _Files(state.directory)
    with RangeReader(_MEND) as reader:
        for piece in pieces_of(plan, rank):
            of_piece = held.get(piece.shard.tensor)
            if of_piece is None and piece.tensor.kind == "buffer":
                continue
            values = _at_first(piece) if of_piece is None else _read(piece, of_piece, files, reader)
            content[piece.weight, piece.slot] = ByteArray(piece.tensor.dtype, piece.shape, values.view(np.uint8))
    return content


def _at_first(piece: Piece) -> Bits:
    """What no step has made yet: moments and biases are zero; counters are of types that numpy has."""
    if piece.tensor.kind == "counter":
        return np.array([COUNTERS_AT_FIRST[piece.slot]], dtype=piece.tensor.dtype)
    return np.zeros(prod(piece.shape), bits_dtype(piece.tensor.dtype))


def _read(piece: Piece, held: Sequence[tuple[Shard, ShardFile]], files: _Files, reader: RangeReader) -> Bits:
    """The elements of a piece; whatever parts hold them tile it."""
    values = np.empty(prod(piece.shape), bits_dtype(piece.tensor.dtype))
    there = Box(piece.shard.offsets, piece.shard.extents)
    near = [(shard, file) for shard, file in held if meet(Box(shard.offsets, shard.extents), there) is not None]
    for first, own in piece.shard.boxes():
        target = values[first : first + own.numel].reshape(own.extents)
        for shard, file in near:
            read_stretches(reader, files.stretches(shard, file, piece.tensor.dtype), own, target)
    return values


@dataclass(frozen=True, slots=True)
class _Files:
    """A state's files, of each of which the header is read when it is first asked for."""

    directory: Path
    headers: dict[Path, Header] = field(default_factory=dict)

    def stretches(self, shard: Shard, file: ShardFile, dtype: str) -> Iterator[Stretch]:
        """Where a part lies."""
        path, key = self.directory / file.name, file.key_of(shard.tensor)
        if path not in self.headers:
            self.headers[path] = read_header(path)
        array = require_array(path, self.headers[path], key, dtype, shard.shape, _MEND)
        return stretches_of(StoredPart(shard, path, key, array.start, file.rank), dtype)
