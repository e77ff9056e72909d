"""Saving of a state with Paddle's own ``save_state_dict``: shards of the plan in Paddle's format and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import paddle
from paddle.distributed import ShardedWeight, save_state_dict

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.stages.paddle.runtime import quiet_native
from pipeproof.state.array_files import digest_of
from pipeproof.state.flex.flex_metadata import key_of, stored_shape
from pipeproof.state.flex.flex_output import describe_file
from pipeproof.state.state_layout import RankShard, shards_of_rank
from pipeproof.system_calls import sync

_SAVE = 0
"""Paddle's number of a save in its directory; each directory has one save, because Paddle mixes up several."""


def write_flex_part(
    directory: Path, plan: LoweredPlan, rank: int, state: Mapping[tuple[str, str], paddle.Tensor]
) -> None:
    """Write this rank's file into ``directory``, flushed to the disk, and a description of its content.

    Every rank must call this. Paddle chooses the writer of each shard that several ranks have. The call returns when
    this rank's file is written, so a barrier must follow.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(shards_of_rank(plan, rank))
    weights = {weight.key: weight for weight in (sharded(shard, state[shard.weight, shard.slot]) for shard in shards)}
    with quiet_native():
        save_state_dict(weights, str(directory), unique_id=_SAVE, safetensors=True)
    file = directory / f"{paddle.distributed.get_rank()}_{_SAVE}.safetensors"
    sync(file)
    note = describe_file(file, rank, shards, digest_of(file))
    (directory / f"rank{rank}.json").write_text(note.model_dump_json(exclude_none=True))


def sharded(shard: RankShard, tensor: paddle.Tensor) -> ShardedWeight:
    """Return a rank's shard as Paddle describes it; it shares the memory of ``tensor``."""
    stored, entry = shard.shard, shard.tensor
    is_number = entry.kind == "counter"
    return ShardedWeight(
        key=key_of(stored.tensor, entry),
        local_tensor=tensor.detach().reshape(stored_shape(entry, stored.shape)),
        local_shape=stored_shape(entry, stored.extents),
        global_shape=stored_shape(entry, entry.shape),
        global_offset=(0,) if is_number else stored.offsets,
        is_flattened=stored.flat is not None,
        flattened_range=None if stored.flat is None else slice(*stored.flat),
    )
