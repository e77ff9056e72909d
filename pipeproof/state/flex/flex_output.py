"""Writing Paddle's flex checkpoint and PaddleNLP's Unified Checkpoint: the tasks of a reshard.

Also the index entries of flex files that Paddle wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.foreign_text import read_foreign
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.flex.flex_metadata import (
    COUNTERS,
    SLOTS,
    SUFFIX,
    FlexShard,
    key_of,
    metadata_of,
    open_flex,
    stored_shape,
)
from pipeproof.state.flex.unified import INDEX, MASTER, MODEL, OPTIMIZER, SUFFIXES
from pipeproof.state.reshard.reshard_targets import ReshardTask, files_of_whole
from pipeproof.state.reshard.shard_layout import layout_of_files
from pipeproof.state.safetensors_header import read_header
from pipeproof.state.state_codes import FLEX_UNSUPPORTED, FlexError
from pipeproof.state.state_index import MAX_BYTES, Shard, ShardFile, TensorEntry
from pipeproof.state.state_layout import RankShard, files_of, moment_name
from pipeproof.state.tensor_map import StateMap, TensorMap, identity_tensor
from pipeproof.system_calls import sync

METADATA_FILE = "0.metadata"


def as_flex(task: ReshardTask) -> ReshardTask:
    """Return a task for a plan's state with the files that Paddle's ranks would write.

    Raises:
        PipeproofError: The plan runs on another framework.
    """
    assert task.index is not None, "only for states of plans"
    if task.index.framework != "paddle":
        message = f"the plan runs on {task.index.framework}, whose optimizers keep other numbers than Paddle's"
        fix = "leave out `--save-format flex`: a state's files are safetensors, too"
        raise PipeproofError(FLEX_UNSUPPORTED.finding(message, help=fix))
    target = task.target
    keys = {name: key_of(name, entry) for name, entry in target.tensors.items()}
    names = {name: f"{target.ranks[name]}_0.safetensors" for name in target.files}
    files = {names[name]: shards for name, shards in target.files.items()}
    described = [
        _flex_shard(keys[shard.tensor], target.tensors[shard.tensor], shard, file)
        for file, shards in files.items()
        for shard in shards
    ]
    ranks = {names[name]: rank for name, rank in target.ranks.items()}
    extra_files = {**task.extra_files, METADATA_FILE: metadata_of(described)}
    return replace(
        task, target=replace(target, files=files, ranks=ranks, keys=keys), extra_files=MappingProxyType(extra_files)
    )


def _flex_shard(key: str, entry: TensorEntry, shard: Shard, file: str) -> FlexShard:
    extents = stored_shape(entry, shard.extents)
    offsets = shard.offsets if shard.extents else (0,) * len(extents)
    return FlexShard(key, offsets, extents, shard.flat, entry.dtype, stored_shape(entry, entry.shape), file)


_FIX = "save without `--save-format flex`, and report this with the plan"


def describe_file(file: Path, rank: int, rank_shards: Iterable[RankShard], sha256: str) -> ShardFile:
    """Return the index entry of a file that ``rank`` wrote, with some of its ``rank_shards`` under Paddle's names."""
    header = read_header(file)
    keys = {one.shard: key_of(one.shard.tensor, one.tensor) for one in rank_shards}
    held = {shard: key for shard, key in keys.items() if key in header.arrays}
    return ShardFile(
        name=file.name,
        rank=rank,
        size_bytes=header.size_bytes,
        sha256=sha256,
        shards=tuple(held),
        keys={shard.tensor: key for shard, key in held.items() if shard.tensor != key},
    )


def require_all_written(directory: Path, plan: LoweredPlan) -> None:
    """Refuse a checkpoint unless its metadata, its files and the plan agree; sync the metadata.

    Raises:
        StateError: A shard is missing, or is there twice, or metadata and files differ.
    """
    wanted = {shard for shards in files_of(plan).values() for shard in shards}
    records = [directory / f"rank{rank}.json" for rank in range(plan.mesh.num_ranks)]
    files = [ShardFile.model_validate_json(read_foreign(record, MAX_BYTES)) for record in records]
    written = [shard for file in files for shard in file.shards]
    described = [stored.shard for of_tensor in open_flex(directory).shards.values() for stored in of_tensor]
    for subject, shards in (("Paddle's metadata has", described), ("Paddle wrote", written)):
        if len(shards) != len(wanted) or set(shards) != wanted:
            missing = sorted(shard.tensor for shard in wanted.difference(shards))
            first = f"; {missing[0]} is missing" if missing else ""
            raise FlexError(f"{directory}: {subject} {len(shards)} shards, and the plan {len(wanted)}{first}", _FIX)
    for file in directory.glob(f"*{SUFFIX}"):
        sync(file)


