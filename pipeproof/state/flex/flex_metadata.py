"""Paddle's flex checkpoint: its metadata, Paddle's names of optimizer states, and opening its files.

The metadata file is a pickle of three dataclasses of ``paddle.distributed.flex_checkpoint.dcp.metadata`` (Paddle 3.3):
a ``Metadata`` has, by key, the shards (``LocalTensorMetadata``), and by shard (``LocalTensorIndex``) the file. A shard
is a region of the whole tensor (``global_offset``, ``local_shape``), or, of a sharded optimizer's state, a range of the
flattened region (``flattened_range``).

Paddle's name of a state is the weight's name and a suffix (``OPTIMIZER_STATE_NAME`` in its
``flex_checkpoint/aoa/aoa_engine.py``), from which its tools, such as PaddleFormers, find related tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.foreign_text import MALFORMED
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.checkpoint import Checkpoint, HeldShard
from pipeproof.state.flex.pickles import GlobalName, PickledBytes, PickledObject, read_pickle, to_pickle, whole_numbers
from pipeproof.state.safetensors_header import StoredArray, read_header
from pipeproof.state.state_codes import FlexError, is_file_name
from pipeproof.state.state_index import Shard, TensorEntry
from pipeproof.state.state_layout import moment_name

MAIN = ".w_0"
"""Suffix of a main weight: the optimizer updates it, and the model computes with a copy of fewer bits."""
SLOTS = {"moment1": ".moment1_0", "moment2": ".moment2_0"}
COUNTERS = {"beta1_power": ".beta1_pow_acc_0", "beta2_power": ".beta2_pow_acc_0"}
_BIAS = ".router.bias"
"""Suffix of the names of routers' biases, see ``stages.describe.gradient_facts.bias_name``."""


def key_of(tensor: str, entry: TensorEntry) -> str:
    """Paddle's name of a tensor of a state that Paddle made, whose weights are in the type that computes.

    >>> key_of("optimizer/moment1/head", TensorEntry(kind="moment", dtype="float32", shape=(2,), weight="head"))
    'head.moment1_0'
    """
    if entry.weight is None:
        return tensor
    return entry.weight + (SLOTS | COUNTERS)[tensor.removesuffix(f"/{entry.weight}").removeprefix("optimizer/")]


