"""The two sides of a reshard, as the proof looks at them: whole tensors by name, and who holds which parts of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.index import Shard, TensorEntry
from pipeproof.state.layout import file_name, files_of, whole_state


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a tensor, and who holds it: ``where`` is for a person, such as ``rank 3`` or a file's name."""

    shard: Shard
    rank: int | None
    where: str


Parts = Mapping[str, tuple[HeldPart, ...]]
"""By tensor, its parts."""


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint, or what a plan's ranks write: whole tensors, and parts that should hold each element of them once.

    ``name`` is for a person. With ``plan`` the parts are to lie where that plan computes with them.
    """

    name: str
    tensors: Mapping[str, TensorEntry]
    parts: Parts
    plan: LoweredPlan | None = None


def side_of_checkpoint(checkpoint: Checkpoint) -> Side:
    """What is on disk."""
    parts = {
        name: tuple(
            HeldPart(part.shard, part.rank, part.file.name if part.rank is None else f"rank {part.rank}")
            for part in of_one
        )
        for name, of_one in checkpoint.parts.items()
    }
    return Side(str(checkpoint.place), checkpoint.tensors, parts)


def side_of_plan(plan: LoweredPlan, name: str) -> Side:
    """What the ranks of a plan write."""
    ranks = {file_name(rank): rank for rank in range(plan.mesh.num_ranks)}
    with without_collections():
        return side_of_files(name, whole_state(plan), files_of(plan), ranks, plan)


@contextmanager
def without_collections() -> Iterator[None]:
    """Millions of parts live on, none of them garbage: the collector would look them all through again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def side_of_files(
    name: str,
    tensors: Mapping[str, TensorEntry],
    files: Mapping[str, Iterable[Shard]],
    ranks: Mapping[str, int],
    plan: LoweredPlan | None = None,
) -> Side:
    """What files are to hold, each written by one rank. A file that is of no rank is named by itself."""
    parts: dict[str, list[HeldPart]] = {}
    for file, shards in files.items():
        rank = ranks.get(file)
        where = file if rank is None else f"rank {rank}"
        for shard in shards:
            parts.setdefault(shard.tensor, []).append(HeldPart(shard, rank, where))
    return Side(name, tensors, {name: tuple(of_one) for name, of_one in parts.items()}, plan)
