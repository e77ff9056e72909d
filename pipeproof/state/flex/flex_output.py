"""Writing Paddle's flex checkpoint: the task of a reshard, and the index entries of files that Paddle wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.foreign_text import read_foreign
from pipeproof.state.flex.flex_metadata import SUFFIX, FlexShard, key_of, metadata_of, open_flex, stored_shape
from pipeproof.state.reshard.reshard_targets import ReshardTask
from pipeproof.state.safetensors_header import read_header
from pipeproof.state.state_codes import FLEX_UNSUPPORTED, FlexError
from pipeproof.state.state_index import MAX_BYTES, Shard, ShardFile, TensorEntry
from pipeproof.state.state_layout import RankShard, files_of
from pipeproof.system_calls import sync

METADATA_FILE = "0.metadata"


def as_flex(task: ReshardTask) -> ReshardTask:
    """Return a task for a plan's state with the files that Paddle's ranks would write.

    Raises:
        PipeproofError: The plan runs on another framework.
    """
    assert task.index is not None, "only for states of plans"
    if task.index.framework != "paddle":
        raise PipeproofError(
            FLEX_UNSUPPORTED.finding(
                f"the plan runs on {task.index.framework}, whose optimizers keep other numbers than Paddle's",
                help="leave out `--save-format flex`: a state's files are safetensors, too",
            )
        )
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
