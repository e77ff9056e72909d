"""Opening PyTorch's distributed checkpoint (DCP) by its metadata; PyTorch loads the tensors as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeproof.foreign_text import regular_size
from pipeproof.state.byte_ranges import RangeReader
from pipeproof.state.checkpoint import Checkpoint, HeldShard
from pipeproof.state.dcp.dcp_metadata import METADATA_FILE, DcpChunk, DcpMetadata, DcpTensor, read_metadata
from pipeproof.state.state_codes import DcpError, reading
from pipeproof.state.state_index import Shard, TensorEntry, TensorKind
from pipeproof.state.torch_archive import FIX, TorchArchive

RESERVED = "pipeproof."
"""Beginning of ``save_dcp``'s names for entries outside of the model: RNG states, positions, its own record."""
OPTIMIZER = "optimizer.state."
_STATES = (OPTIMIZER, "optim.state.", "state.")
"""Beginnings of the names of optimizer states, which have the weight's name and the slot's: ours, and PyTorch's."""
_MODEL = ("", "model.")


def is_dcp(path: Path) -> bool:
    """Return True if a directory is a distributed checkpoint of PyTorch."""
    return (path / METADATA_FILE).exists()


def open_dcp(path: Path) -> Checkpoint:
    """Open the checkpoint of PyTorch's in the directory ``path``, with its tensors under their names in it.

    Raises:
        DcpError: A file is missing or cut short, or the metadata is a foreign pickle.
    """
    metadata = read_metadata(path)
    require_files(path, metadata)
    tensors = {name: tensor for name, tensor in metadata.tensors.items() if not name.startswith(RESERVED)}
    entries = {name: _entry(name, metadata) for name in tensors}
    stored = {
        name: tuple(_held(path, name, tensors[name], chunk) for chunk in tensors[name].chunks) for name in tensors
    }
    others = tuple(sorted({*metadata.objects, *(metadata.tensors.keys() - tensors.keys())}))
    files = dict.fromkeys(sorted({path / file for file in metadata.spans()}))
    return Checkpoint(path, "dcp", entries, stored, files, None, others=others)


def _held(path: Path, name: str, tensor: DcpTensor, chunk: DcpChunk) -> HeldShard:
    shard = Shard(tensor=name, offsets=chunk.offsets, extents=chunk.extents)
    archive = TorchArchive(name, tensor.dtype, chunk.extents, chunk.length)
    return HeldShard(shard, _rank_of(chunk.file), path / chunk.file, chunk.start, archive)


def require_content(path: Path, metadata: DcpMetadata, share: int, num_shares: int) -> None:
    """Load the tensors of a checkpoint, and compare their CRC-32; of ``num_shares`` processes, each loads its share.

    Raises:
        DcpError: An archive is damaged or changed.
    """
    shards = sorted(
        (chunk.file, chunk.start, _held(path, name, tensor, chunk))
        for name, tensor in metadata.tensors.items()
        for chunk in tensor.chunks
    )
    begin, end = (len(shards) * number // num_shares for number in (share, share + 1))
    for _, _, held in shards[begin:end]:
        require_loaded(held)


def require_loaded(held: HeldShard) -> None:
    """Load a shard, and compare its CRC-32.

    Raises:
        DcpError: Its archive is damaged or changed.
    """
    assert held.archive is not None, "it is a shard of PyTorch's"
    with RangeReader(FIX) as files:
        files.load(held.file, held.start, held.archive)


def require_files(path: Path, metadata: DcpMetadata) -> None:
    """Refuse a checkpoint with a file that is missing, or shorter than the metadata requires.

    Raises:
        DcpError: There is one.
    """
    firsts = _first_names(metadata)
    for file, length in sorted(metadata.spans().items()):
        with reading(path / file, FIX):
            try:
                size = regular_size(path / file)
            except FileNotFoundError as error:
                raise DcpError(f"{path / file} is missing; it holds {firsts[file]}", FIX) from error
        if size < length:
            raise DcpError(f"{path / file} is cut short: it has {size} bytes, and {length} in the metadata", FIX)


def _first_names(metadata: DcpMetadata) -> Mapping[str, str]:
    named = [(chunk.file, name) for name, tensor in metadata.tensors.items() for chunk in tensor.chunks]
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
