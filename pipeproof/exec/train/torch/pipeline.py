"""``Pipeline``: a script's own modules, trained by a checked plan in the script's own processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.atomic_write import write_json
from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.monitor.plan_ring import PlanRing, ring_of_process
from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.exec.rank.op_log import Clock, LogEntry
from pipeproof.exec.rank.overlapped_pair import whole_pairs
from pipeproof.exec.rank.torch.cuda_graph import CaptureStream, TorchProgress
from pipeproof.exec.rank.torch.op_ranges import op_range
from pipeproof.exec.store.torch_store import TorchStore
from pipeproof.exec.train.agreement import Agreement
from pipeproof.exec.train.module_plan import (
    Request,
    complete_plan,
    forward_plan,
    given_plan,
    require_no_times,
    schedule_section,
)
from pipeproof.exec.train.pipeline_failures import PipelineFailures
from pipeproof.exec.train.stage_boundaries import common_dtype, kind_text
from pipeproof.exec.train.stall_watch import StallWatch
from pipeproof.exec.train.tied_weights import Tie, names_in_plan
from pipeproof.exec.train.torch.channel_groups import OrderedSums, connect_stages
from pipeproof.exec.train.torch.compare_reference import (
    Comparison,
    GradientDifference,
    compare_with_reference,
    default_names,
)
from pipeproof.exec.train.torch.data_parallel import (
    Replicas,
    ReplicatedStepEnd,
    groups_of,
    local_part,
)
from pipeproof.exec.train.torch.model_stages import ModelStages
from pipeproof.exec.train.torch.module_framework import TorchModules
from pipeproof.exec.train.torch.module_stage import (
    LossFunction,
    ModuleStage,
    StepData,
    trained,
)
from pipeproof.exec.train.torch.pipeline_start import (
    placed_stages,
    process_group,
    require_same_layouts,
    same_request,
    share_start,
    tied_layouts,
    trained_ties,
)
from pipeproof.exec.train.torch.replayed_step import ReplayedStep, require_replayable
from pipeproof.exec.train.torch.seams import at_seams
from pipeproof.exec.train.torch.split_linear import gradients_aside, require_splittable
from pipeproof.exec.train.torch.stage_facts import StageDescriber
from pipeproof.exec.train.torch.stage_values import joined_outputs, micro_batches
from pipeproof.exec.train.torch.store import device_of, store_of
from pipeproof.exec.train.train_errors import PipelineError
from pipeproof.exec.train.train_rank import TrainRank, checked_plan, require_fits, require_supported
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.torch.graph_capture import Compiler, KeptBytes

if TYPE_CHECKING:
    from pipeproof.exec.measure.limits_report import LimitsReport
    from pipeproof.exec.rank.framework_protocol import Framework, World
    from pipeproof.exec.train.torch.record_steps import StepRecord

Split = Literal["whole", "linear", "graph"]
_Start = TypeVar("_Start", bound=Callable[..., None])


def _reports_failure(start: _Start) -> _Start:
    """Make a failed start known to all ranks, those that wait in another phase of it included."""

    @wraps(start)
    def reporting(self: Pipeline, *args: Any, **kwargs: Any) -> None:
        try:
            start(self, *args, **kwargs)
        except BaseException as error:
            self._abandon(error)
            raise

    return cast("_Start", reporting)


class Pipeline:
    """The stages of this rank in a pipeline that runs a checked plan.

    Args:
        stages: the rank's stages by global stage number, or a ``ModelStages``, from which the rank keeps its own.
        plan: a plan file or a dict; without it, a plan is made of ``schedule`` and ``num_micro_batches``.
        schedule: a kind (``pipeproof schedule list``), a file of a written schedule (text or CSV), or the operations
            of each rank.
        num_micro_batches: number of micro-batches in a step.
        loss_fn: ``(output, target) -> scalar``, called on the last stage; None if the last module returns the loss.
        example: positional arguments of the first stage for one micro-batch, the same on all ranks. Boundaries are
            found with it; without it they are those that the plan declares.
        example_kwargs: keyword arguments that every stage gets, likewise.
        group: the ranks of the pipeline: a process group or a DeviceMesh dimension. Default: the world.
        data_group: the ranks that hold the same stages with other data; gradients are averaged over them. With
            ``fully_shard`` or DDP leave it out.
        split: ``whole``: a backward is one call, and W does nothing. ``linear``: W computes the weight gradients of
            ``nn.Linear``. ``graph``: F, I and W are three graphs of the stage, also where the schedule has B; a stage
            that cannot be captured uses ``linear``, with a warning (``splits``).
        compiler: what runs the graphs: ``inductor``, or ``eager``, which has the bits of ``whole``.
        profile: measure each stage's forward and backward on the example, as the times of the plan (``cost``).
        tied: weights that stages share, each as {stage: name in that stage}. All of them start with the values of the
            first stage.
        same_kwargs: names of keyword arguments that each micro-batch gets whole.
        scale_grads: whether loss and gradients are means over the micro-batches; else they are sums.
        check_finite: whether each output is tested for NaN and infinity, for which the host waits.
        replay: whether steps are replayed as one CUDA graph from the third on, which leaves the host no work. Shapes
            and values other than tensors must stay as they are, and no module may read a value on the host.
        overlap: whether the forward and the backward of an overlapped pair (of DualPipe, DualPipeV, 1F1B or interleaved
            1F1B) take turns at the seams of their modules, see ``seam``. Also by ``schedule.overlap`` of the plan.
        timeout_s: time without progress after which a report is printed and all ranks end.
        unsafe: train by a plan that is not proved.

    Raises:
        PlanRefused: the plan is not proved.
        PipelineError: the ranks do not fit together; every rank raises it, within the start-up.
    """

    @_reports_failure
    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        plan: str | Path | Mapping[str, Any] | None = None,
        schedule: str | Path | Sequence[Sequence[str]] = "1f1b",
        num_micro_batches: int | None = None,
        loss_fn: LossFunction | None = None,
        example: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        data_group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        split: Split = "whole",
        compiler: Compiler = "inductor",
        profile: bool = False,
        tied: Sequence[Tie] = (),
        same_kwargs: Sequence[str] = (),
        scale_grads: bool = True,
        check_finite: bool = False,
        replay: bool = False,
        overlap: bool = False,
        timeout_s: float = 600.0,
        unsafe: bool = False,
    ) -> None:
        pipeline_group = self._process_group = process_group(group)
        store = store_of(pipeline_group)
        ranks = dist.get_process_group_ranks(pipeline_group)
        self.rank, self.num_ranks = ranks.index(dist.get_rank()), len(ranks)
        self._store = store
        self._agreement = agreement = Agreement(TorchStore(store), self.rank, self.num_ranks, timeout_s)
        self._same_kwargs, self._scale_grads, self._loss_fn = frozenset(same_kwargs), scale_grads, loss_fn
        self._compiler = compiler
        shards = None if data_group is None else process_group(data_group)

        def request() -> dict[str, Any]:
            if split not in ("whole", "linear", "graph"):
                raise PipelineError(f"split is {split!r}: use 'whole', 'linear' or 'graph'")
            if compiler not in ("inductor", "eager"):
                raise PipelineError(f"compiler is {compiler!r}: use 'inductor' or 'eager'")
            if timeout_s <= 0:
                raise PipelineError(f"timeout_s is {timeout_s}: give a number of seconds")
            if not isinstance(stages, Mapping):
                raise PipelineError(
                    f"`stages` is {kind_text(stages)}: give this rank's modules by stage, {{number: module}}"
                )
            numbers, modules = list(stages), list(stages.values())
            if not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise PipelineError(f"`stages` has the keys {numbers}: they are numbers of stages, from 0")
            if not modules or not all(isinstance(module, nn.Module) for module in modules):
                raise PipelineError("give this rank at least one stage: stages={number: module}")
            replicas = [Replicas(number, module, shards) for number, module in stages.items()]
            sizes = {each.size for each in replicas}
            if len(sizes) > 1:
                raise PipelineError(f"stages of one rank have {sorted(sizes)} replicas: all need the same number")
            device = device_of(modules, allow_meta=True)
            if replay:
                require_replayable(device, is_sharded=any(each.is_sharded for each in replicas), reads=check_finite)
            return {
                "request": asdict(
                    Request(
                        None if plan is None else given_plan(plan),
                        schedule_section(schedule),
                        num_micro_batches,
                        "torch",
                        "gpu" if device.type == "cuda" else "cpu",
                        common_dtype(weight for module in modules for weight in module.parameters()) or "float32",
                        self.num_ranks,
                        sizes.pop(),
                        overlap,
                    )
                ),
                "settings": {
                    "split": split,
                    "compiler": compiler,
                    "profile": profile,
                    "same_kwargs": sorted(same_kwargs),
                    "scale_grads": scale_grads,
                    "replay": replay,
                    "overlap": overlap,
                    "unsafe": unsafe,
                },
                "whole": len(stages) if isinstance(stages, ModelStages) else None,
                "stages": sorted(stages),
                "tied": [*trained_ties(stages), *map(dict, tied)],
            }

        answers = agreement.gather("request", request)
        asked = same_request(answers)
        every_stage = sorted({number for other in answers for number in other["stages"]})
        by_rank = () if isinstance(stages, ModelStages) else [other["stages"] for other in answers]

        def sizes() -> dict[str, Any]:
            made = asked.skeleton(len(every_stage), by_rank)
            if profile:
                require_no_times(made)
            return made

        skeleton = agreement.gather("sizes", sizes)[0]
        placed = agreement.gather("placement", lambda: placed_stages(answers, every_stage, skeleton))[0]
        own = placed[self.rank]
        self.stages: dict[int, nn.Module] = {number: stages[number] for number in own}
        self.num_stages = len(every_stage)
        tied = [{int(number): str(name) for number, name in names.items()} for names in answers[0]["tied"]]

        def own_modules() -> list[str]:
            self._device = device_of(self.stages.values())
            return tied_layouts(self.stages, tied)

        layouts = agreement.gather("modules", own_modules)
        agreement.gather("tied weights", lambda: require_same_layouts(tied, layouts))
        self._replicas = {n: Replicas(n, module, shards) for n, module in self.stages.items()}
        agreement.gather("split", lambda: self._require_splittable(split))

        describer = StageDescriber(
            agreement, self.rank, self.num_stages, self._replicas, self._device, split != "whole", profile
        )
        facts, boundaries, num_rows, seq_lengths = describer.describe(example, example_kwargs or {}, placed, skeleton)
        content = complete_plan(skeleton, facts, tied, num_rows, seq_lengths)
        self.num_micro_batches: int = content["schedule"]["num_micro_batches"]
        self.micro_batch_size = num_rows
        self.plan = checked_plan(content, agreement, "plan", unsafe=unsafe)
        lowered = self.plan.lowered
        require_supported(lowered.spec)
        self._takes_turns = lowered.spec.schedule.turns is not None or overlap
        if self._takes_turns and not any(whole_pairs(lowered.graph, rank) for rank in range(self.num_ranks)):
            raise PipelineError(
                "overlap=True, and no computations of the schedule overlap: use kind 1f1b, interleaved, dualpipe or "
                "dualpipe_v, or a file with pairs"
            )
        splitting = (
            {op.stage for op in lowered.programs[self.rank] if op.kind is OpKind.BACKWARD_WEIGHT}
            if split != "whole"
            else set()
        )

        def make_stages() -> None:
            self._modules = {
                number: ModuleStage(
                    number, self._replicas[number].call(), boundaries[number], loss_fn,
                    names_in_plan(number, trained(self._replicas[number].call()), tied),
                    num_losses=self.num_micro_batches if scale_grads else 1,
                    splits=number in splitting, check_finite=check_finite,
                    compiler=compiler if split == "graph" else None, is_sharded=self._replicas[number].is_sharded,
                )
                for number in own
            }  # fmt: skip
            weights = {n: {name: w.shape for name, w in stage.parameters.items()} for n, stage in self._modules.items()}
            outputs = {n: [(spec.dtype, spec.shape) for spec in boundaries[n].outputs] for n in own}
            require_fits(lowered, self.rank, weights, outputs)

        watched = agreement.of_thread()  # while rank 0, which serves it, is here
        agreement.gather("connecting", make_stages)
        self._world = connect_stages(
            lowered.graph, self.rank, self._device, dist.PrefixStore("channels/", self._store), pipeline_group,
            timeout_s, by_copies=lowered.spec.transport.send_recv == "copy_engine",
        )  # fmt: skip
        self._failures = PipelineFailures(agreement, self._world.abort)
        share_start(self._world, lowered, self._modules, self.rank)
        self._framework = TorchModules(self._device, self._modules)
        self._progress = TorchProgress() if self._device.type == "cuda" else None
        self._train = self._replayed = self._rank_of(lowered)
        self._replay: ReplayedStep | None = None
        if replay:
            self._replay = ReplayedStep(self._trained_by_name, CaptureStream(self._device))
        self._eval: TrainRank | None = None
        self._current = self._train
        self._watch = StallWatch(
            watched, timeout_s, lambda op_id: self._current.describe(op_id), self._world.abort,
            None if self._progress is None else self._progress.read,
        )  # fmt: skip
        self._step = 0
        self._record: StepRecord | None = None

    def _abandon(self, error: BaseException) -> None:
        """Report why the start failed, and end what it began."""
        known = isinstance(error, PipelineError) and error.is_reported
        text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        if hasattr(self, "_agreement"):
            with contextlib.suppress(Exception):
                self._agreement.fail(text if known else f"rank {self.rank}: {text}")
        if hasattr(self, "_world"):
            self._world.abort()
        if hasattr(self, "_watch"):
            self._watch.close()

    @property
    def _has_copies(self) -> bool:
        return self.plan.lowered.has_copies

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage, which gets the positional arguments of a step."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which gets the target and returns the loss."""
        return self.num_stages - 1 in self.stages

    @property
    def splits(self) -> dict[int, str]:
        """The split of each stage of this rank: ``whole``, ``linear`` or ``graph``.

        A reason follows where a stage cannot run as graphs: ``linear: it communicates ..``. Stages are captured in the
        first step.
        """
        return {number: stage.split for number, stage in self._modules.items()}

    @property
    def kept_bytes(self) -> dict[int, list[KeptBytes]]:
        """Memory that one forward keeps, of the stages of this rank that run as graphs: of each graph, after a step."""
        return {number: list(stage.kept) for number, stage in self._modules.items() if stage.split == "graph"}

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        losses: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Run forward and backward of all micro-batches; gradients are added to ``.grad`` of the parameters.

        ``args`` are needed where the first stage is, ``target`` where the last is; tensors are split into micro-batches
        along their first dim. ``kwargs`` go to every stage of this rank. ``scaler`` scales the loss, and an
        overflow on one rank becomes one on all, so that all skip the same steps. ``losses`` collects those of
        micro-batches.

        Returns the mean loss (the sum without ``scale_grads``) where the last stage is, else None.

        Raises:
            PipelineError: a module raised on some rank, or the data does not fit; every rank raises it.
        """
        if scaler is not None and scaler.is_enabled():
            scaler.scale(torch.zeros((), device=self._device))  # begins it also where no loss is
        with self._one_error():
            data = self._run(self._train, args, target, kwargs, scaler)
            if scaler is not None and scaler.is_enabled():
                with self._watch.calling("the exchange of overflows"):
                    self._share_overflow()
            found = self._losses_of(data)
        if losses is not None:
            losses.extend(found)
        loss = self._loss_of(found)
        if self._record is not None:
            gradients = {name: value for (_, name), value in self._tensors("gradients", planned=True).items()}
            arrays = {name: self._framework.arrays.to_numpy(value) for name, value in gradients.items()}
            self._record.put(self._step - 1, None if loss is None else float(loss), arrays)
        return loss

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run the forwards alone. Modules keep their mode: call ``eval()`` on them for evaluation.

        Returns, where the last stage is, the mean loss if there is a target, else the output of all rows; else None.
        """
        with torch.no_grad(), self._one_error():
            if self._eval is None:
                content = forward_plan(self.plan.content, self.plan.lowered.programs)
                is_unsafe = bool(self.plan.findings)
                plan = checked_plan(content, self._agreement, "forward plan", unsafe=is_unsafe, warns=False)
                self._eval = self._rank_of(plan.lowered)
            data = self._run(self._eval, args, target, kwargs, None)
            for replicas in self._replicas.values():
                replicas.reshard()
            torch.clear_autocast_cache()  # it may hold casts without a graph
            losses = [] if data.outputs else self._losses_of(data)
        if data.outputs:
            return joined_outputs([data.outputs[index] for index in sorted(data.outputs)])
        return self._loss_of(losses)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their common norm is at most ``max_norm``; return the norm.

        On any topology the norm has the bits of ``torch.nn.utils.clip_grad_norm_`` on the whole model, which would see
        this rank alone. A weight that several stages share counts once.
        """
        if norm_type != 2.0:
            raise PipelineError("only the 2-norm is summed over the ranks")
        with self._one_error():
            total = self._total_norm()
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for weight in self._parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)
        return total

    def _total_norm(self) -> torch.Tensor:
        """The 2-norm of the gradients of all stages."""
        lowered = self.plan.lowered
        every = (w.name for n in range(self.num_stages) for w in lowered.weights_of(n, lowered.holders[n][0]))
        position = {name: index for index, name in enumerate(dict.fromkeys(every))}
        dtype = torch.float64 if lowered.spec.run.dtype == "float64" else torch.float32
        norms = torch.zeros(len(position), dtype=dtype, device=self._device)
        for name, weight in self._counted().items():
            gradient = weight.grad.coalesce().values() if weight.grad.is_sparse else weight.grad
            norm = torch.linalg.vector_norm(gradient, dtype=dtype)
            norms[position[name]] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        with self._watch.calling("clip_grad_norm_"):
            dist.all_reduce(norms, group=self._process_group)  # exact: each is on one rank, and zero on all others
        return torch.linalg.vector_norm(norms)

    def _require_splittable(self, split: str) -> None:
        for number, replicas in self._replicas.items():
            if split == "linear":
                require_splittable(number, replicas.call(), is_sharded=replicas.is_sharded)

    def _rank_of(self, lowered: LoweredPlan, channels: Any = None, clock: Clock | None = None) -> TrainRank:
        """This rank's machine and adapter for a plan, with other channels and another clock if they are given."""
        own = self._world if channels is None else replace(self._world, channels=channels)
        step_end = partial(ReplicatedStepEnd, self._replicas)
        framework, world = cast("Framework", self._framework), cast("World", own)  # without optimizers
        return TrainRank(
            lowered, self.rank, framework, world, self._enter, step_end, clock, is_proved=not self.plan.findings,
            seams=at_seams if self._takes_turns and channels is None else None, annotate=op_range,
            ring=None if channels is not None else self._ring_of(lowered),
        )  # fmt: skip

    def _ring_of(self, lowered: LoweredPlan) -> PlanRing | None:
        """The ring of this process for a plan, if it is watched."""
        ranks = dist.get_process_group_ranks(self._process_group)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return ring_of_process(watch, lowered.graph, self.rank, ranks, backend, self._framework.arrays)

    def _enter(self, step: int, op_id: int) -> None:
        self._entered = op_id
        progress = self._progress if self._current is self._train else None
        self._watch.enter(step, op_id, on_device=progress is not None)
        if progress is not None:
            progress.write(op_id)

    def _run(
        self, rank: TrainRank, args: Sequence[Any], target: Any, kwargs: Mapping[str, Any],
        scaler: torch.amp.GradScaler | None,
    ) -> StepData:  # fmt: skip
        """Run the next step of a plan, or replay it."""
        step, self._step, self._current = self._step, self._step + 1, rank
        if rank is self._train and self._progress is not None:
            self._progress.begin(step)

        def execute(values: tuple[Sequence[Any], Any, Mapping[str, Any]]) -> StepData:
            return self._execute(rank, step, *values, scaler)

        values = (args, target, kwargs)
        if self._replay is None or rank is not self._replayed:
            return execute(values)
        if scaler is not None and scaler.is_enabled():
            raise PipelineError("replay=True: a GradScaler changes between steps: use bfloat16, or replay=False")
        data = self._replay.run(values, execute)
        if self._replay.is_captured:
            self._watch.enter(step, self._entered, on_device=True)
        return data

    def _execute(
        self, rank: TrainRank, step: int, args: Sequence[Any], target: Any, kwargs: Mapping[str, Any],
        scaler: torch.amp.GradScaler | None,
    ) -> StepData:  # fmt: skip
        """Execute one step, operation by operation."""
        try:
            data = self._step_data(args, target, kwargs, scaler, is_training=rank is self._train)
            if rank is not self._eval:
                self._require_trainable()
            versions = self._versions()
            for stage in self._modules.values():
                stage.begin(data)
            for replicas in self._replicas.values():
                replicas.begin()
            rank.run(step)
            self._require_unchanged(versions)
        finally:
            rank.adapter.clear()
            for stage in self._modules.values():
                stage.end()
        return data

    def _one_error(self) -> AbstractContextManager[None]:
        return self._failures.as_one(self._watch, RuntimeError, self._note_operation)

    def _note_operation(self) -> None:
        """Show the operation that raised, which a GPU may have left behind, as that of this rank."""
        if self._current.op_id >= 0 and not self._watch.is_calling:
            self._watch.enter(self._step - 1, self._current.op_id)

    def _step_data(
        self, args: Sequence[Any], target: Any, kwargs: Mapping[str, Any], scaler: torch.amp.GradScaler | None,
        *, is_training: bool,
    ) -> StepData:  # fmt: skip
        """Split what the script passed into micro-batches.

        Raises:
            PipelineError: something is missing, or its rows do not fit the plan.
        """
        num, data = self.num_micro_batches, StepData(scaler=scaler)
        if self.is_first:
            if not args and self._modules[0].takes_arguments:
                raise PipelineError("this rank has the first stage: pass its arguments to step()")
            self._require_rows(args)
            data.args = micro_batches(tuple(args), num, "args") if args else [()] * num
        if kwargs:
            whole = {name: value for name, value in kwargs.items() if name in self._same_kwargs}
            parts = {n: micro_batches(value, num, n) for n, value in kwargs.items() if n not in whole}
            data.kwargs = [{**whole, **{n: part[index] for n, part in parts.items()}} for index in range(num)]
        if self.is_last:
            if target is not None:
                data.targets = micro_batches(target, num, "target")
            elif self._has_copies and not is_training:
                raise PipelineError("copies of the last stage share the micro-batches: pass `target` to eval_step()")
            elif self._loss_fn is not None and is_training:
                raise PipelineError("this rank has the last stage: pass `target` to step()")
        return data

    def _require_trainable(self) -> None:
        """Refuse a step without gradients, and parameters that the plan does not have: no norm would count them.

        Raises:
            PipelineError: names the stage and the parameter.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "step() runs backwards, and gradients are disabled (torch.no_grad or inference_mode): use eval_step()"
            )
        for number, stage in self._modules.items():
            planned = {id(weight) for weight in stage.parameters.values()}
            for name, weight in stage.module.named_parameters():
                if weight.requires_grad and id(weight) not in planned and not self._replicas[number].is_sharded:
                    raise PipelineError(
                        f"stage {number}: parameter {name} was frozen when the Pipeline was made, or is another object "
                        "than then: make a new Pipeline after changes of requires_grad, and load values with copy_ "
                        "(load_state_dict without assign=True)"
                    )

    def _require_rows(self, args: Sequence[Any]) -> None:
        expected = self.num_micro_batches * self.micro_batch_size
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] != expected:
                raise PipelineError(
                    f"argument {position} of the step has {value.shape[0]} rows, and the plan has "
                    f"{self.num_micro_batches} micro-batches of {self.micro_batch_size} rows, as the example has: pass "
                    f"{expected} rows"
                )

    @contextlib.contextmanager
    def _without_replay(self) -> Iterator[None]:
        """Run steps operation by operation: a replay would write to the gradients that are put aside."""
        replay, self._replay = self._replay, None
        try:
            yield
        finally:
            self._replay = replay

    def _trained_by_name(self) -> dict[str, nn.Parameter]:
        return {f"{n}.{name}": w for n, stage in self._modules.items() for name, w in trained(stage.module).items()}

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return [*{id(weight): weight for stage in self.stages.values() for weight in stage.parameters()}.values()]

    def _versions(self) -> list[int]:
        """Numbers of writes of all parameters, which an optimizer inside of a step would raise."""
        if any(each.is_sharded for each in self._replicas.values()):
            return []  # fully_shard writes gathered weights
        return [weight._version for weight in self._parameters()]  # noqa: SLF001

    def _require_unchanged(self, versions: Sequence[int]) -> None:
        if versions and list(versions) != self._versions():
            raise PipelineError(
                "parameters changed inside of step(): later micro-batches used other weights; step the optimizer after "
                "Pipeline.step (not in a hook), and keep what a forward itself updates in buffers"
            )

    def _share_overflow(self) -> None:
        """Make gradients that are not finite on one rank so on all, without waiting for the device."""
        gradients = [weight.grad for weight in self._parameters() if weight.grad is not None]
        local = [part for part in map(local_part, gradients) if part.numel()]
        bad = torch.zeros((), device=self._device)
        for part in local:
            bad = torch.maximum(bad, part.isfinite().all().logical_not().float())
        for group in (*groups_of(gradients), self._process_group):  # first over the shards of this rank's stages
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
        factor = torch.where(bad > 0, float("inf"), 1.0)
        for dtype in {part.dtype for part in local}:  # one element of each, as each optimizer looks at its own
            firsts = [part[(0,) * part.dim()] for part in local if part.dtype == dtype]
            torch._foreach_mul_(firsts, factor.to(dtype))

    def _losses_of(self, data: StepData) -> list[torch.Tensor]:
        """The losses of all micro-batches where the last stage is, in order; copies of it share the micro-batches."""
        if not self._has_copies or not self.is_last:
            return [data.losses[index] for index in sorted(data.losses)]
        group = next(each for each in self._world.collectives.values() if self._is_of_last(each))
        own = torch.zeros(self.num_micro_batches, dtype=torch.float64, device=self._device)
        for index, loss in data.losses.items():
            own[index] = loss
        dtype = next(iter(data.losses.values())).dtype
        return list(group.reduce(own, "sum").to(dtype))

    def _is_of_last(self, sums: OrderedSums) -> bool:
        return sums.members == self.plan.lowered.holders[-1]

    def _loss_of(self, losses: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if not losses:
            return None
        total = torch.stack(list(losses)).sum()
        return total / len(losses) if self._scale_grads else total

    def _counted(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients this rank counts in a norm, by the plan's names.

        Shared ones count on their first holder.
        """
        shared, lowered = self.plan.lowered.shared_weights, self.plan.lowered
        return {
            weight.name: stage.parameters[weight.name]
            for number, stage in self._modules.items()
            for weight in lowered.weights_of(number, self.rank)
            if shared.places(number, weight.name)[0] == self.rank and stage.parameters[weight.name].grad is not None
        }

    def compare(
        self,
        reference: nn.Module | None,
        *args: Any,
        target: Any = None,
        name_of: Callable[[int, str], str] | None = None,
        **kwargs: Any,
    ) -> Comparison:
        """Run one step, and compare its loss and every gradient with those of the unpartitioned module.

        The first rank of the pipeline needs the ``reference``, and all arguments of the step; the reference gets the
        pipeline's weights, and runs the micro-batches one by one in the plan's order. ``name_of`` gives the reference's
        name of a stage's parameter, where it is neither the same name nor ``stage.name``. Gradients that were there
        before are put back. Dropout draws other numbers in the reference: compare without.
        """
        with gradients_aside(self._parameters()), self._without_replay():
            loss = self.step(*args, target=target, **kwargs)
            own = {
                "loss": None if loss is None else float(loss),
                "compiled": self._compiler == "inductor" and "graph" in self.splits.values(),
                "weights": self._tensors("weights"),
                "gradients": self._tensors("gradients"),
                "received": [
                    (number, name)
                    for number, stage in self._modules.items()
                    for name, weight in trained(stage.module).items()
                    if weight.grad is not None
                ],
            }
        shards: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        first = dist.get_process_group_ranks(self._process_group)[0]
        dist.gather_object(own, shards, dst=first, group=self._process_group)

        def compared() -> dict[str, Any] | None:
            if shards is None:
                return None
            if reference is None:
                raise PipelineError("the first rank of the pipeline needs the reference module")
            found = compare_with_reference(
                reference, self.plan.lowered, shards, args, target, kwargs, self._loss_fn,
                name_of or default_names(reference), is_mean=self._scale_grads,
                is_compiled=any(shard["compiled"] for shard in shards),
            )  # fmt: skip
            return asdict(found)

        result = self._agreement.gather(f"comparison {self._step}", compared)[0]
        differences = tuple(GradientDifference(**each) for each in result["differences"])
        without_gradient = tuple(result["without_gradient"])
        return Comparison(**{**result, "differences": differences, "without_gradient": without_gradient})

    @contextlib.contextmanager
    def record(self, directory: str | Path) -> Iterator[None]:
        """Record the steps of this block into a directory that does not exist.

        ``pipeproof check --log DIRECTORY/messages`` reads the messages, ``pipeproof state align`` the losses and
        gradients in ``DIRECTORY/values``.
        """
        from pipeproof.exec.train.torch.record_steps import RecordedChannels, StepRecord
        from pipeproof.interop.traces.recorder import Recorder
        from pipeproof.interop.traces.torch_calls import version_of

        folder, lowered = Path(directory), self.plan.lowered
        ranks = dist.get_process_group_ranks(self._process_group)
        version = f"torch {torch.__version__}"
        recorder = Recorder(folder / "messages", dist.get_rank(), dist.get_world_size(), version, version_of)
        channels = RecordedChannels(self._world.channels, recorder, lowered.graph, self.rank, ranks)
        values = folder if ranks[0] == 0 else folder / f"from rank {ranks[0]}"
        self._record = StepRecord(values, lowered, self.plan.certificate.graph_digest, self.rank, self._process_group)
        usual, self._train = self._train, self._rank_of(lowered, channels)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._train, self._record = usual, None
            recorder.close(error)

    def profile(
        self, file: str | Path, *args: Any, target: Any = None, num_steps: int = 5, **kwargs: Any
    ) -> LimitsReport:
        """Run some steps with timed operations and messages; write them for ``cost: {profile: FILE}`` of the plan.

        ``pipeproof simulate`` then predicts with measured times. Weights and gradients are left as they are. One more
        step counts the FLOPs.

        Returns the limits of a step on all ranks; ``print`` shows them as a table.
        """
        from pipeproof.exec.measure.limits_report import LimitsReport
        from pipeproof.exec.rank.torch.op_timing import timed_channels
        from pipeproof.exec.train.torch.count_products import ProductCounter
        from pipeproof.exec.train.torch.profile_steps import profile_steps

        channels, clock = timed_channels(self._world.channels, self._device)
        usual, timed = self._train, self._rank_of(self.plan.lowered, channels, clock)
        counter = ProductCounter()

        def count() -> list[LogEntry]:
            self._train = self._rank_of(self.plan.lowered, clock=counter)
            with counter.counting():
                self.step(*args, target=target, **kwargs)
            return self._train.adapter.log

        def run() -> list[LogEntry]:
            self._train = timed
            self.step(*args, target=target, **kwargs)
            return list(clock.timed_entries(timed.adapter.log))

        try:
            with gradients_aside(self._parameters()):
                found = profile_steps(
                    timed, clock, self._world, self._device, self.plan, self._agreement, counter, count, run,
                    f"profile {self._step}", num_steps,
                )  # fmt: skip
        finally:
            self._train = usual
            channels.close()
        if self.rank == 0:
            write_json(Path(file), found.to_json())
        return LimitsReport(found)

    def _tensors(self, what: Literal["weights", "gradients"], *, planned: bool = False) -> dict[tuple[int, str], Any]:
        """Whole copies on the CPU of this rank's weights or their gradients, by stage and name (the plan's name)."""
        found: dict[tuple[int, str], torch.Tensor] = {}
        for number, stage in self._modules.items():
            weights = stage.parameters if planned else trained(stage.module)
            for name, weight in weights.items():
                tensor = weight if what == "weights" else weight.grad
                if tensor is None:
                    tensor = torch.zeros_like(weight)
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[number, name] = whole.detach().cpu().clone()
        return found

    def close(self) -> None:
        """End the pipeline's thread. Its groups end with the process."""
        self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
