"""Saving a state by Paddle's own ``save_state_dict``: parts that the plan describes, in Paddle's format and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import paddle
from paddle.distributed import ShardedWeight, save_state_dict

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.stages.paddle.runtime import quiet_native
from pipeproof.state.files import digest_of, sync
from pipeproof.state.flex.names import key_of, stored_shape
from pipeproof.state.flex.save import describe_file
from pipeproof.state.layout import Piece, pieces_of

_SAVE = 0
"""Paddle's number of a save in its directory; ours have one each, as Paddle mixes two of them up."""


def write_flex_part(
    directory: Path, plan: LoweredPlan, rank: int, state: Mapping[tuple[str, str], paddle.Tensor]
) -> None:
    """Write what Paddle lets this rank write into ``directory``, down to the disk, and a note of what that is.

    Every rank must call this. Paddle chooses for each part that several ranks have who writes it. It returns when this
    rank's file is written, whatever the others do, so a barrier must follow.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pieces = list(pieces_of(plan, rank))
    weights = {one.key: one for one in (sharded(piece, state[piece.weight, piece.slot]) for piece in pieces)}
    with quiet_native():
        save_state_dict(weights, str(directory), unique_id=_SAVE, safetensors=True)
    file = directory / f"{paddle.distributed.get_rank()}_{_SAVE}.safetensors"
    sync(file)
    note = describe_file(file, rank, pieces, digest_of(file))
    (directory / f"rank{rank}.json").write_text(note.model_dump_json(exclude_none=True))


def sharded(piece: Piece, tensor: paddle.Tensor) -> ShardedWeight:
    """A part that a rank has, as Paddle describes it; ``tensor`` stays the rank's."""
    shard, entry = piece.shard, piece.tensor
    is_number = entry.kind == "counter"
    return ShardedWeight(
        key=key_of(shard.tensor, entry),
        local_tensor=tensor.detach().reshape(stored_shape(entry, shard.shape)),
        local_shape=stored_shape(entry, shard.extents),
        global_shape=stored_shape(entry, entry.shape),
        global_offset=(0,) if is_number else shard.offsets,
        is_flattened=shard.flat is not None,
        flattened_range=None if shard.flat is None else slice(*shard.flat),
    )
