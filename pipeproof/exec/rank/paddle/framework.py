"""``Framework`` of ``exec.rank.framework_protocol`` for Paddle; start Paddle before importing this module."""

# ruff: noqa: D102 - `Framework` documents the methods
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import paddle
from paddle.distributed import ShardedWeight, save_state_dict

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import Array, RankStage, Routers, StageCollectives, World
from pipeproof.exec.rank.gpt_stage import GptStage, member_values, tp_shard, with_member
from pipeproof.exec.rank.paddle import comm, nccl
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.exec.store.rendezvous import await_store
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.synthetic import Batch, micro_batch
from pipeproof.stages.paddle.optimizer import GradientClip, ShardedOptimizer, StageOptimizer
from pipeproof.stages.paddle.runtime import num_math_threads, quiet_native
from pipeproof.stages.paddle.stage import PaddleStage
from pipeproof.state.byte_ranges import digest_of
from pipeproof.state.flex.flex_metadata import key_of, stored_shape
from pipeproof.state.flex.flex_output import describe_file
from pipeproof.state.state_layout import RankShard, shards_of_rank
from pipeproof.system_calls import sync

# --- Stages of a rank with Paddle ---


Tensor: TypeAlias = paddle.Tensor


class PaddleGptStage(GptStage):
    """A stage whose work items are whole micro-batches in numpy; it computes with a split of the sequences."""

    def __init__(
        self,
        plan: LoweredPlan,
        number: int,
        coords: Mapping[str, int],
        collectives: StageCollectives,
        lent: Mapping[str, Tensor],
    ) -> None:
        ranks = coords["tp"], collectives, coords["ep"], collectives
        stage = PaddleStage(plan.spec, plan.layers_of(number), *ranks, lent=lent, context=collectives)
        super().__init__(plan, number, coords, stage)
        self._num_splits = plan.spec.schedule.num_sequence_splits * plan.spec.topology.cp

    def _work_item(self, step: int, index: int, split: int) -> Batch:
        return micro_batch(self._plan.spec, step, index)

    def _with_member(self, work_item: Batch, split: int, member: Boundary, received: Tensor) -> Batch:
        splits = [self._sequence_split(work_item, index) for index in range(self._num_splits)]
        splits[split] = with_member(splits[split], member, received.numpy())
        joined = (np.concatenate([getattr(part, name) for part in splits], axis=1) for name in ("tokens", "labels"))
        return Batch(*joined)

    def _outgoing(self, work_item: Batch, split: int, member: Boundary) -> Tensor:
        placement = member.placement(at_sender=True, gradient=False)
        values = member_values(self._sequence_split(work_item, split), member)
        return paddle.to_tensor(np.ascontiguousarray(tp_shard(values, placement, self._tp, member.num_tp_ranks)))

    def _as(self, tensor: Tensor, dtype: str) -> Tensor:
        return tensor if PaddleArrays().dtype(tensor) == dtype else paddle.cast(tensor, dtype)

    def _reported(self, losses: Array) -> Tensor:
        return paddle.to_tensor(losses)

    def _sequence_split(self, batch: Batch, split: int) -> Batch:
        return Batch(*(np.split(array, self._num_splits, axis=1)[split] for array in (batch.tokens, batch.labels)))


class PaddleStages:
    """Factory of a rank's stages; a ``Stages``."""

    def __init__(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> None:
        self._plan, self._coords, self._collectives = plan, coords, collectives

    def make(self, number: int, lent: Mapping[str, Tensor]) -> RankStage:
        """Return a stage, with the weights that the rank's other stages lend it."""
        return PaddleGptStage(self._plan, number, self._coords, self._collectives, lent)

    def routers(self, stage: RankStage) -> Routers | None:
        """Return the routers of a stage."""
        return stage.balance if isinstance(stage, PaddleGptStage) else None

    def load(self, step: int) -> None:
        """Do nothing: stages draw each micro-batch when they need it."""


class PaddleFramework:
    """Paddle over gloo or NCCL; a ``Framework`` whose weights are tensors with their gradient in ``grad``.

    It runs on the device of ``start_paddle``; without ``computes`` it uses no kernels there.
    """

    has_values = True
    optimizer = StageOptimizer
    sharded_optimizer = ShardedOptimizer
    clip = GradientClip

    def __init__(self, device: str = "cpu", *, computes: bool = True) -> None:
        self.arrays = PaddleArrays()
        self._device, self._computes = device, computes

    def num_threads(self) -> int:
        return num_math_threads()

    def connect(self, rank: int, plan: LoweredPlan, progress: Callable[[str], None]) -> World:
        if rank > 0 and "PADDLE_MASTER" in os.environ:
            await_store(os.environ["PADDLE_MASTER"])
        channels, groups = plan.graph.channels, plan.graph.groups
        if self._device == "gpu":
            return nccl.connect(rank, plan.mesh.num_ranks, channels, groups, progress, computes=self._computes)
        return comm.connect(rank, channels, groups, progress)

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> PaddleStages:
        return PaddleStages(plan, coords, collectives)

    def gradient(self, weight: paddle.Tensor) -> paddle.Tensor:
        return weight.grad

    def put_gradient(self, weight: paddle.Tensor, gradient: paddle.Tensor) -> None:
        weight.grad.set_value(gradient)

    def main(self, weight: paddle.Tensor) -> paddle.Tensor:
        return weight

    def value(self, weight: paddle.Tensor) -> np.ndarray:
        return self.arrays.to_numpy(weight)


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
