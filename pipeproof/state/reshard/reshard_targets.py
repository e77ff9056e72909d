"""Tasks of a reshard: the files to write, their content, and the source of the content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.model import ModelSpec
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.region_text import weight_name
from pipeproof.state.regions import Region, whole_region
from pipeproof.state.reshard.copy_regions import TargetFiles
from pipeproof.state.reshard.reshard_codes import NOT_CONVERTIBLE, SHAPE_MISMATCH, RefusedError
from pipeproof.state.reshard.shard_layout import ShardLayout, layout_of_files
from pipeproof.state.resume_check import data_done, data_note, require_same_training
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import Shard, StateIndex, TensorEntry
from pipeproof.state.state_layout import files_of, whole_state
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, identity_map, identity_tensor
from pipeproof.state.write_state import index_of_plan, running_versions

_OF_OPTIMIZER = ("moment", "counter")
_ONE_FILE = "model.safetensors"
"""Temporary name of a merged file until it gets its own."""
_METADATA = MappingProxyType({"format": "pt"})
"""Header metadata of a merged file: Hugging Face's loaders require it."""


@dataclass(frozen=True, slots=True)
class ReshardTask:
    """A reshard: the files to write, the map from the source, and the target's layout for the proof.

    ``index`` is the index of a state, without its files. A merged file has its ``provenance`` instead, and is
    ``one_file`` unless it gets a directory. ``extra_files`` are further files of a directory, by name. ``notes`` are on
    data that changes.
    """

    target: TargetFiles
    state_map: StateMap
    target_layout: ShardLayout
    index: StateIndex | None = None
    provenance: StateIndex | None = None
    one_file: str | None = None
    notes: tuple[Finding, ...] = ()
    extra_files: Mapping[str, str | bytes] = field(default_factory=lambda: MappingProxyType({}))


def has_training_steps(source: Checkpoint) -> bool:
    """Return True if a checkpoint belongs to a training run, and not to weights alone."""
    return source.index is not None and source.index.steps_done > 0


def task_for_plan(
    source: Checkpoint, plan: LoweredPlan, name: str, digest: str, given_map: StateMap | None, *, weights_only: bool
) -> ReshardTask:
    """Return the task for a state as runs of a plan save it.

    ``given_map`` makes the plan's tensors from the source's, if these have other names; ``digest`` is the plan's.

    Raises:
        StateError: The source belongs to another training.
        PipeproofError: Vocabularies differ in more than their padding.
    """
    index, changed = source.index, None
    if index is not None:
        padded = _as_if_padded(index, plan)
        changed = require_same_training(_without_steps(padded) if weights_only else padded, plan, digest)
    tensors = without_optimizer_state(whole_state(plan)) if weights_only else whole_state(plan)
    if given_map is None:
        kept_tensors = without_optimizer_state(source.tensors) if weights_only else source.tensors
        given_map = padding_map(kept_tensors, {} if index is None else index.values, plan.spec.model)
    if weights_only:
        states = source.tensors.keys() - without_optimizer_state(source.tensors).keys()
        given_map = replace(given_map, removed=given_map.removed | states)
    files = {
        file: tuple(shard for shard in shards if shard.tensor in tensors) for file, shards in files_of(plan).items()
    }
    ranks = {file: rank for rank, file in enumerate(files)}
    index_of_target = index_of_plan(
        plan,
        0 if weights_only or index is None else index.steps_done,
        digest=digest,
        from_beginning=index is not None and not weights_only and index.from_beginning and index.digest == digest,
        data_before=None if index is None or weights_only else data_done(index) if changed else index.data_before,
        versions={} if index is None else index.versions,
        tensors=tensors,
    )
    return ReshardTask(
        TargetFiles(files, tensors, ranks),
        given_map,
        layout_of_files(name, tensors, files, ranks, plan),
        index_of_target,
        notes=() if changed is None else (data_note(changed, index),),
    )


