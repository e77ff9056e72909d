"""Opening Paddle's flex checkpoint: its metadata is compared with the headers of its files.

Arrays are in safetensors files, or in ``.distcp`` files, which are pickles of numpy arrays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.checkpoint import Checkpoint, HeldShard
from pipeproof.state.flex.flex_metadata import MAIN, SUFFIX, FlexShard, read_metadata, tensor_of
from pipeproof.state.flex.pickles import GlobalName, PickledBytes, PickledObject, read_pickle
from pipeproof.state.safetensors_header import StoredArray, read_header
from pipeproof.state.state_codes import FlexError
from pipeproof.state.state_index import Shard, TensorEntry

_FILE = re.compile(r"(\d+)_\d+\.(distcp|safetensors)")
"""Rank, and number of the save in its directory."""
_TRAINER_DIRECTORIES = ("model_state", "optimizer_state", "master_weight")
"""Directories of one checkpoint of PaddleFormers, each a flex checkpoint."""
_FIX = "copy the checkpoint again from where it was saved, or save it again"


def is_flex(path: Path) -> bool:
    """Return True if a directory is a checkpoint of Paddle's, or a trainer's directory with several of them."""
    return bool(_metadata_files(path))


def open_flex(path: Path) -> Checkpoint:
    """Open the checkpoint of Paddle's at ``path``, with its tensors under pipeproof's names.

    If a weight is stored twice, as the optimizer's main weight (``.w_0``) and as a copy of fewer bits, the main weight
    is taken; the copy is a rounding of it.

    Raises:
        StateError: A file is missing, cut short or differs from the metadata; two places contradict each other.
    """
    metadata_files = _metadata_files(path)
    if not metadata_files:
        raise FlexError(f"{path} has no {SUFFIX} file", "name the directory that `save_state_dict` was given")
    shards = [(file.parent, shard) for file in metadata_files for shard in read_metadata(file)]
    main_weights = {shard.key.removesuffix(MAIN) for _, shard in shards if shard.key.endswith(MAIN)}
    arrays = {file: arrays_of(file) for file in sorted({directory / shard.file for directory, shard in shards})}
    _require_all_listed(path, shards, arrays)
    tensors, stored = dict[str, TensorEntry](), dict[str, list[HeldShard]]()
    for directory, shard in shards:
        file = directory / shard.file
        array = _require_array(file, shard, arrays[file].get(shard.key))
        if shard.is_copy or shard.key in main_weights or not shard.numel:
            continue
        name, entry = tensor_of(shard.key, shard.dtype, shard.shape)
        if not tensors.setdefault(name, entry).is_same(entry):
            known = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise FlexError(f"{path}: {shard.key} is {known} and {entry.dtype} {list(entry.shape)}", _FIX)
        rank = _FILE.fullmatch(shard.file)
        stored.setdefault(name, []).append(
            HeldShard(_shard(name, entry, shard), int(rank[1]) if rank else None, file, array.start)
        )
    shards_by_tensor = {name: tuple(of_tensor) for name, of_tensor in stored.items()}
    return Checkpoint(path, "flex", tensors, shards_by_tensor, dict.fromkeys(arrays), None)


def _shard(name: str, entry: TensorEntry, shard: FlexShard) -> Shard:
    """Return a shard under pipeproof's name; Paddle's scalars have one dim."""
    if not entry.shape:
        return Shard(tensor=name, offsets=(), extents=())
    return Shard(tensor=name, offsets=shard.offsets, extents=shard.extents, flat=shard.flat)


def _metadata_files(path: Path) -> list[Path]:
    for directories in ([path], [path / name for name in _TRAINER_DIRECTORIES]):
        files = sorted(file for directory in directories for file in directory.glob(f"*{SUFFIX}"))
        if len(files) > len({file.parent for file in files}):
            raise FlexError(
                f"{path} has {len(files)} metadata files, {files[0].name} and {files[1].name} among them",
                "Paddle, too, refuses two saves in one directory: keep the files of one of them",
            )
        if files:
            return files
    return []


def _require_all_listed(
    path: Path, shards: Iterable[tuple[Path, FlexShard]], arrays: Mapping[Path, Mapping[str, StoredArray]]
) -> None:
    """Require every array in the metadata: Paddle keeps the metadata of an earlier save, see docs/flex.md."""
    listed = {(directory / shard.file, shard.key) for directory, shard in shards}
    for file, stored_arrays in arrays.items():
        unlisted = sorted(key for key in stored_arrays if (file, key) not in listed)
        if unlisted:
            raise FlexError(
                f"{file} holds {unlisted[0]}, which the metadata does not list",
                f"Paddle keeps the metadata of the first save into {path}: save into an empty directory",
            )


def _require_array(path: Path, shard: FlexShard, array: StoredArray | None) -> StoredArray:
    if array is None:
        raise FlexError(f"{path} must hold {shard.key}, and it is missing", _FIX)
    shape = shard.extents if shard.flat is None else (shard.numel,)
    is_number = shard.numel == 1 and len(shape) <= 1 and len(array.shape) <= 1 and array.num_bytes
    if not is_stored_as(array.dtype, shard.dtype) or (array.shape != shape and not is_number):
        stored_text = f"{array.dtype} {list(array.shape)}"
        raise FlexError(
            f"{path} has {shard.key} as {stored_text}, and the metadata lists {shard.dtype} {list(shape)}",
            "two saves went into one directory, or a file was changed: " + _FIX,
        )
    return array


DISTCP = ".distcp"
_NAMES_TABLE = "StructuredToParameterName@@"
"""Paddle's names of the parameters, stored next to the arrays; not used here."""
_RECONSTRUCT = [GlobalName(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
_TYPES = {
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"{short}{size}": f"{name}{8 * size}" for short, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
    "b1": "bool",
}
_FIX_ARRAYS = "save the checkpoint again with `safetensors=True`"


def arrays_of(path: Path) -> Mapping[str, StoredArray]:
    """Return the arrays of a file by key, without reading their content.

    In a ``.distcp`` file bfloat16 is uint16, because numpy has no type for it.

    Raises:
        StateError: The file is missing, cut short, or not one of arrays.
    """
    if path.suffix != DISTCP:
        return read_header(path).arrays
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise FlexError(f"{path} holds no arrays by name", _FIX_ARRAYS)
    return {key: _array(path, key, one) for key, one in content.items() if key != _NAMES_TABLE}


def is_stored_as(stored: str, listed: str) -> bool:
    """Return True if a file stores arrays of the type ``listed`` as ``stored``."""
    return stored == listed or (stored, listed) == ("uint16", "bfloat16")


def _array(path: Path, key: Any, instance: Any) -> StoredArray:
    """Read what numpy's ``ndarray.__reduce__`` writes: (version, shape, type, Fortran order, bytes)."""
    if not isinstance(key, str) or not isinstance(instance, PickledObject) or instance.global_name not in _RECONSTRUCT:
        requested = (
            f"{instance.global_name.module}.{instance.global_name.name}"
            if isinstance(instance, PickledObject)
            else type(instance).__name__
        )
        raise FlexError(f"{path} has {requested} as {key!r}, and not an array; nothing of it was executed", _FIX_ARRAYS)
    try:
        _, shape, kind, is_fortran, content = instance.state
        dtype, order = kind.arguments[0], kind.state[1]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise FlexError(f"{path}: {key} is no array of numpy's: {error}", _FIX_ARRAYS) from error
    if dtype not in _TYPES or order == ">" or not isinstance(content, PickledBytes) or (is_fortran and len(shape) > 1):
        raise FlexError(f"{path}: {key} is an array of a type or order that is not read: {order}{dtype}", _FIX_ARRAYS)
    array = StoredArray(_TYPES[dtype], tuple(shape), content.start)
    if content.length != prod(shape) * dtype_bytes(array.dtype):
        raise FlexError(
            f"{path}: {key} has {content.length} bytes, and {array.num_bytes} make {list(shape)}", _FIX_ARRAYS
        )
    return array