def with_optimizer_states(named: StateMap, source: Mapping[str, TensorEntry]) -> StateMap:
    """Return a map of weights to other names as one of their optimizer states, too.

    A weight that is made from several weights has the scalars of the first: they are equal for all weights.
    """
    tensors, used = dict(named.tensors), set[str]()
    for name, made in named.tensors.items():
        sources = [copy.source for copy in made.copies if copy.source is not None]
        for slot in SLOTS | COUNTERS if sources else ():
            states = [moment_name(weight, slot) for weight in sources]
            if not all(state in source for state in states):
                continue
            used.update(states if slot in SLOTS else states[:1])
            entry = source[states[0]]
            copies = made.copies if slot in SLOTS else ()
            moved = tuple(replace(copy, source=moment_name(str(copy.source), slot)) for copy in copies)
            if slot in COUNTERS:
                (moved,) = (identity_tensor(states[0], entry.dtype, ()).copies,)
            tensors[moment_name(name, slot)] = TensorMap(entry.dtype, made.shape if slot in SLOTS else (), moved)
    scalars = {state for state in used if source[state].kind == "counter"}
    return replace(named, tensors=tensors, removed=named.removed - used, duplicated=named.duplicated | scalars)


def as_unified(task: ReshardTask, source: Checkpoint, name: str) -> ReshardTask:
    """Turn a task for one file of whole tensors into a task for a Unified Checkpoint ``name``.

    Weights are saved as with ``skip_save_model_weight``: they are main weights if the model computes in 16 bits.

    Raises:
        FlexError: A state is one of another framework's optimizer.
    """
    entries, groups, keys = task.target.tensors, dict[str, list[Shard]](), dict[str, str]()
    for shard in sorted((shard for held in task.target.files.values() for shard in held), key=lambda one: one.tensor):
        keys[shard.tensor], group = _unified_key(shard.tensor)
        groups.setdefault(group, []).append(shard)
    computes_in = "" if source.index is None else source.index.values.get("run.dtype")
    has_main_weights = computes_in in ("bfloat16", "float16")
    files, extra_files = dict[str, tuple[Shard, ...]](), dict[str, str]()
    for group, shards in groups.items():
        parts = files_of_whole(shards, entries)
        names = [f"{group}-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
        files |= dict(zip(names, parts, strict=True))
        size = sum(prod(shard.shape) * dtype_bytes(entries[shard.tensor].dtype) for shard in shards)
        weight_map = {keys[shard.tensor]: file for file in names for shard in files[file]}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        index |= {MASTER: has_main_weights} if group == OPTIMIZER else {}
        extra_files[f"{group}{INDEX}"] = json.dumps(index, indent=4)
    target = replace(task.target, files=files, ranks=dict.fromkeys(files, 0), keys=keys)
    return replace(
        task,
        target=replace(target, metadata=MappingProxyType({"format": "np"})),
        target_layout=layout_of_files(name, entries, files, {}),
        provenance=None,
        one_file=None,
        extra_files=MappingProxyType({**task.extra_files, **extra_files}),
    )


def _unified_key(tensor: str) -> tuple[str, str]:
    """PaddleNLP's key of a tensor, and the first word of its file's name."""
    if not tensor.startswith("optimizer/"):
        return tensor, MODEL
    _, slot, weight = tensor.split("/", 2)
    if slot not in SUFFIXES:
        message = f"{tensor} is a state of PyTorch's optimizer, which keeps other numbers than Paddle's"
        raise PipeproofError(FLEX_UNSUPPORTED.finding(message, help="give --weights-only, or another --save-format"))
    return f"{weight}/{SUFFIXES[slot]}", OPTIMIZER