def training_faults(plan: LoweredPlan, other: LoweredPlan, *, weights_only: bool) -> tuple[Finding, ...]:
    """Return why the plan ``other`` cannot resume from states that runs of ``plan`` save, or how its data changes."""
    saved = index_of_plan(plan, 0 if weights_only else 1)
    try:
        changed = require_same_training(_as_if_padded(saved, other), other)
    except StateError as error:
        return error.findings
    return () if changed is None else (data_note(changed, None),)


def task_for_file(source: Checkpoint, out: Path, given_map: StateMap | None, *, weights_only: bool) -> ReshardTask:
    """Return the task for one file with every tensor whole.

    Of a state, under the source's names, it can become a state again. The file only has its tensors: files of equal
    content are equal; all other facts are provenance.

    ``given_map`` makes the file's tensors from the source's, if they get other names.
    """
    provenance = _origin_unknown() if source.index is None else source.index
    if source.index is not None and weights_only:
        provenance = _without_steps(source.index)
    kept_tensors = without_optimizer_state(source.tensors) if weights_only else dict(source.tensors)
    if given_map is None:
        entries = {name: entry.model_copy(update={"cut": None}) for name, entry in kept_tensors.items()}
        state_map = identity_map(entries)
    else:
        state_map = given_map
        entries = {
            name: TensorEntry(kind="weight", dtype=tensor.dtype, shape=tensor.shape)
            for name, tensor in given_map.tensors.items()
        }
    state_map = replace(state_map, removed=state_map.removed | (source.tensors.keys() - kept_tensors.keys()))
    shards = tuple(_whole(name, entry) for name, entry in sorted(entries.items()))
    described = entries if given_map is None and source.index is not None else {}
    return ReshardTask(
        TargetFiles({_ONE_FILE: shards}, entries, {_ONE_FILE: 0}, _METADATA),
        state_map,
        layout_of_files(str(out), entries, {out.name: shards}, {}),
        provenance=provenance.model_copy(update={"tensors": described, "files": (), "sha256": None}),
        one_file=_ONE_FILE,
    )


def _origin_unknown() -> StateIndex:
    return StateIndex(
        pipeproof_state=1, steps_done=0, digest="", framework="", versions=running_versions(), mesh={}, values={},
        tensors={}, files=(),
    )  # fmt: skip


def require_index(source: Checkpoint, what: str, fix: str = "give the plan of the model: `--to PLAN`") -> StateIndex:
    """Return the index of a checkpoint that needs one.

    Raises:
        RefusedError: It has none.
    """
    if source.index is None:
        raise RefusedError(NOT_CONVERTIBLE, f"{source.path} does not record its model, and {what}", fix)
    return source.index


def _as_if_padded(index: StateIndex, plan: LoweredPlan) -> StateIndex:
    return index.model_copy(update={"values": with_vocabulary_of(index.values, plan.spec.model)})


def _without_steps(index: StateIndex) -> StateIndex:
    tensors = without_optimizer_state(index.tensors)
    return index.model_copy(update={"steps_done": 0, "from_beginning": False, "tensors": tensors})


def weights_of_layout(target_layout: ShardLayout) -> ShardLayout:
    """Return a layout without optimizer states."""
    tensors = without_optimizer_state(target_layout.tensors)
    return replace(target_layout, tensors=tensors, shards={name: target_layout.shards[name] for name in tensors})


