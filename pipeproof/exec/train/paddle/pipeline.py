"""``Pipeline``: Fleet's pipeline-parallel training of a script's layers, by a checked plan in its own processes.

A step is the executor's: the plan orders every operation and every message. The rest is Fleet's (``PipelineParallel``
of Paddle 3.3.1): micro-batches from the data, losses divided by their number, a loss that all ranks return, the scaler,
the optimizer, and the schedule of learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from pipeproof.exec.rank.pipeline_failures import one_failure
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.comparison import Comparison
from pipeproof.exec.train.module_plan import TrainedPlan
from pipeproof.exec.train.paddle.compare_reference import compare_step, drawn_whole
from pipeproof.exec.train.paddle.fleet_settings import require_optimizer, update_weights
from pipeproof.exec.train.paddle.stage_layers import LossFunction
from pipeproof.exec.train.paddle.start_phases import Settings, connect, infer, join, place, prove
from pipeproof.exec.train.paddle.step_data import MicroBatchSizes, StepData
from pipeproof.exec.train.paddle.step_runner import StepRunner, drawn_step
from pipeproof.exec.train.stage_edges import Edges


class Pipeline(nn.Layer):  # type: ignore[misc]  # Paddle ships no types
    """The stages of this rank in a pipeline that runs a checked plan, in the place of ``fleet.distributed_model``.

    The plan is made and checked at the first batch, whose first micro-batch has the shapes; with ``example``, in the
    constructor.

    Args:
        layers: a Fleet ``PipelineLayer``, or a list of layers, functions, ``LayerDesc`` and ``SharedLayerDesc``; each
            rank builds the layers of its stages.
        plan: a plan file or a dict; without it, a plan is made from ``schedule`` and ``num_micro_batches``.
        schedule: a kind (``pipeproof schedule list``), a file of a written schedule, or the operations of each rank.
            Default: the schedule with which Fleet runs the ``PipelineLayer``; 1F1B for a list.
        num_micro_batches: number of micro-batches in a step. Default: ``accumulate_steps`` of Fleet's strategy.
        loss_fn: ``(output, label) -> loss``, or a list of them. Default: the ``PipelineLayer``'s.
        example: the inputs of the first stage for one micro-batch, the same on all ranks.
        seg_method: Fleet's method to cut a list: ``uniform``, ``layer:CLASS`` or the first layer of each stage.
        num_virtual_pipeline_stages: number of stages on each rank for a list, if the schedule does not fix it.
        edges: tensors for stages after the next one, as {name: (producer, consumers)} or with "direct" as the third,
            for a list: ``{"skip": (0, [3])}``. The last layer of the producer's stage returns a dict with the output
            and the tensor, or one tensor that is both; the first layer of each consumer's stage takes it by name.
        group: Paddle's group of the pipeline's ranks. Default: Fleet's pipeline group; the world without Fleet.
        timeout_s: time without progress after which a report is printed and all ranks end.
        unsafe: train by a plan that is not proved.

    Raises:
        PlanRefused: the plan is not proved.
        PipelineError: the ranks do not fit together; every rank raises it.
    """

    def __init__(
        self,
        layers: PipelineLayer | Sequence[Any],
        *,
        plan: str | Path | Mapping[str, Any] | None = None,
        schedule: str | Path | Sequence[Sequence[str]] | None = None,
        num_micro_batches: int | None = None,
        loss_fn: LossFunction | Sequence[LossFunction] | None = None,
        example: Any = None,
        seg_method: str | Sequence[int] = "uniform",
        num_virtual_pipeline_stages: int | None = None,
        edges: Edges | None = None,
        group: Any = None,
        timeout_s: float = 600.0,
        unsafe: bool = False,
    ) -> None:
        super().__init__()
        losses = () if loss_fn is None else tuple(loss_fn) if isinstance(loss_fn, Sequence) else (loss_fn,)
        self._settings = Settings(
            plan,
            schedule,
            num_micro_batches,
            losses,
            seg_method,
            num_virtual_pipeline_stages,
            edges or {},
            timeout_s,
            unsafe,
        )
        self._ranks = join(group, timeout_s)
        with one_failure(self._ranks.agreement):
            self._placed = place(self._ranks, self._settings, layers)
        self.rank, self.num_ranks, self.num_stages = self._ranks.rank, self._ranks.num_ranks, self._placed.num_stages
        self.accumulate_steps = self._placed.sizes.count
        self._layers = self._placed.stages.layers
        self._runner = None if example is None else self._started(lambda: example)

    @property
    def plan(self) -> TrainedPlan:
        """The checked plan.

        Raises:
            PipelineError: before the first batch, if there was no `example`.
        """
        if self._runner is None:
            raise PipelineError("the plan is made at the first batch: give Pipeline an `example` to have it here")
        return self._runner.plan

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:  # noqa: FBT002 - Fleet's signature
        """Return True if this rank has the first stage, which gets the inputs."""
        return 0 in self._placed.stages.numbers

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:  # noqa: FBT002
        """Return True if this rank has the last stage, which gets the labels and computes the loss."""
        return self.num_stages - 1 in self._placed.stages.numbers

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse: one rank alone has no forward.

        Raises:
            PipelineError: always.
        """
        raise PipelineError("a rank has some stages alone: call train_batch() or eval_batch() on every rank")

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,  # noqa: FBT002 - Fleet's signature
    ) -> Any:
        """Train one batch: all micro-batches forward and backward, then scaler, optimizer and learning rate step.

        ``data`` is ``(inputs, labels)`` or an iterator of such micro-batches; ranks without the first and the last
        stage may pass None. Returns the loss on every rank: the sum of the micro-batches' losses, each divided by their
        number; with ``return_micro_batch_loss`` the losses of all micro-batches. With several loss functions the result
        is a list; the backward uses number ``loss_fn_idx``.

        Raises:
            PlanRefused: at the first batch, the plan is not proved.
            PipelineError: a layer raised on some rank, or the data does not fit; every rank raises it.
        """
        self._layers.train()
        runner, step = self._begun(partial(drawn_step, self._placed, data, loss_fn_idx, is_training=True))
        step.scaler = scaler if scaler is not None and scaler.is_enable() else None
        with runner.one_error():
            require_optimizer(optimizer, self.num_ranks)
            loss = runner.train(step, whole=not return_micro_batch_loss)
            with paddle.amp.auto_cast(enable=False):
                update_weights(self._layers, self._ranks.fleet, step.count, optimizer, lr_scheduler, scaler)
        return loss

    @paddle.no_grad()  # type: ignore[untyped-decorator]  # Paddle ships no types
    def eval_batch(
        self,
        data: Any,
        compute_loss: bool = False,  # noqa: FBT002 - Fleet's signature
        loss_fn_idx: int = 0,
        return_host_tensor: bool = False,  # noqa: FBT002
    ) -> Any:
        """Run only the forwards, with the layers in evaluation mode.

        With ``compute_loss``, returns the loss on every rank, like ``train_batch``. Otherwise returns a list: on the
        last stage's rank the output of each micro-batch, on other ranks nothing. With ``return_host_tensor`` outputs
        are in the host's memory.
        """
        self._layers.eval()
        runner, step = self._begun(
            partial(drawn_step, self._placed, data, loss_fn_idx if compute_loss else None, is_training=False)
        )
        result = runner.evaluate(step)
        return _on_host(result) if return_host_tensor and not compute_loss else result

    def compare(self, data: Any, loss_fn_idx: int = 0) -> Comparison:
        """Run one step without the optimizer, and compare it with the unpartitioned model made of the same layers.

        It compares the loss and every gradient bit for bit: the first rank builds the whole list of layers, with the
        pipeline's weights and buffers, and runs the micro-batches one by one in plain autograd. It adds the gradients
        in the order of the plan. The first rank needs the memory of the whole model, and both ``(inputs, labels)``.
        Earlier gradients, buffers and random states are put back. Dropout draws other numbers in the unpartitioned
        model: compare without dropout.

        Raises:
            PipelineError: the data does not fit, or weights have a ``main_grad``; every rank raises it.
        """
        self._layers.train()
        runner, step = self._begun(partial(drawn_whole, self._placed, data, loss_fn_idx))
        with runner.one_error():
            return compare_step(runner, step, data)

    def close(self) -> None:
        """End the pipeline's watch. Its groups end with the process."""
        if self._runner is not None:
            self._runner.watch.close()

    def _begun(self, draw: Callable[[MicroBatchSizes], StepData]) -> tuple[StepRunner, StepData]:
        """The micro-batches of a step, by ``draw``; at the first batch, the pipeline starts."""
        if self._runner is not None:
            with self._runner.one_error():
                return self._runner, draw(self._runner.sizes)
        steps: list[StepData] = []

        def first_inputs() -> Any:
            steps.append(draw(self._placed.sizes))
            return steps[0].inputs[0]

        self._runner = self._started(first_inputs)
        return self._runner, steps[0]

    def _started(self, first_inputs: Callable[[], Any]) -> StepRunner:
        with one_failure(self._ranks.agreement):
            planned = infer(self._ranks, self._placed, first_inputs)
            plan = prove(self._ranks, self._settings, self._placed, planned)
            connected = connect(self._ranks, self._placed, planned, plan)
            return StepRunner(self._ranks, self._settings, self._placed, planned, plan, connected)


def _on_host(value: Any) -> Any:
    if isinstance(value, paddle.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(item) for key, item in value.items()}
    return type(value)(_on_host(item) for item in value)
