"""``Pipeline``: Fleet's pipeline-parallel training of a script's layers, by a checked plan in its own processes.

A step is the executor's: the plan orders every operation and every message. What surrounds it is Fleet's
(``PipelineParallel`` of Paddle 3.3.1): micro-batches from the data, losses divided by their number, a loss that all
ranks return, the scaler, the optimizer, and the schedule of learning rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakMethod

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.monitor.paddle_watch import watch
from pipeproof.exec.monitor.plan_ring import ring_of_process
from pipeproof.exec.rank.framework_protocol import Framework, World
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.exec.store.paddle_store import send_at_once
from pipeproof.exec.train.agreement import Agreement, described_in_order, require_equal
from pipeproof.exec.train.module_plan import (
    Request,
    StageFacts,
    TrainedPlan,
    complete_plan,
    forward_plan,
    given_plan,
    placement_of,
    schedule_section,
)
from pipeproof.exec.train.paddle.boundary_inference import boundary_of, entry_of, run_stage, zeros_of
from pipeproof.exec.train.paddle.channel_groups import StageWorld, connect_stages
from pipeproof.exec.train.paddle.declared_layers import declared_entries, declared_names
from pipeproof.exec.train.paddle.fleet_settings import (
    fleet_schedule,
    is_fleet_optimizer,
    pipeline_settings,
    share_parameters,
)
from pipeproof.exec.train.paddle.module_framework import PaddleLayers
from pipeproof.exec.train.paddle.module_stage import ModuleStage
from pipeproof.exec.train.paddle.stage_layers import (
    FleetStages,
    ListStages,
    LossFunction,
    StageLayers,
    cut_layers,
    require_layers,
    require_tied_on_one_rank,
    ties_of,
    trained,
)
from pipeproof.exec.train.paddle.step_data import MicroBatchSizes, StepData, rows_of, step_data
from pipeproof.exec.train.paddle.store import store_address, store_of
from pipeproof.exec.train.pipeline_failures import PipelineFailures
from pipeproof.exec.train.stage_boundaries import DTYPES, Boundaries, Form, LeafSpec, common_dtype, dtype_name
from pipeproof.exec.train.stage_count import num_stages_of
from pipeproof.exec.train.stall_watch import StallWatch
from pipeproof.exec.train.tied_weights import merged_ties, names_in_plan
from pipeproof.exec.train.train_errors import PipelineError
from pipeproof.exec.train.train_rank import TrainRank, checked_plan, require_fits, require_supported
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.paddle.custom_stage import SplitBackward

Tensor: TypeAlias = paddle.Tensor


class Pipeline(nn.Layer):  # type: ignore[misc]  # Paddle ships no types
    """The stages of this rank in a pipeline that runs a checked plan, in the place of ``fleet.distributed_model``.

    The plan is made and checked at the first batch, whose first micro-batch shows the shapes; with ``example``, here.

    Args:
        layers: a Fleet ``PipelineLayer``, or a list of layers, functions, ``LayerDesc`` and ``SharedLayerDesc``, of
            which each rank builds those of its stages.
        plan: a plan file or a dict; without it, a plan is made of ``schedule`` and ``num_micro_batches``.
        schedule: a kind (``pipeproof schedule list``), a file of a written schedule, or the operations of each rank.
            Default: the schedule with which Fleet runs the ``PipelineLayer``; 1F1B for a list.
        num_micro_batches: number of micro-batches in a step. Default: ``accumulate_steps`` of Fleet's strategy.
        loss_fn: ``(output, label) -> loss``, or a list of them. Default: that of the ``PipelineLayer``.
        example: the inputs of the first stage for one micro-batch, the same on all ranks.
        seg_method: Fleet's method to cut a list: ``uniform``, ``layer:CLASS`` or the first layer of each stage.
        num_virtual_pipeline_stages: stages of each rank for a list, where the schedule does not fix it.
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
        group: Any = None,
        timeout_s: float = 600.0,
        unsafe: bool = False,
    ) -> None:
        super().__init__()
        settings = self._settings = pipeline_settings(group)
        self._ranks = settings.ranks
        self.rank, self.num_ranks = settings.ranks.index(dist.get_rank()), len(settings.ranks)
        self._store = store_of(settings.ranks)
        self._agreement = agreement = Agreement(self._store, self.rank, self.num_ranks, timeout_s)
        self._failures = PipelineFailures(agreement, self._abort)
        self._timeout_s, self._unsafe = timeout_s, unsafe

        def request() -> dict[str, Any]:
            require_layers(layers)
            if isinstance(layers, PipelineLayer) and (seg_method != "uniform" or num_virtual_pipeline_stages):
                raise PipelineError(
                    "a PipelineLayer is cut already: give seg_method and num_virtual_pipeline_stages to it"
                )
            content = None if plan is None else given_plan(plan)
            planned = (content or {}).get("schedule", {})
            if schedule is not None and planned:
                raise PipelineError("the plan has a schedule, and Pipeline has one too: leave out one of the two")
            count = planned.get("num_micro_batches", settings.accumulate_steps)
            if num_micro_batches is not None:
                count = num_micro_batches
            if count is None:
                raise PipelineError("give Pipeline a plan, or num_micro_batches")
            if schedule is not None:
                section = schedule_section(schedule)
            elif isinstance(layers, PipelineLayer):
                section = fleet_schedule(layers, settings, count)
            else:
                section = {"kind": "1f1b"}
            device = "cpu" if paddle.device.get_device() == "cpu" else "gpu"
            asked = Request(content, section, count, "paddle", device, "float32", self.num_ranks, 1)
            return {"request": asdict(asked), "settings": [list(settings.ranks), timeout_s, unsafe]}

        reports = agreement.gather("request", request)
        if self.num_ranks > 1:
            send_at_once({store_address()[1]})  # rank 0 has accepted all connections by now
        require_equal([other["settings"] for other in reports], "an argument of Pipeline")
        require_equal([other["request"] for other in reports], "the plan, the schedule or the number of micro-batches")
        asked = Request(**reports[0]["request"])
        losses = list(loss_fn) if isinstance(loss_fn, Sequence) else [loss_fn]

        def build() -> tuple[dict[str, Any], StageLayers]:
            if isinstance(layers, PipelineLayer):
                stages: StageLayers = FleetStages(layers)
                if loss_fn is not None:
                    stages.losses = losses
                skeleton = asked.skeleton(len(stages.parts) - 1)
                _require_placement(skeleton, stages, self.rank, self.num_ranks)
                require_tied_on_one_rank(layers._layers_desc, stages)  # noqa: SLF001 - all layers, of other ranks too
                return skeleton, stages
            num_stages = num_stages_of(asked.plan, asked.schedule, self.num_ranks, num_virtual_pipeline_stages)
            skeleton = asked.skeleton(num_stages)
            parts = declared_entries(skeleton, num_stages, len(layers))
            if parts is None:
                method = skeleton.get("stages") if isinstance(skeleton.get("stages"), str) else seg_method
                parts = cut_layers(layers, num_stages, method or "uniform")
            placed = placement_of(skeleton, num_stages)
            listed = ListStages(layers, parts, placed[self.rank], losses)
            require_tied_on_one_rank(layers, listed)
            return skeleton, listed

        def build_and_describe() -> dict[str, Any]:
            skeleton, stages = self._skeleton, self._stages = build()
            ties = {key: {str(stage): name for stage, name in names.items()} for key, names in ties_of(stages).items()}
            return {
                "stages": list(stages.numbers),
                "ties": ties,
                "dtype": common_dtype(stages.layers.parameters()),
                "skeleton": skeleton,
            }

        reports = agreement.gather("stages", build_and_describe)
        require_equal([other["skeleton"] for other in reports], "the plan")
        if asked.plan is None or "dtype" not in asked.plan.get("run", {}):
            self._skeleton["run"]["dtype"] = next((other["dtype"] for other in reports if other["dtype"]), "float32")
        self._placed = [[int(number) for number in other["stages"]] for other in reports]
        agreement.gather("placement", lambda: _require_one_rank(self._placed))
        self._ties = merged_ties(other["ties"] for other in reports)
        self._layers = self._stages.layers
        self.num_stages = len(self._stages.parts) - 1
        self._loss_rank = next(rank for rank, own in enumerate(self._placed) if self.num_stages - 1 in own)
        self.accumulate_steps: int = self._skeleton["schedule"]["num_micro_batches"]
        num_rows = self._skeleton["schedule"].get("micro_batch_size")
        if num_rows is None and self.accumulate_steps == settings.accumulate_steps:
            num_rows = settings.micro_batch_size
        self._sizes = MicroBatchSizes(self.accumulate_steps, num_rows)
        share_parameters(self._layers)
        self._step = 0
        self._prepared: _Prepared | None = None
        self._watch: StallWatch | None = None
        if example is not None:
            self._prepare(lambda: example)

    @property
    def plan(self) -> TrainedPlan:
        """The checked plan.

        Raises:
            PipelineError: it is not made before the first batch, because there was no `example`.
        """
        if self._prepared is None:
            raise PipelineError("the plan is made at the first batch: give Pipeline an `example` to have it here")
        return self._prepared.plan

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:  # noqa: FBT002 - Fleet's signature
        """Return True if this rank has the first stage, which gets the inputs."""
        return 0 in self._stages.numbers

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:  # noqa: FBT002
        """Return True if this rank has the last stage, which gets the labels and computes the loss."""
        return self.num_stages - 1 in self._stages.numbers

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

        ``data`` is ``(inputs, labels)`` or an iterator of micro-batches of such; ranks without the first and the last
        stage may pass None. Returns, on every rank, the loss: the sum of the micro-batches' losses, each divided by
        their number; with ``return_micro_batch_loss`` the losses of all micro-batches. With several loss functions it
        is a list, and ``loss_fn_idx`` is the one of the backward.

        Raises:
            PlanRefused: at the first batch, the plan is not proved.
            PipelineError: a layer raised on some rank, or the data does not fit; every rank raises it.
        """
        self._layers.train()
        step = self._begun(data, computes_loss=True, loss_index=loss_fn_idx, is_training=True)
        step.scaler = scaler if scaler is not None and scaler.is_enable() else None
        prepared = self._prepared
        assert prepared is not None, "``_begun`` prepares"
        with self._one_error():
            _require_optimizer(optimizer, self.num_ranks)
            loss = self._run(prepared.training, step, whole=not return_micro_batch_loss)
            with paddle.amp.auto_cast(enable=False):
                self._optimizer_step(optimizer, lr_scheduler, scaler)
        return loss

    @paddle.no_grad()  # type: ignore[untyped-decorator]  # Paddle ships no types
    def eval_batch(
        self,
        data: Any,
        compute_loss: bool = False,  # noqa: FBT002 - Fleet's signature
        loss_fn_idx: int = 0,
        return_host_tensor: bool = False,  # noqa: FBT002
    ) -> Any:
        """Run the forwards alone, with the layers in evaluation mode.

        Returns, with ``compute_loss``, the loss on every rank, as ``train_batch``; else a list with the output of each
        micro-batch where the last stage is, and an empty list elsewhere. With ``return_host_tensor`` outputs are in the
        host's memory.
        """
        self._layers.eval()
        step = self._begun(data, computes_loss=compute_loss, loss_index=loss_fn_idx, is_training=False)
        prepared = self._prepared
        assert prepared is not None, "``_begun`` prepares"
        if prepared.evaluation is None:
            content = forward_plan(prepared.plan.content, prepared.plan.lowered.programs)
            plan = checked_plan(content, self._agreement, "forward plan", unsafe=self._unsafe, warns=False)
            prepared.evaluation = self._rank_of(plan.lowered, prepared.framework, prepared.world)
        with self._one_error():
            loss = self._run(prepared.evaluation, step, whole=True)
        if compute_loss:
            return loss
        outputs = [step.outputs[index] for index in sorted(step.outputs)]
        return [_on_host(output) for output in outputs] if return_host_tensor else outputs

    def _begun(self, data: Any, *, computes_loss: bool, loss_index: int, is_training: bool) -> StepData:
        """The micro-batches of a step; at the first batch, make the plan.

        Raises:
            PipelineError: an earlier step failed, or the arguments do not fit.
        """
        self._failures.require_sound(None if self._watch is None else self._watch.failure)

        def drawn() -> StepData:
            if is_training and not paddle.is_grad_enabled():
                raise PipelineError("train_batch needs gradients: do not call it under paddle.no_grad()")
            if computes_loss and (loss_index not in range(len(self._stages.losses)) or None in self._stages.losses):
                raise PipelineError(f"loss function {loss_index} does not exist: give the layers or Pipeline a loss_fn")
            is_last = self.is_pipeline_last_stage() and computes_loss
            step = step_data(data, self._sizes, is_first=self.is_pipeline_first_stage(), is_last=is_last)
            step.computes_loss, step.loss_index = computes_loss, loss_index
            return step

        if self._prepared is not None:
            with self._one_error():
                return drawn()
        steps: list[StepData] = []

        def first_inputs() -> Any:
            steps.append(drawn())
            return steps[0].inputs[0]

        self._prepare(first_inputs)
        return steps[0]

    def _prepare(self, first_inputs: Callable[[], Any]) -> None:
        """Find the boundaries, make and check the plan, and connect the ranks. ``first_inputs`` is called on each rank.

        Raises:
            PlanRefused: the plan is not proved.
            PipelineError: a stage fails, or the plan does not fit.
        """
        agreement = self._agreement
        inputs = agreement.own("first batch", first_inputs)
        numbers = self._stages.numbers
        entries = described_in_order(agreement, numbers, lambda number, before: self._facts(number, before, inputs))
        num_rows = int(entries[0]["rows"])
        boundaries = {number: boundary_of(entries[number]) for number in range(self.num_stages)}
        facts = [
            StageFacts(
                entries[number]["kind"],
                entries[number]["parameters"],
                [spec.plan_entry(num_rows) for spec in boundaries[number][1]],
                entries[number]["kept"],
            )
            for number in range(self.num_stages)
        ]
        skeleton = dict(self._skeleton)
        agreement.gather("sizes", lambda: self._require_rows(num_rows))
        if not skeleton["model"].get("layers"):
            skeleton.pop("stages", None)
        self._sizes = MicroBatchSizes(self.accumulate_steps, num_rows)
        content = complete_plan(skeleton, facts, self._ties, num_rows)
        plan = checked_plan(content, agreement, "plan", unsafe=self._unsafe)
        lowered = plan.lowered
        leaves = {number: outputs for number, (_, outputs) in boundaries.items()}
        agreement.gather("supported", lambda: self._require_supported(lowered, leaves))
        modules = agreement.own("modules", lambda: self._modules_of(lowered, boundaries))
        world = connect_stages(lowered.graph, agreement, self._store)
        self._share_start(world, lowered, modules)
        framework = PaddleLayers(PaddleArrays(), modules)
        training = self._rank_of(lowered, framework, world)
        self._prepared = _Prepared(plan, world, modules, framework, training)
        self._watch = StallWatch(agreement, self._timeout_s, WeakMethod(self._describe_op), world.abort)

    def _facts(self, number: int, before: Mapping[str, Any], inputs: Any) -> dict[str, Any]:
        """JSON facts of one stage, after those of the stage before it."""
        module = self._stages.module(number)
        value, num_rows = (zeros_of(*boundary_of(before)), before["rows"]) if before else (inputs, rows_of(inputs))
        is_last = number == self.num_stages - 1
        run = run_stage(number, module, partial(self._stages.call, number), value, is_last=is_last)
        weights = [{"name": name, "shape": list(weight.shape)} for name, weight in trained(module).items()]
        return {**entry_of(run, num_rows), "kind": self._kind(number), "parameters": weights}

    def _kind(self, number: int) -> str:
        names = [type(item.module).__name__ for item in self._stages.items(number) if item.module is not None]
        return names[0] if len(names) == 1 else "PipelineLayer"

    def _require_rows(self, num_rows: int) -> None:
        planned = self._skeleton["schedule"].get("micro_batch_size")
        if planned is not None and planned != num_rows:
            raise PipelineError(
                f"the plan has schedule.micro_batch_size {planned}, and a micro-batch has {num_rows} rows"
            )

    def _require_supported(self, lowered: LoweredPlan, leaves: Mapping[int, Sequence[LeafSpec]]) -> None:
        require_supported(lowered.spec)
        weights = {
            number: {name: weight.shape for name, weight in self._weights_of(number).items()}
            for number in self._stages.numbers
        }
        outputs = {number: [(leaf.dtype, leaf.shape) for leaf in leaves[number]] for number in self._stages.numbers}
        require_fits(lowered, self.rank, weights, outputs)

    def _modules_of(
        self, lowered: LoweredPlan, boundaries: Mapping[int, tuple[Form, tuple[LeafSpec, ...]]]
    ) -> dict[int, ModuleStage]:
        weights = list(trained(self._layers).values())
        has_split = any(op.kind is OpKind.BACKWARD_WEIGHT for op in lowered.programs[self.rank])
        if has_split and any(hasattr(weight, "main_grad") for weight in weights):
            raise PipelineError("weights with main_grad need a schedule without W, such as 1f1b or interleaved")
        split = SplitBackward([self._layers], weights) if has_split else None
        modules: dict[int, ModuleStage] = {}
        for number in self._stages.numbers:
            form, outputs = boundaries[number]
            modules[number] = ModuleStage(
                number,
                self._stages.module(number),
                partial(self._stages.call, number),
                Boundaries(boundaries[number - 1][0] if number else None, form, outputs),
                self._stages.losses,
                self._weights_of(number),
                num_losses=1 if self._settings.delay_scale_loss else self.accumulate_steps,
                split=split,
            )
        return modules

    def _weights_of(self, number: int) -> dict[str, Tensor]:
        """The weights of a stage by the plan's names."""
        declared = declared_names(self._stages, number, self._skeleton)
        if declared is not None:
            return declared
        weights = trained(self._stages.module(number))
        names = names_in_plan(number, weights, self._ties)
        return {names[name]: weight for name, weight in weights.items()}

    def _share_start(self, world: StageWorld, lowered: LoweredPlan, modules: Mapping[int, ModuleStage]) -> None:
        """Give the copies of a shared weight the values of its first holder."""
        by_ranks = {each.ranks: each for each in world.collectives.values()}
        with paddle.no_grad():
            for holders in sorted(by_ranks):
                for number in sorted(modules):
                    for weight in lowered.weights_of(number, self.rank):
                        if lowered.shared_weights.places(number, weight.name) == holders:
                            by_ranks[holders].broadcast(modules[number].parameters[weight.name], holders[0])

    def _rank_of(self, lowered: LoweredPlan, framework: PaddleLayers, world: StageWorld) -> TrainRank:
        """This rank's machine and adapter for a plan."""
        own = cast(Framework, framework), cast(World, world)  # without optimizers
        backend = "nccl" if lowered.spec.run.device == "gpu" else "gloo"
        ring = ring_of_process(watch, lowered.graph, self.rank, self._ranks, backend, framework.arrays)
        return TrainRank(lowered, self.rank, *own, self._enter, is_proved=not self._unsafe, ring=ring)

    def _enter(self, step: int, op_id: int) -> None:
        if self._watch is not None:
            self._watch.enter(step, op_id)

    def _describe_op(self, op_id: int) -> Mapping[str, Any]:
        assert self._prepared is not None
        return self._prepared.current.describe(op_id)

    def _run(self, rank: TrainRank, data: StepData, *, whole: bool) -> Any:
        """Run one step of a plan and share its loss."""
        prepared = self._prepared
        assert prepared is not None
        step, self._step, prepared.current = self._step, self._step + 1, rank
        try:
            for stage in prepared.modules.values():
                stage.begin(data)
            rank.run(step)
            self._require_unended()
            return self._shared_loss(data, whole=whole) if data.computes_loss else None
        finally:
            rank.adapter.clear()
            for stage in prepared.modules.values():
                stage.begin(StepData())

    def _one_error(self) -> AbstractContextManager[None]:
        assert self._watch is not None, "``_prepare`` makes it"
        return self._failures.as_one(self._watch, Exception)

    def _require_unended(self) -> None:
        """Refuse the results of a step that another rank's failure ended: values of ended transfers are no results."""
        assert self._watch is not None
        self._failures.require_sound(self._watch.failure)

    def _shared_loss(self, data: StepData, *, whole: bool) -> Any:
        """The losses of all loss functions on every rank: one tensor, or a list of several.

        As with Fleet, ranks without the last stage have them as tensors of one dim.
        """
        assert self._prepared is not None
        world = self._prepared.world
        num_values, num_losses = 1 if whole else self.accumulate_steps, len(self._stages.losses)
        losses: list[Tensor] = []
        with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
            if self.rank == self._loss_rank:
                losses = [
                    self._total([data.losses[i][n] for i in sorted(data.losses)], whole=whole)
                    for n in range(num_losses)
                ]
            if world.everyone is not None:
                if losses:
                    parts = [
                        paddle.to_tensor([float(DTYPES.index(dtype_name(x.dtype)))], dtype="float64") for x in losses
                    ]
                    values = [loss.astype("float64").reshape([-1]) for loss in losses]
                    sent = paddle.concat([part for pair in zip(parts, values, strict=True) for part in pair])
                else:
                    sent = paddle.zeros([num_losses * (1 + num_values)], dtype="float64")
                world.everyone.broadcast(sent, self._loss_rank)
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
        return total / self.accumulate_steps if self._settings.delay_scale_loss else total

    def _optimizer_step(self, optimizer: Any, lr_scheduler: Any, scaler: Any) -> None:
        """Update the weights in Fleet's order: scaler, optimizer, gradients, learning rate."""
        if self._settings.delay_scale_loss:
            for weight in self._layers.parameters():
                if getattr(weight, "main_grad", None) is not None:
                    weight.main_grad = weight.main_grad.scale(1.0 / self.accumulate_steps)
                elif weight.grad is not None:
                    weight.grad = weight.grad.scale(1.0 / self.accumulate_steps)
        if scaler is not None:
            if self.num_ranks > 1 and scaler.is_enable() and "_unscale" not in vars(scaler):
                self._share_overflow()
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.clear_grad(set_to_zero=not self._settings.release_gradients)
        if lr_scheduler is not None:
            lr_scheduler.step()

    def _share_overflow(self) -> None:
        """Make gradients that are not finite on one rank so on all, so that all skip the same steps.

        ``fleet.distributed_scaler`` does it itself.
        """
        gradients = [w.grad for w in self._layers.parameters() if w.grad is not None]
        is_bad = any(not bool(paddle.isfinite(gradient).all()) for gradient in gradients)
        found = paddle.to_tensor([int(is_bad)], dtype="int32")
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found.item() and gradients and not is_bad:
            with paddle.no_grad():
                gradients[0].set_value(paddle.full_like(gradients[0], float("inf")))

    def _abort(self) -> None:
        if self._prepared is not None:
            self._prepared.world.abort()

    def close(self) -> None:
        """End the pipeline's watch. Its groups end with the process."""
        if self._prepared is not None and self._watch is not None:
            self._watch.close()


