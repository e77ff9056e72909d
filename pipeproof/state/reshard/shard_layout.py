"""Shard layouts: whole tensors by name, and the holder of each shard. The proof compares a source's and a target's."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import grouped
from pipeproof.state.checkpoint import HeldShard, ShardsByTensor, sharding_fault
from pipeproof.state.regions import TilingFault
from pipeproof.state.state_index import Shard, TensorEntry
from pipeproof.state.state_layout import file_name, files_of, whole_state


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A checkpoint, or what a plan's ranks write: whole tensors, and shards that must hold each element once.

    ``name`` is for messages. With ``plan`` the shards must lie where that plan computes with them.
    """

    name: str
    tensors: Mapping[str, TensorEntry]
    shards: ShardsByTensor
    plan: LoweredPlan | None = None


def layout_of_plan(plan: LoweredPlan, name: str) -> ShardLayout:
    """Return the layout that the ranks of a plan write."""
    ranks = {file_name(rank): rank for rank in range(plan.mesh.num_ranks)}
    with garbage_collection_paused():
        return layout_of_files(name, whole_state(plan), files_of(plan), ranks, plan)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause the collector: it would scan millions of live shards again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def layout_of_files(
    name: str,
    tensors: Mapping[str, TensorEntry],
    files: Mapping[str, Iterable[Shard]],
    ranks: Mapping[str, int],
    plan: LoweredPlan | None = None,
) -> ShardLayout:
    """Return the layout of files, each written by one rank. A file without a rank is named by itself."""
    holders = ((shards, ranks.get(file), Path(file)) for file, shards in files.items())
    held = grouped((shard.tensor, HeldShard(shard, rank, path)) for shards, rank, path in holders for shard in shards)
    return ShardLayout(name, tensors, {tensor: tuple(shards) for tensor, shards in held.items()}, plan)


class BadSharding(NamedTuple):
    """Tensors of a layout with the same sharding, and the first region that their shards do not hold exactly once."""

    tensors: tuple[str, ...]
    fault: TilingFault


def bad_shardings(layout: ShardLayout) -> Iterator[BadSharding]:
    """Yield the shardings of a layout that are not bijections, in the order of the tensors.

    Equal shardings are checked once.
    """

    def sharding(name: str) -> object:
        shards = (held.shard for held in layout.shards.get(name, ()))
        return layout.tensors[name].shape, tuple((shard.offsets, shard.extents, shard.flat) for shard in shards)

    for names in grouped((sharding(name), name) for name in layout.tensors).values():
        shards = [held.shard for held in layout.shards.get(names[0], ())]
        fault = sharding_fault(layout.tensors[names[0]].shape, shards)
        if fault is not None:
            yield BadSharding(tuple(names), fault)