def without_optimizer_state(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors without optimizer states."""
    return {name: entry for name, entry in tensors.items() if entry.kind not in _OF_OPTIMIZER}


def _whole(name: str, entry: TensorEntry) -> Shard:
    offsets, extents = whole_region(entry.shape)
    return Shard(tensor=name, offsets=offsets, extents=extents)


# Padding of the vocabulary. Megatron-LM pads it to a multiple of 128 times the number of tensor-parallel ranks: a
# checkpoint for another number has other rows.

VOCABULARY_DIM = {"embed.weight": 0, "head.weight": 1}
"""Dim of a weight, and of its moments, that counts token ids."""
_KEY = "model.unpadded_vocab_size"
_SIZE = "model.vocab_size"


def padding_map(
    source: Mapping[str, TensorEntry], values: Mapping[str, JsonValue], model: ModelSpec | CustomModelSpec
) -> StateMap:
    """Map each tensor of a state to itself, except those that count token ids, which get the padding of ``model``.

    ``values`` are from the source's index: a plan's keys, dotted. The source's padding is dropped; the target's padding
    is zeros, for weights and for moments.

    Raises:
        PipeproofError: PP214, the vocabularies differ in size, and the number of token ids is unknown or differs.
    """
    if isinstance(model, CustomModelSpec):  # without token ids
        return identity_map(source)
    sizes = values.get(_SIZE, model.vocab_size), model.vocab_size
    ids = values.get(_KEY), model.unpadded_vocab_size
    if sizes[0] != sizes[1] and (ids[0] is None or ids[0] != ids[1]):
        was, is_now = ("not given" if number is None else f"{number}" for number in ids)
        message = f"{_SIZE} was {sizes[0]} and is {sizes[1]}, and {_KEY} was {was} and is {is_now}"
        fix = f"where both have the same ids and only the padding differs, give {_KEY} in both plans"
        raise PipeproofError(SHAPE_MISMATCH.finding(message, help=fix))
    if sizes[0] == sizes[1]:
        return identity_map(source)
    tensors, dropped = dict[str, TensorMap](), dict[str, tuple[Region, ...]]()
    for name, entry in source.items():
        dim = None if entry.kind == "counter" else VOCABULARY_DIM.get(weight_name(name) or "")
        if dim is None:
            tensors[name] = identity_tensor(name, entry.dtype, entry.shape)
        else:
            tensors[name] = _padded(name, entry, dim, model)
            if entry.shape[dim] > model.num_token_ids:
                dropped[name] = (whole_region(entry.shape).sliced(dim, model.num_token_ids, entry.shape[dim]),)
    return StateMap(tensors, dropped=dropped)


def with_vocabulary_of(values: Mapping[str, JsonValue], model: ModelSpec | CustomModelSpec) -> dict[str, JsonValue]:
    """Return the values of a state with the vocabulary size of ``model``, if both have the same token ids."""
    if isinstance(model, CustomModelSpec):
        return dict(values)
    same = values.get(_KEY) is not None and values[_KEY] == model.unpadded_vocab_size
    return {**values, _SIZE: model.vocab_size} if same else dict(values)


def _padded(name: str, entry: TensorEntry, dim: int, model: ModelSpec) -> TensorMap:
    shape = tuple(model.vocab_size if i == dim else size for i, size in enumerate(entry.shape))
    ids = whole_region(shape).sliced(dim, 0, model.num_token_ids)
    copies = [RegionCopy(ids, name, ids)]
    if model.vocab_size > model.num_token_ids:
        padding = whole_region(shape).sliced(dim, model.num_token_ids, model.vocab_size)
        copies.append(RegionCopy(padding, None, padding))
    return TensorMap(entry.dtype, shape, tuple(copies))


_FILE_BYTES = 2**32
"""A file is full with this many bytes of tensors: several files are written at a time."""


def files_of_whole(
    shards: Iterable[Shard], entries: Mapping[str, TensorEntry], file_bytes: int = _FILE_BYTES
) -> list[tuple[Shard, ...]]:
    """Return the shards of each file, in their order. A file is full with ``file_bytes`` of tensors."""
    files, filled = list[list[Shard]]([[]]), 0
    for shard in shards:
        if filled >= file_bytes:
            files.append([])
            filled = 0
        files[-1].append(shard)
        filled += prod(shard.shape) * dtype_bytes(entries[shard.tensor].dtype)
    return [tuple(held) for held in files]
