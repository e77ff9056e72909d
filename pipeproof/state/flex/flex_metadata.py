"""The metadata of Paddle's checkpoint: the file of each shard, and Paddle's names of optimizer states.

The metadata file is a pickle of three dataclasses of ``paddle.distributed.flex_checkpoint.dcp.metadata`` (Paddle 3.3):
a ``Metadata`` has, by key, the shards (``LocalTensorMetadata``), and by shard (``LocalTensorIndex``) the file. A shard
is a region of the whole tensor (``global_offset``, ``local_shape``), or, of a sharded optimizer's state, a range of the
flattened region (``flattened_range``).

Paddle's name of a state is the weight's name and a suffix (``OPTIMIZER_STATE_NAME`` in its
``flex_checkpoint/aoa/aoa_engine.py``), so that its tools, PaddleFormers among them, find related tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.state.flex.pickles import GlobalName, PickledObject, read_pickle, to_pickle, whole_numbers
from pipeproof.state.state_codes import FlexError
from pipeproof.state.state_index import TensorEntry
from pipeproof.state.state_layout import moment_name

MAIN = ".w_0"
"""Suffix of a main weight: the optimizer updates it, and the model computes with a copy of fewer bits."""
_SLOTS = {"moment1": ".moment1_0", "moment2": ".moment2_0"}
_COUNTERS = {"beta1_power": ".beta1_pow_acc_0", "beta2_power": ".beta2_pow_acc_0"}
_BIAS = ".router.bias"
"""Suffix of the names of routers' biases, see ``stages.describe.gradient_facts.bias_name``."""


def key_of(tensor: str, entry: TensorEntry) -> str:
    """Paddle's name of a tensor of a state that Paddle made, whose weights are in the type that computes.

    >>> key_of("optimizer/moment1/head", TensorEntry(kind="moment", dtype="float32", shape=(2,), weight="head"))
    'head.moment1_0'
    """
    if entry.weight is None:
        return tensor
    return entry.weight + (_SLOTS | _COUNTERS)[tensor.removesuffix(f"/{entry.weight}").removeprefix("optimizer/")]


def stored_shape(entry: TensorEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a shard in Paddle's files: its optimizers' scalars have one dim."""
    return (1,) if entry.kind == "counter" else shape


def tensor_of(key: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, TensorEntry]:
    """Return pipeproof's name of Paddle's ``key``, and its entry. A scalar has one dim there, and none here."""
    for slot, suffix in _SLOTS.items():
        if key.endswith(suffix):
            weight = key.removesuffix(suffix)
            return moment_name(weight, slot), TensorEntry(kind="moment", dtype=dtype, shape=shape, weight=weight)
    for slot, suffix in _COUNTERS.items():
        if key.endswith(suffix) and shape in ((), (1,)):
            weight = key.removesuffix(suffix)
            return moment_name(weight, slot), TensorEntry(kind="counter", dtype=dtype, shape=(), weight=weight)
    if key.endswith(_BIAS):
        return key, TensorEntry(kind="expert_bias", dtype=dtype, shape=shape)
    return key.removesuffix(MAIN), TensorEntry(kind="weight", dtype=dtype, shape=shape)


SUFFIX = ".metadata"
MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_MODULES = (MODULE, "paddle.distributed.checkpoint.metadata")
"""Modules of the three classes: the current one, and that of releases before 3.2."""
_FIX = "save the checkpoint again, or copy its metadata again from where it was saved"


@dataclass(frozen=True, slots=True)
class FlexShard:
    """A shard as Paddle describes it: ``shape`` is that of the whole tensor, ``flat`` a range of the region."""

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
        FlexError: It is no metadata of Paddle's, names a class other than Paddle's three, or contradicts itself.
    """
    metadata = _fields(path, read_pickle(path), "Metadata")
    try:
        described, stored = metadata["state_dict_metadata"], metadata["storage_metadata"]
        shapes = _Shapes(path, described)
        return tuple(shapes.shard(_fields(path, index, "LocalTensorIndex"), file) for index, file in stored.items())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FlexError(f"{path} is no metadata of Paddle's: {error!r}", _FIX) from error


class _Shapes:
    """Descriptions of shards in the first table, found by their keys in the second one."""

    def __init__(self, path: Path, described: Mapping[str, Iterable[Any]]) -> None:
        self._path = path
        self._found: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}
        self._extents: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for key, shards in described.items():
            fields = [_fields(path, shard, "LocalTensorMetadata") for shard in shards]
            regions = [
                (whole_numbers(fields_of_shard["global_offset"]), whole_numbers(fields_of_shard["local_shape"]))
                for fields_of_shard in fields
            ]
            for fields_of_shard, (offsets, extents) in zip(fields, regions, strict=True):
                global_shape = fields_of_shard.get("global_shape")
                shape = _shape_from_extents(regions) if global_shape is None else whole_numbers(global_shape)
                if not len(offsets) == len(extents) == len(shape):
                    raise FlexError(f"{path}: a shard of {key} and the tensor differ in their number of dims", _FIX)
                index_key = (key, offsets, _flat_of(fields_of_shard))
                for known in ((*index_key, extents), (*index_key, None)):  # older releases have no shape in the index
                    self._found[known] = fields_of_shard["dtype"], shape
                    self._extents[known] = extents

    def shard(self, index: Mapping[str, Any], file: str) -> FlexShard:
        key, offsets, flat = index["tensor_key"], whole_numbers(index["global_offset"]), _flat_of(index)
        extents = None if index.get("local_shape") is None else whole_numbers(index["local_shape"])
        index_key = (key, offsets, flat, extents)
        if index_key not in self._found:
            where = f"the shard of {key} at {list(offsets)}"
            raise FlexError(f"{self._path} names a file for {where}, and does not describe it", _FIX)
        if not isinstance(file, str) or Path(file).name != file:
            raise FlexError(f"{self._path}: {key} is in {file!r}, which is no name of a file next to it", _FIX)
        dtype, shape = self._found[index_key]
        if flat is not None and not 0 <= flat[0] <= flat[1] <= prod(self._extents[index_key]):
            raise FlexError(f"{self._path}: {list(flat)} is no range of {key}'s shard at {list(offsets)}", _FIX)
        return FlexShard(
            key, offsets, self._extents[index_key], flat, dtype, shape, file, bool(index.get("replica_id"))
        )


def _fields(path: Path, instance: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of an instance of one of Paddle's three classes."""
    if not isinstance(instance, PickledObject):
        raise FlexError(f"{path} has {type(instance).__name__} where Paddle's {name} should be", _FIX)
    if instance.global_name not in [GlobalName(module, name) for module in _MODULES] or instance.arguments:
        requested = f"{instance.global_name.module}.{instance.global_name.name}"
        raise FlexError(
            f"{path} names {requested} where Paddle's {name} should be; nothing of it was executed",
            "Paddle executes what a pickle names: do not load this file, and check its origin",
        )
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
