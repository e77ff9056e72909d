"""Steps of one rank: the plan's program runs on the micro-batches, and all ranks get the losses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast
from weakref import WeakMethod

import paddle

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.monitor.paddle_watch import watch
from pipeproof.exec.monitor.plan_ring import ring_of_process
from pipeproof.exec.rank.framework_protocol import Framework, World
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.exec.rank.pipeline_failures import PipelineFailures
from pipeproof.exec.rank.stall_watch import StallWatch
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import TrainedPlan, forward_plan
from pipeproof.exec.train.paddle.module_stage import PaddleLayers
from pipeproof.exec.train.paddle.start_phases import Connected, Placed, Planned, Ranks, Settings
from pipeproof.exec.train.paddle.step_data import MicroBatchSizes, StepData, step_data
from pipeproof.exec.train.stage_boundaries import DTYPES, dtype_name
from pipeproof.exec.train.train_rank import TrainRank, checked_plan

Tensor: TypeAlias = paddle.Tensor


def drawn_step(
    placed: Placed, data: Any, loss_index: int | None, sizes: MicroBatchSizes, *, is_training: bool
) -> StepData:  # fmt: skip
    """The micro-batches of a step that this rank needs; without a ``loss_index`` no loss is computed.

    Raises:
        PipelineError: the arguments do not fit.
    """
    if is_training and not paddle.is_grad_enabled():
        raise PipelineError("train_batch needs gradients: do not call it under paddle.no_grad()")
    losses, own = placed.stages.losses, placed.stages.numbers
    if loss_index is not None and (loss_index not in range(len(losses)) or None in losses):
        raise PipelineError(f"loss function {loss_index} does not exist: give the layers or Pipeline a loss_fn")
    is_last = placed.num_stages - 1 in own and loss_index is not None
    step = step_data(data, sizes, is_first=0 in own, is_last=is_last)
    step.loss_index = loss_index
    return step


class StepRunner:
    """The steps of a pipeline that has started."""

    def __init__(
        self, ranks: Ranks, settings: Settings, placed: Placed, planned: Planned, plan: TrainedPlan,
        connected: Connected,
    ) -> None:  # fmt: skip
        self.ranks, self.placed, self.plan, self.sizes = ranks, placed, plan, planned.sizes
        self.modules, self.world = connected.modules, connected.world
        self.num_steps = 0
        """Number of steps that have begun."""
        self._unsafe = settings.unsafe
        self._framework = PaddleLayers(PaddleArrays(), self.modules)
        self._failures = PipelineFailures(ranks.agreement, self.world.abort)
        self._training = self._current = self._rank_of(plan.lowered)
        self._evaluation: TrainRank | None = None
        self.watch = StallWatch(
            ranks.agreement, settings.timeout_s, WeakMethod(self._describe), self.world.abort
        )  # fmt: skip

    def one_error(self) -> AbstractContextManager[None]:
        """A context whose errors on one rank are errors on all."""
        return self._failures.as_one(self.watch, Exception)

    def train(self, data: StepData, *, whole: bool) -> Any:
        """Run forward and backward of all micro-batches; return the loss, or all losses if not ``whole``."""
        self._run(self._training, data)
        return self._shared_loss(data, whole=whole)

    def evaluate(self, data: StepData) -> Any:
        """Run the forwards; return the loss, or the outputs of micro-batches if the last stage computes no loss."""
        self._failures.require_sound(self.watch.failure)
        if self._evaluation is None:
            content = forward_plan(self.plan.content, self.plan.lowered.programs)
            plan = checked_plan(content, self.ranks.agreement, "forward plan", unsafe=self._unsafe, warns=False)
            self._evaluation = self._rank_of(plan.lowered)
        with self.one_error():
            self._run(self._evaluation, data)
            if data.loss_index is not None:
                return self._shared_loss(data, whole=True)
        return [data.outputs[index] for index in sorted(data.outputs)]

    def _rank_of(self, lowered: LoweredPlan) -> TrainRank:
        framework, world = cast(Framework, self._framework), cast(World, self.world)  # without optimizers
        backend = "nccl" if lowered.spec.run.device == "gpu" else "gloo"
        rank, ranks = self.ranks.rank, self.ranks.fleet.ranks
        ring = ring_of_process(watch, lowered.graph, rank, ranks, backend, self._framework.arrays)
        return TrainRank(lowered, rank, framework, world, self._enter, is_proved=not self._unsafe, ring=ring)

    def _enter(self, step: int, op_id: int) -> None:
        self.watch.enter(step, op_id)

    def _describe(self, op_id: int) -> Mapping[str, Any]:
        return self._current.describe(op_id)

    def _run(self, rank: TrainRank, data: StepData) -> None:
        step, self.num_steps, self._current = self.num_steps, self.num_steps + 1, rank
        try:
            for stage in self.modules.values():
                stage.begin(data)
            rank.run(step)
            self._failures.require_sound(self.watch.failure)  # values of ended transfers are not results
        finally:
            rank.adapter.clear()
            for stage in self.modules.values():
                stage.begin(StepData())

    def _shared_loss(self, data: StepData, *, whole: bool) -> Any:
        """The losses of all loss functions on every rank: one tensor, or a list of several.

        As in Fleet, ranks without the last stage have them as tensors of one dim.
        """
        num_values, num_losses = 1 if whole else self.sizes.count, len(self.placed.stages.losses)
        last = next(rank for rank, own in enumerate(self.placed.by_rank) if self.placed.num_stages - 1 in own)
        losses: list[Tensor] = []
        with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
            if self.ranks.rank == last:
                by_loss = zip(*(data.losses[index] for index in sorted(data.losses)), strict=True)
                losses = [self._total(list(each), whole=whole) for each in by_loss]
            if self.world.everyone is not None:
                if losses:
                    parts = [
                        paddle.to_tensor([float(DTYPES.index(dtype_name(x.dtype)))], dtype="float64") for x in losses
                    ]
                    values = [loss.astype("float64").reshape([-1]) for loss in losses]
                    sent = paddle.concat([part for pair in zip(parts, values, strict=True) for part in pair])
                else:
                    sent = paddle.zeros([num_losses * (1 + num_values)], dtype="float64")
                self.world.everyone.broadcast(sent, last)
                if not losses:
                    for row in sent.reshape([num_losses, 1 + num_values]):
                        losses.append(row[1:].astype(DTYPES[int(row[0])]))
        return losses[0] if num_losses == 1 else losses

    def _total(self, losses: list[Tensor], *, whole: bool) -> Tensor:
        """The loss of a batch, added as Fleet adds it; or the losses of its micro-batches."""
        each = paddle.to_tensor(losses)
        if not whole:
            return each
        total = paddle.zeros_like(each[0])
        for loss in each:
            total += loss
        return total / self.sizes.count if self.ranks.fleet.delay_scale_loss else total
