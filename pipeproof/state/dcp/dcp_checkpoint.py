"""Opening PyTorch's distributed checkpoint (DCP): its metadata is compared with the archives in its files.

The elements of a tensor are in a file unchanged: they are located and streamed like in other formats.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path

import numpy as np

from pipeproof.foreign_text import open_foreign, regular_size
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import RangeReader
from pipeproof.state.checkpoint import Checkpoint, HeldShard
from pipeproof.state.dcp.dcp_metadata import METADATA_FILE, DcpChunk, DcpMetadata, read_metadata
from pipeproof.state.dcp.torch_archive import locate_tensor
from pipeproof.state.state_codes import DcpError, reading
from pipeproof.state.state_index import Shard, TensorEntry, TensorKind

RESERVED = "pipeproof."
"""Beginning of ``save_dcp``'s names for entries outside of the model: RNG states, positions, its own record."""
OPTIMIZER = "optimizer.state."
_STATES = (OPTIMIZER, "optim.state.", "state.")
"""Beginnings of the names of optimizer states, which have the weight's name and the slot's: ours, and PyTorch's."""
_MODEL = ("", "model.")
_BLOCK = 2**22
_FIX = "save the checkpoint again, or copy it again from where it was saved"


def is_dcp(path: Path) -> bool:
    """Return True if a directory is a distributed checkpoint of PyTorch."""
    return (path / METADATA_FILE).exists()


def open_dcp(path: Path) -> Checkpoint:
    """Open the checkpoint of PyTorch's in the directory ``path``, with its tensors under their names in it.

    Raises:
        DcpError: A file is missing, cut short, or differs from the metadata; or the metadata is a foreign pickle.
    """
    metadata = read_metadata(path)
    require_files(path, metadata)
    tensors = {name: tensor for name, tensor in metadata.tensors.items() if not name.startswith(RESERVED)}
    entries = {name: _entry(name, metadata) for name in tensors}
    places = [(chunk.file, chunk.start, name, number) for name in tensors for number, chunk in _chunks(metadata, name)]
    located = {(name, number): held for name, number, held in _located(path, metadata, places)}
    stored = {name: tuple(located[name, number][0] for number, _ in _chunks(metadata, name)) for name in tensors}
    others = tuple(sorted({*metadata.objects, *(metadata.tensors.keys() - tensors.keys())}))
    files = dict.fromkeys(sorted({path / file for file in metadata.spans()}))
    return Checkpoint(path, "dcp", entries, stored, files, None, others=others, crcs=dict(located.values()))


_Place = tuple[str, int, str, int]
"""File and first byte of a chunk, the name of its tensor, and its number there."""


def _chunks(metadata: DcpMetadata, name: str) -> Iterable[tuple[int, DcpChunk]]:
    return enumerate(metadata.tensors[name].chunks)


def _located(
    path: Path, metadata: DcpMetadata, places: Iterable[_Place]
) -> Iterator[tuple[str, int, tuple[HeldShard, int]]]:
    """Yield name and number of chunks, the location of their elements, and their CRC-32; file by file."""
    for file, of_file in groupby(sorted(places), key=itemgetter(0)):
        with reading(path / file, _FIX), open_foreign(path / file) as stream:
            for _, _, name, number in of_file:
                tensor = metadata.tensors[name]
                chunk = tensor.chunks[number]
                array, crc = locate_tensor(stream, path / file, name, tensor.dtype, chunk)
                shard = Shard(tensor=name, offsets=chunk.offsets, extents=chunk.extents)
                yield name, number, (HeldShard(shard, _rank_of(file), path / file, array.start), crc)


def require_content(path: Path, metadata: DcpMetadata, share: int, num_shares: int) -> None:
    """Refuse a checkpoint with an element that has changed; of ``num_shares`` processes, each checks its share.

    Raises:
        DcpError: An archive is damaged, or its elements have another CRC-32.
    """
    places = sorted(
        (chunk.file, chunk.start, name, number)
        for name in metadata.tensors
        for number, chunk in _chunks(metadata, name)
    )
    begin, end = (len(places) * number // num_shares for number in (share, share + 1))
    for name, _, (stored, crc) in _located(path, metadata, places[begin:end]):
        require_crc(stored, metadata.tensors[name].dtype, crc)


def require_crc(stored: HeldShard, dtype: str, crc: int) -> None:
    """Refuse a shard whose elements have another CRC-32; -1 is none.

    Raises:
        DcpError: It was changed.
    """
    if crc < 0:
        return
    computed, num_bytes = 0, prod(stored.shard.shape) * dtype_bytes(dtype)
    buffer = np.empty(min(_BLOCK, num_bytes), np.uint8)
    with RangeReader(_FIX) as reader:
        for begin in range(0, num_bytes, _BLOCK):
            block = buffer[: num_bytes - begin]
            reader.read(stored.file, stored.start + begin, block)
            computed = zlib.crc32(block.data, computed)
    if computed != crc:
        message = f"{stored.file} was changed: the elements of {stored.shard.tensor} have another CRC-32 than it lists"
        raise DcpError(message, _FIX)


def require_files(path: Path, metadata: DcpMetadata) -> None:
    """Refuse a checkpoint with a file that is missing, or shorter than the metadata requires.

    Raises:
        DcpError: There is one.
    """
    firsts = _first_names(metadata)
    for file, length in sorted(metadata.spans().items()):
        with reading(path / file, _FIX):
            try:
                size = regular_size(path / file)
            except FileNotFoundError as error:
                raise DcpError(f"{path / file} is missing; it holds {firsts[file]}", _FIX) from error
        if size < length:
            raise DcpError(f"{path / file} is cut short: it has {size} bytes, and {length} in the metadata", _FIX)


def _first_names(metadata: DcpMetadata) -> Mapping[str, str]:
    named = [(chunk.file, name) for name in metadata.tensors for _, chunk in _chunks(metadata, name)]
    named += [(stored.file, name) for name, stored in metadata.objects.items()]
    return dict(reversed(named))


def _entry(name: str, metadata: DcpMetadata) -> TensorEntry:
    """Return the entry of a tensor; its kind follows from PyTorch's names of optimizer states."""
    tensor = metadata.tensors[name]
    kind: TensorKind = "weight"
    weight = weight_of_state(name, metadata)
    if weight is not None:
        kind = "counter" if not tensor.shape and metadata.tensors[weight].shape else "moment"
    return TensorEntry(kind=kind, dtype=tensor.dtype, shape=tensor.shape, weight=weight)


def weight_of_state(name: str, metadata: DcpMetadata) -> str | None:
    """Return the weight of an optimizer state; None for any other tensor."""
    for start in _STATES:
        if name.startswith(start):
            inner = name.removeprefix(start).rpartition(".")[0]
            return next((prefix + inner for prefix in _MODEL if prefix + inner in metadata.tensors), None)
    return None


def _rank_of(file: str) -> int | None:
    """Return the rank in the name of a file, ``__RANK_NUMBER.distcp``."""
    number = file.removeprefix("__").partition("_")[0]
    return int(number) if number.isdecimal() and number.isascii() else None