def stored_shape(entry: TensorEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a shard in Paddle's files: its optimizers' scalars have one dim."""
    return (1,) if entry.kind == "counter" else shape


def tensor_of(key: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, TensorEntry]:
    """Return pipeproof's name of Paddle's ``key``, and its entry. A scalar has one dim there, and none here."""
    for slot, suffix in SLOTS.items():
        if key.endswith(suffix):
            weight = key.removesuffix(suffix)
            return moment_name(weight, slot), TensorEntry(kind="moment", dtype=dtype, shape=shape, weight=weight)
    for slot, suffix in COUNTERS.items():
        if key.endswith(suffix) and shape in ((), (1,)):
            weight = key.removesuffix(suffix)
            return moment_name(weight, slot), TensorEntry(kind="counter", dtype=dtype, shape=(), weight=weight)
    if key.endswith(_BIAS):
        return key, TensorEntry(kind="expert_bias", dtype=dtype, shape=shape)
    return key.removesuffix(MAIN), TensorEntry(kind="weight", dtype=dtype, shape=shape)


SUFFIX = ".metadata"
MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_MODULES = (MODULE, "paddle.distributed.checkpoint.metadata")
"""Modules of the three classes: the current one, and the one before release 3.2."""
_FIX = "save the checkpoint again, or copy its metadata again from where it was saved"


@dataclass(frozen=True, slots=True)
class FlexShard:
    """A shard as Paddle describes it: ``shape`` is the whole tensor's, ``flat`` a range of the region."""

    key: str
    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    flat: tuple[int, int] | None
    dtype: str
    shape: tuple[int, ...]
    file: str
    is_copy: bool = False
    """Another rank's file has it, too, and Paddle reads that one."""

    @property
    def numel(self) -> int:
        """Number of its elements in the file."""
        return prod(self.extents) if self.flat is None else self.flat[1] - self.flat[0]


def read_metadata(path: Path) -> tuple[FlexShard, ...]:
    """Return all shards that a metadata file lists.

    Raises:
        FlexError: It is not metadata of Paddle's, names a class other than Paddle's three, or contradicts itself.
    """
    metadata = _fields(path, read_pickle(path), "Metadata")
    try:
        described, stored = metadata["state_dict_metadata"], metadata["storage_metadata"]
        shapes = _Shapes(path, described)
        return tuple(shapes.shard(_fields(path, index, "LocalTensorIndex"), file) for index, file in stored.items())
    except MALFORMED as error:
        raise FlexError(f"{path} is not metadata of Paddle's: {error!r}", _FIX) from error


class _Shapes:
    """Descriptions of shards in the first table, found by their keys in the second one."""

    def __init__(self, path: Path, described: Mapping[str, Iterable[Any]]) -> None:
        self._path = path
        self._found: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}
        self._extents: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for key, shards in described.items():
            fields = [_fields(path, shard, "LocalTensorMetadata") for shard in shards]
            regions = [(whole_numbers(one["global_offset"]), whole_numbers(one["local_shape"])) for one in fields]
            for fields_of_shard, (offsets, extents) in zip(fields, regions, strict=True):
                global_shape = fields_of_shard.get("global_shape")
                shape = _shape_from_extents(regions) if global_shape is None else whole_numbers(global_shape)
                if not len(offsets) == len(extents) == len(shape):
                    raise FlexError(f"{path}: a shard of {key} and the tensor differ in their number of dims", _FIX)
                index_key = (key, offsets, _flat_of(fields_of_shard))
                for lookup in ((*index_key, extents), (*index_key, None)):  # older releases have no shape in the index
                    self._found[lookup] = fields_of_shard["dtype"], shape
                    self._extents[lookup] = extents

    def shard(self, index: Mapping[str, Any], file: str) -> FlexShard:
        key, offsets, flat = index["tensor_key"], whole_numbers(index["global_offset"]), _flat_of(index)
        extents = None if index.get("local_shape") is None else whole_numbers(index["local_shape"])
        index_key = (key, offsets, flat, extents)
        if index_key not in self._found:
            where = f"the shard of {key} at {list(offsets)}"
            raise FlexError(f"{self._path} names a file for {where}, and does not describe it", _FIX)
        if not is_file_name(file):
            raise FlexError(f"{self._path}: {key} is in {file!r}, which does not name a file next to it", _FIX)
        dtype, shape = self._found[index_key]
        if flat is not None and not 0 <= flat[0] <= flat[1] <= prod(self._extents[index_key]):
            raise FlexError(f"{self._path}: {list(flat)} is not a range of {key}'s shard at {list(offsets)}", _FIX)
        return FlexShard(
            key, offsets, self._extents[index_key], flat, dtype, shape, file, bool(index.get("replica_id"))
        )


