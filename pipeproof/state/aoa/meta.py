"""What statements need to know of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.index import Shard, TensorEntry
from pipeproof.state.layout import files_of, whole_state


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A whole tensor's type and shape, and in how many parts it is kept.

    ``num_shards`` counts the different places at which parts begin, which is
    the degree of tensor parallelism where that cuts the tensor. Only
    ``fused_ffn`` and ``fused_qkv_old`` depend on it: their layout repeats for
    each part. Copies of a part, on data-parallel ranks, count once.
    """

    dtype: str
    shape: tuple[int, ...]
    num_shards: int = 1


def metas_of_checkpoint(checkpoint: Checkpoint) -> dict[str, TensorMeta]:
    """All tensors that are on disk."""
    shards = (part.shard for parts in checkpoint.parts.values() for part in parts)
    return metas_of(checkpoint.tensors, shards)


def metas_of_plan(plan: LoweredPlan) -> dict[str, TensorMeta]:
    """All tensors that runs of a plan save."""
    return metas_of(whole_state(plan), (shard for shards in files_of(plan).values() for shard in shards))


def metas_of(tensors: Mapping[str, TensorEntry], shards: Iterable[Shard]) -> dict[str, TensorMeta]:
    """Tensors, and the parts that they are kept in."""
    places: dict[str, set[tuple[int, ...]]] = {}
    for shard in shards:
        places.setdefault(shard.tensor, set()).add(shard.offsets)
    return {
        name: TensorMeta(entry.dtype, entry.shape, max(1, len(places.get(name, ())))) for name, entry in tensors.items()
    }
