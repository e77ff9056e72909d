"""Writing PyTorch's distributed checkpoint (DCP): the task of a reshard whose output is one, with whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.dcp.dcp_metadata import DTYPES, METADATA_FILE, DcpChunk, DcpTensor, metadata_of
from pipeproof.state.dcp.torch_archive import archive_length
from pipeproof.state.reshard.reshard_targets import ReshardTask
from pipeproof.state.reshard.shard_layout import layout_of_files
from pipeproof.state.state_codes import DcpError
from pipeproof.state.state_index import Shard, TensorEntry

_FILE_BYTES = 2**32
"""A file is full with so many bytes of tensors: several are written at a time."""


def as_dcp(task: ReshardTask, name: str, file_bytes: int = _FILE_BYTES) -> ReshardTask:
    """Return a task for one file of whole tensors as one for a directory of DCP, which is called ``name``.

    Raises:
        DcpError: A tensor has a type that PyTorch's files do not have.
    """
    entries = task.target.tensors
    unknown = next((name for name, entry in sorted(entries.items()) if entry.dtype not in DTYPES), None)
    if unknown is not None:
        raise DcpError(f"{unknown} has the type {entries[unknown].dtype}, which is not supported", "convert it first")
    shards = sorted((shard for held in task.target.files.values() for shard in held), key=lambda shard: shard.tensor)
    files = _files(shards, entries, file_bytes)
    tensors = dict[str, DcpTensor]()
    for file, held in files.items():
        position = 0
        for shard in held:
            entry = entries[shard.tensor]
            length = archive_length(entry.dtype, shard.shape)
            chunk = DcpChunk(shard.offsets, shard.extents, file, position, length)
            tensors[shard.tensor] = DcpTensor(entry.dtype, entry.shape, (chunk,))
            position += length
    return replace(
        task,
        target=replace(
            task.target,
            files=files,
            ranks=dict.fromkeys(files, 0),
            metadata=MappingProxyType({}),
            container="dcp",
        ),
        target_layout=layout_of_files(name, entries, files, {}),
        provenance=None,
        one_file=None,
        extra_files=MappingProxyType({**task.extra_files, METADATA_FILE: metadata_of(tensors)}),
    )


def _files(shards: list[Shard], entries: Mapping[str, TensorEntry], file_bytes: int) -> Mapping[str, tuple[Shard, ...]]:
    """Return the shards by file, in their order."""
    files, filled = list[list[Shard]]([[]]), 0
    for shard in shards:
        if filled >= file_bytes:
            files.append([])
            filled = 0
        files[-1].append(shard)
        filled += prod(shard.shape) * dtype_bytes(entries[shard.tensor].dtype)
    return {f"__0_{number}.distcp": tuple(held) for number, held in enumerate(files)}