class _Prepared:
    """Parts that a pipeline has from its first batch on."""

    def __init__(
        self,
        plan: TrainedPlan,
        world: StageWorld,
        modules: dict[int, ModuleStage],
        framework: PaddleLayers,
        training: TrainRank,
    ) -> None:
        self.plan, self.world, self.modules, self.framework = plan, world, modules, framework
        self.training = self.current = training
        self.evaluation: TrainRank | None = None


def _require_placement(skeleton: Mapping[str, Any], stages: StageLayers, rank: int, num_ranks: int) -> None:
    """Refuse a schedule that has other stages on this rank than a ``PipelineLayer`` has built."""
    fix = "give Pipeline the list of layers, and each rank builds the stages of the plan"
    name, num_stages = skeleton["schedule"].get("kind"), len(stages.parts) - 1
    kind = SCHEDULE_KINDS.get(name)
    if kind is not None and kind.min_chunks * num_ranks > num_stages:
        raise PipelineError(
            f"the PipelineLayer has {num_stages} stages, and {name} has {kind.min_chunks} on each rank: {fix}"
        )
    placed = placement_of(skeleton, num_stages)
    if tuple(placed[rank]) != tuple(stages.numbers):
        raise PipelineError(
            f"the PipelineLayer has stages {list(stages.numbers)} on rank {rank}, and the schedule puts stages "
            f"{list(placed[rank])} there: {fix}"
        )


def _require_one_rank(placed: Sequence[Sequence[int]]) -> None:
    counts = Counter(number for own in placed for number in own)
    twice = next((number for number, count in counts.items() if count > 1), None)
    if twice is not None:
        raise PipelineError(f"the schedule has stage {twice} on several ranks, which pipeproof.paddle does not support")


def _require_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Refuse a clip by the norm of all weights that would see those of this rank alone."""
    clip = getattr(optimizer, "_grad_clip", None)
    if num_ranks > 1 and isinstance(clip, nn.ClipGradByGlobalNorm) and not is_fleet_optimizer(optimizer):
        raise PipelineError(
            "ClipGradByGlobalNorm would see the weights of one rank alone: wrap the optimizer with "
            "fleet.distributed_optimizer"
        )


def _on_host(value: Any) -> Any:
    if isinstance(value, paddle.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(item) for key, item in value.items()}
    return type(value)(_on_host(item) for item in value)