def _fields(path: Path, instance: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of an instance of one of Paddle's three classes."""
    if not isinstance(instance, PickledObject):
        raise FlexError(f"{path} has {type(instance).__name__} where Paddle's {name} should be", _FIX)
    if instance.global_name not in [GlobalName(module, name) for module in _MODULES] or instance.arguments:
        message = f"{path} names {instance.global_name} where Paddle's {name} should be; nothing of it was executed"
        raise FlexError(message, "Paddle executes what a pickle names: do not load this file, and check its origin")
    if not isinstance(instance.state, dict):
        raise FlexError(f"{path}: a {name} has no fields", _FIX)
    return instance.state


def _flat_of(fields_of_shard: Mapping[str, Any]) -> tuple[int, int] | None:
    if not fields_of_shard.get("is_flattened") or fields_of_shard.get("flattened_range") is None:
        return None
    start, stop = whole_numbers(fields_of_shard["flattened_range"])
    return start, stop


def _shape_from_extents(regions: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the shape that the shards span, for releases that do not store it."""
    stops = [tuple(start + length for start, length in zip(*region, strict=True)) for region in regions]
    return tuple(map(max, zip(*stops, strict=True)))


def metadata_of(shards: Iterable[FlexShard]) -> bytes:
    """Return a metadata file that lists ``shards``, as Paddle reads it."""
    described, stored = dict[str, list[PickledObject]](), dict[PickledObject, str]()
    for shard in shards:
        index_key = {
            "global_offset": shard.offsets,
            "local_shape": shard.extents,
            "is_flattened": shard.flat is not None,
            "flattened_range": shard.flat,
        }
        fields = {**index_key, "dtype": shard.dtype, "global_shape": shard.shape}
        described.setdefault(shard.key, []).append(PickledObject(GlobalName(MODULE, "LocalTensorMetadata"), (), fields))
        index = {**index_key, "tensor_key": shard.key, "replica_id": 1 if shard.is_copy else None}
        stored[PickledObject(GlobalName(MODULE, "LocalTensorIndex"), (), index)] = shard.file
    tables = {
        "state_dict_metadata": described,
        "storage_metadata": stored,
        "flat_mapping": {key: (key,) for key in described},
    }
    return to_pickle(PickledObject(GlobalName(MODULE, "Metadata"), (), tables))


_FILE = re.compile(r"(\d+)_\d+\.(distcp|safetensors)")
"""Rank, and number of the save in its directory."""
_TRAINER_DIRECTORIES = ("model_state", "optimizer_state", "master_weight")
"""Directories of one checkpoint of PaddleFormers, each a flex checkpoint."""
_FIX_FILES = "copy the checkpoint again from where it was saved, or save it again"


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
            earlier = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise FlexError(f"{path}: {shard.key} is {earlier} and {entry.dtype} {list(entry.shape)}", _FIX_FILES)
        match = _FILE.fullmatch(shard.file)
        held = HeldShard(_shard(name, entry, shard), int(match[1]) if match else None, file, array.start)
        stored.setdefault(name, []).append(held)
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
        raise FlexError(f"{path} must hold {shard.key}, and it is missing", _FIX_FILES)
    shape = shard.extents if shard.flat is None else (shard.numel,)
    is_number = shard.numel == 1 and len(shape) <= 1 and len(array.shape) <= 1 and array.num_bytes
    if not is_stored_as(array.dtype, shard.dtype) or (array.shape != shape and not is_number):
        stored_text = f"{array.dtype} {list(array.shape)}"
        message = f"{path} has {shard.key} as {stored_text}, and the metadata lists {shard.dtype} {list(shape)}"
        raise FlexError(message, "two saves went into one directory, or a file was changed: " + _FIX_FILES)
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
        StateError: The file is missing, cut short, or has no arrays.
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
    """Read the output of numpy's ``ndarray.__reduce__``: (version, shape, type, Fortran order, bytes)."""
    if not isinstance(key, str) or not isinstance(instance, PickledObject) or instance.global_name not in _RECONSTRUCT:
        requested = instance.global_name if isinstance(instance, PickledObject) else type(instance).__name__
        raise FlexError(f"{path} has {requested} as {key!r}, and not an array; nothing of it was executed", _FIX_ARRAYS)
    try:
        _, shape, kind, is_fortran, content = instance.state
        dtype, order = kind.arguments[0], kind.state[1]
    except MALFORMED as error:
        raise FlexError(f"{path}: {key} is not an array of numpy's: {error}", _FIX_ARRAYS) from error
    if dtype not in _TYPES or order == ">" or not isinstance(content, PickledBytes) or (is_fortran and len(shape) > 1):
        raise FlexError(f"{path}: {key} is an array of a type or order that is not read: {order}{dtype}", _FIX_ARRAYS)
    array = StoredArray(_TYPES[dtype], tuple(shape), content.start)
    if content.length != prod(shape) * dtype_bytes(array.dtype):
        message = f"{path}: {key} has {content.length} bytes, and {array.num_bytes} make {list(shape)}"
        raise FlexError(message, _FIX_ARRAYS)
    return array
