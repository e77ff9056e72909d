"""Opening Paddle's flex checkpoint: what its metadata says, held against the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeproof.state.checkpoint import Checkpoint, StoredPart
from pipeproof.state.flex.arrays import arrays_of, is_type
from pipeproof.state.flex.codes import FlexError
from pipeproof.state.flex.metadata import SUFFIX, FlexPart, read_metadata
from pipeproof.state.flex.names import MAIN, tensor_of
from pipeproof.state.header import StoredArray
from pipeproof.state.index import Shard, TensorEntry

_FILE = re.compile(r"(\d+)_\d+\.(distcp|safetensors)")
"""Rank, and the number of the save in its directory."""
_OF_TRAINERS = ("model_state", "optimizer_state", "master_weight")
"""Directories of one checkpoint of PaddleFormers, each a flex checkpoint."""
_MEND = "copy the checkpoint anew from where it was saved, or save it anew"


def is_flex(place: Path) -> bool:
    """Whether a directory is a checkpoint of Paddle's, or one of a trainer with several of them in it."""
    return bool(_metadata_files(place))


def open_flex(place: Path) -> Checkpoint:
    """The checkpoint of Paddle's at ``place``: its tensors under our names, see ``names``.

    Of a weight that stands there twice, as what the optimizer updates (``.w_0``) and as a copy of fewer bits, the
    first is the weight; the copy is a rounding of it.

    Raises:
        StateError: a file is missing, cut short or not what the metadata says; two places say different things.
    """
    found = _metadata_files(place)
    if not found:
        raise FlexError(f"{place} has no {SUFFIX} file", "name the directory that `save_state_dict` was given")
    parts = [(file.parent, part) for file in found for part in read_metadata(file)]
    main = {part.key.removesuffix(MAIN) for _, part in parts if part.key.endswith(MAIN)}
    arrays = {path: arrays_of(path) for path in sorted({directory / part.file for directory, part in parts})}
    _require_all_listed(place, parts, arrays)
    tensors, stored = dict[str, TensorEntry](), dict[str, list[StoredPart]]()
    for directory, part in parts:
        path = directory / part.file
        array = _require_array(path, part, arrays[path].get(part.key))
        if part.is_copy or part.key in main or not part.numel:
            continue
        name, entry = tensor_of(part.key, part.dtype, part.whole)
        if not tensors.setdefault(name, entry).is_same(entry):
            was = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise FlexError(f"{place}: {part.key} is {was} and {entry.dtype} {list(entry.shape)}", _MEND)
        rank = _FILE.fullmatch(part.file)
        stored.setdefault(name, []).append(
            StoredPart(_shard(name, entry, part), path, part.key, array.start, int(rank[1]) if rank else None)
        )
    return Checkpoint(
        place, "flex", tensors, {name: tuple(of_one) for name, of_one in stored.items()}, dict.fromkeys(arrays), None
    )


def _shard(name: str, entry: TensorEntry, part: FlexPart) -> Shard:
    """The part of a tensor, under our name; Paddle's numbers have one dim."""
    if not entry.shape:
        return Shard(tensor=name, offsets=(), extents=())
    return Shard(tensor=name, offsets=part.offsets, extents=part.extents, flat=part.flat)


def _metadata_files(place: Path) -> list[Path]:
    for directories in ([place], [place / name for name in _OF_TRAINERS]):
        found = sorted(file for directory in directories for file in directory.glob(f"*{SUFFIX}"))
        if len(found) > len({file.parent for file in found}):
            raise FlexError(
                f"{place} has {len(found)} metadata files, {found[0].name} and {found[1].name} among them",
                "Paddle, too, refuses two saves in one directory: keep the files of one of them",
            )
        if found:
            return found
    return []


def _require_all_listed(
    place: Path, parts: Iterable[tuple[Path, FlexPart]], arrays: Mapping[Path, Mapping[str, StoredArray]]
) -> None:
    """Every array of the files is spoken of: Paddle keeps the metadata of the save before, see docs/flex.md."""
    listed = {(directory / part.file, part.key) for directory, part in parts}
    for path, there in arrays.items():
        more = sorted(key for key in there if (path, key) not in listed)
        if more:
            raise FlexError(
                f"{path} holds {more[0]}, and the metadata does not say so",
                f"Paddle keeps the metadata of the first save into {place}: save into an empty directory",
            )


def _require_array(path: Path, part: FlexPart, array: StoredArray | None) -> StoredArray:
    if array is None:
        raise FlexError(f"{path} is to hold {part.key}, and it is not there", _MEND)
    shape = part.extents if part.flat is None else (part.numel,)
    is_number = part.numel == 1 and len(shape) <= 1 and len(array.shape) <= 1 and array.num_bytes
    if not is_type(array.dtype, part.dtype) or (array.shape != shape and not is_number):
        is_now = f"{array.dtype} {list(array.shape)}"
        raise FlexError(
            f"{path} has {part.key} as {is_now}, and the metadata says {part.dtype} {list(shape)}",
            "two saves went into one directory, or a file was changed: " + _MEND,
        )
    return array
