"""``Pipeline``: a script's own modules, trained by a checked plan in the script's own processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.exec.rank.pipeline_failures import one_failure
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.comparison import Comparison
from pipeproof.exec.train.module_plan import Modules
from pipeproof.exec.train.plan_layers import Tie
from pipeproof.exec.train.stage_edges import Edges
from pipeproof.exec.train.torch.compare_reference import compare_step
from pipeproof.exec.train.torch.model_stages import StaleModel
from pipeproof.exec.train.torch.module_stage import LossFunction
from pipeproof.exec.train.torch.stage_keywords import StepInputs
from pipeproof.exec.train.torch.stage_values import joined_outputs
from pipeproof.exec.train.torch.start_phases import (
    Settings,
    Split,
    connect,
    infer,
    join,
    place,
    prove,
)
from pipeproof.exec.train.torch.step_inputs import SplitRules
from pipeproof.exec.train.torch.step_loss import LossOn, Normalize
from pipeproof.exec.train.torch.step_runner import StepRunner
from pipeproof.stages.torch.graph_capture import Compiler, KeptBytes

if TYPE_CHECKING:
    from pipeproof.specs.profile_file import Profile


class Pipeline:
    """The stages of this rank in a pipeline that runs a checked plan.

    Args:
        stages: the rank's stages by global stage number, or a ``ModelStages``, from which the rank keeps its own.
        plan: a plan file or a dict; without it, a plan is made from ``schedule`` and ``num_micro_batches``.
        schedule: a kind (``pipeproof schedule list``), a file of a written schedule (text or CSV), or the operations
            of each rank.
        num_micro_batches: number of micro-batches in a step.
        loss_fn: ``(output, target, **loss_kwargs) -> scalar``, called on the last stage; None if the last module
            returns the loss. It may be ``(scalar, metrics)``, with a dict of tensors, or as ``normalize`` needs.
        example: positional arguments of the first stage for one micro-batch, the same on all ranks: the boundaries are
            inferred from it. Steps may have other sizes.
        example_kwargs: keyword arguments of the stages for one micro-batch, also the same on all ranks. A stage gets
            the arguments that its forward accepts.
        example_stage_kwargs: keyword arguments of single stages for one micro-batch, by stage number.
        group: the ranks of the pipeline: a process group or a DeviceMesh dimension. Default: the world.
        data_group: the ranks that hold the same stages with other data; gradients are averaged over them. Leave it out
            with ``fully_shard`` or DDP.
        split: ``whole``: a backward is one call, and W does nothing. ``linear``: W computes the weight gradients of
            ``nn.Linear``. ``graph``: F, I and W are three graphs of the stage, also where the schedule has B; a stage
            that cannot be captured uses ``linear``, with a warning (``splits``).
        compiler: the compiler of the graphs: ``inductor``, or ``eager``, which gives the bits of ``whole``.
        tied: weights that stages share, each as {stage: name in that stage}. All of them start with the values of the
            first stage.
        edges: tensors for stages after the next one, as {name: (producer, consumers)}: ``{"skip": (0, [3])}``. The
            producer returns the tensor in a dict under its name, or as its whole output; consumers take it as a keyword
            argument. Stages between pass it on; ``(0, [3], "direct")`` sends it past them.
        modules: parts of the model with ranks and replicas of their own, such as ``{"vision": {"stages": [0, 0], "dp":
            2, "frozen": True}, "language": {"stages": [1, 2]}}``, with the keys of the plan's ``modules``.
        split_dims: dims of the rows, where they are not the first, by names of arguments: {"position_ids": 1}. A path
            names a value inside of an argument ("batch.positions"), ``target`` the target. The size of the dim is the
            number of rows, or a multiple of it.
        same_kwargs: names of arguments, or paths, whose whole value each micro-batch gets.
        check_inputs: whether each step compares digests of the arguments on all ranks. The host reads all of them.
        scale_grads: whether loss and gradients are means over the micro-batches; otherwise sums.
        normalize: ``micro_batches``: see ``scale_grads``. ``tokens``: ``loss_fn`` returns a sum and its count,
            ``(sum, count)`` or ``(sum, count, metrics)``; sums, gradients and counts are added over all micro-batches
            and data ranks, then loss and gradients are divided by the total count.
        loss_on: ``last``: only the rank of the last stage gets the loss of a step. ``all``: every rank gets it, in
            float32, or in float64 if weights are float64.
        check_finite: whether each output is tested for NaN and infinity; the host waits for each test.
        replay: whether steps are replayed as CUDA graphs, one for each signature from its third step on, without work
            for the host. No module may read a value on the host.
        overlap: whether the forward and the backward of an overlapped pair (of DualPipe, DualPipeV, 1F1B or interleaved
            1F1B) alternate at the overlap points of their modules, see ``overlap_point``. ``schedule.overlap`` of the
            plan also sets it.
        timeout_s: time without progress after which a report is printed and all ranks end.
        unsafe: train by a plan that is not proved.

    Raises:
        PlanRefused: the plan is not proved.
        PipelineError: the ranks do not fit together; every rank raises it, within the start-up.
    """

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
        example_stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        data_group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        split: Split = "whole",
        compiler: Compiler = "inductor",
        tied: Sequence[Tie] = (),
        edges: Edges | None = None,
        modules: Modules | None = None,
        split_dims: Mapping[str, int] | None = None,
        same_kwargs: Sequence[str] = (),
        check_inputs: bool = False,
        scale_grads: bool = True,
        normalize: Normalize = "micro_batches",
        loss_on: LossOn = "last",
        check_finite: bool = False,
        replay: bool = False,
        overlap: bool = False,
        timeout_s: float = 600.0,
        unsafe: bool = False,
    ) -> None:
        settings = Settings(
            plan, schedule, num_micro_batches, loss_fn,
            StepInputs(() if example is None else example, None, example_kwargs or {}, example_stage_kwargs or {}),
            split, compiler, tied, edges or {}, modules or {},
            SplitRules(split_dims or {}, frozenset(same_kwargs)), check_inputs,
            scale_grads, normalize, loss_on, check_finite, replay, overlap, timeout_s, unsafe,
        )  # fmt: skip
        ranks = join(group, timeout_s)
        with one_failure(ranks.agreement) as undo:
            placed = place(ranks, settings, stages, data_group)
            planned = infer(ranks, settings, placed)
            proved = prove(ranks, settings, planned)
            connected = connect(ranks, settings, placed, planned, proved, undo)
            self._runner = StepRunner(ranks, settings, placed, planned, proved, connected)
        self.rank, self.num_ranks = ranks.rank, ranks.num_ranks
        self.stages, self.num_stages = placed.stages, placed.num_stages
        self._cut_model = StaleModel(placed.stages, placed.num_stages)
        self.plan, self.micro_batch_size = proved, planned.num_rows
        self.num_micro_batches: int = planned.content["schedule"]["num_micro_batches"]

    @classmethod
    def tuned(cls, model: nn.Module, **arguments: Any) -> Pipeline:
        """The pipeline of the layout that ``tune`` chooses for a model; ``arguments`` go to ``tune``.

        Raises:
            PipelineError: no layout is possible, see ``tune``.
        """
        made: Pipeline = import_module("pipeproof.exec.train.torch.tune").tuned(cls, model, **arguments)
        return made

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

        If a stage cannot run as graphs, a reason follows: ``linear: it communicates ..``. Stages are captured in the
        first step.
        """
        return {number: stage.split for number, stage in self._runner.modules.items()}

    @property
    def kept_bytes(self) -> dict[int, list[KeptBytes]]:
        """Memory that a forward keeps in each graph, by stage of this rank that runs as graphs; known after a step."""
        return {number: list(stage.kept) for number, stage in self._runner.modules.items() if stage.split == "graph"}

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        losses: list[torch.Tensor] | None = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        metrics: dict[str, list[torch.Tensor]] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Run forward and backward of all micro-batches; gradients are added to ``.grad`` of the parameters.

        The first stage's rank needs ``args``, the last stage's rank ``target``. A stage gets the ``kwargs`` that its
        forward accepts, and its own ``stage_kwargs``. ``step(**batch)`` takes ``input_ids`` for the first stage, and
        ``labels`` as the target. Tensors whose first dim is the rows are split into micro-batches, scalars are shared,
        and other values need ``split_dims``, ``same_kwargs`` or ``MicroBatches``. All sizes may differ from step to
        step. ``scaler`` scales the loss; an overflow on one rank becomes an overflow on all, and all skip the same
        steps. On the last stage's rank, ``losses`` collects the losses of micro-batches, and ``metrics`` for each name
        the tensors of micro-batches.

        ``loss_kwargs`` are keyword arguments of ``loss_fn``, split like the others. ``num_items_in_batch`` is the
        number of labels of the whole step and of all data ranks. With it ``loss_fn`` divides a sum by it: losses and
        gradients of micro-batches and data ranks are added, not averaged.

        Returns the loss of the step on the last stage's rank, or on all ranks with ``loss_on="all"``, else None. It is
        the mean over micro-batches, unless ``scale_grads`` or ``normalize`` changes that.

        Raises:
            PipelineError: a module raised on some rank, or the data does not fit; every rank raises it. If its
                ``leaves_usable`` is True, nothing was posted, and other steps may follow.
        """
        runner = self._runner
        if scaler is not None and scaler.is_enabled():
            scaler.scale(torch.zeros((), device=runner.device))  # initialises it on ranks without a loss, too
        self._cut_model.is_stale = True
        with runner.one_error():
            inputs = StepInputs(args, target, kwargs, stage_kwargs or {}, loss_kwargs or {})
            loss, terms = runner.step(inputs, scaler)
        terms.collect(losses, metrics)
        return loss

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        metrics: dict[str, list[torch.Tensor]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run only the forwards. Modules keep their mode: call ``eval()`` on them for evaluation.

        Buffers and random states stay as they were, in training mode too: the evaluation does not change the training.

        With a target, returns the loss like ``step``. Without one, returns the output of all rows on the last stage's
        rank.
        """
        runner = self._runner
        with torch.no_grad(), runner.one_error(), runner.unchanged_state():
            inputs = StepInputs(args, target, kwargs, stage_kwargs or {}, loss_kwargs or {})
            loss, terms, outputs = runner.evaluate(inputs)
            result = joined_outputs(outputs) if outputs else loss
        terms.collect(None, metrics)
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages to a common norm of at most ``max_norm``; return the norm before that.

        On any topology the norm has the bits of ``torch.nn.utils.clip_grad_norm_`` on the whole model; that function
        itself would see only this rank. A weight that several stages share counts once.
        """
        if norm_type != 2.0:
            raise PipelineError("only the 2-norm is summed over the ranks")
        runner = self._runner
        with runner.one_error(), runner.watch.calling("clip_grad_norm_"):
            total = runner.gradients.total_norm()
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for weight in runner.gradients.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)
        return total

    def compare(
        self,
        reference: nn.Module | None,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        name_of: Callable[[int, str], str] | None = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Comparison:
        """Run one step, and compare its loss and every gradient with the unpartitioned module's.

        The first rank of the pipeline needs the ``reference``, and all arguments of the step. The reference gets the
        pipeline's weights and the keyword arguments of all stages, and runs the micro-batches one by one in the plan's
        order. ``name_of`` gives the reference's name of a stage's parameter, if it is neither the same name nor
        ``stage.name``. Earlier gradients, buffers and random states are put back. Dropout draws other numbers in the
        reference: compare without dropout.
        """
        run = partial(self.step, *args, target=target, loss_kwargs=loss_kwargs, stage_kwargs=stage_kwargs, **kwargs)
        inputs = StepInputs(args, target, kwargs, stage_kwargs or {}, loss_kwargs or {})
        return compare_step(self._runner, run, reference, name_of, inputs)

    def record(self, directory: str | Path) -> AbstractContextManager[None]:
        """Record the messages of this block's steps into a directory, which ``pipeproof check`` reads.

        ``record_layers(pipe.stages, directory)`` records losses, gradients and the values in the layers.
        """
        from pipeproof.exec.train.torch.profile_steps import recorded_steps

        return recorded_steps(self._runner, Path(directory))

    def profile(self, file: str | Path, *args: Any, target: Any = None, num_steps: int = 5, **kwargs: Any) -> Profile:
        """Run some steps with timed operations and messages; write them for ``cost: {profile: FILE}`` of the plan.

        ``pipeproof simulate`` then predicts with measured times. Weights, gradients, buffers and random states are left
        as they are. Returns the profile, on all ranks.
        """
        from pipeproof.exec.train.torch.profile_steps import profile_steps

        run = partial(self.step, *args, target=target, **kwargs)
        return profile_steps(self._runner, run, Path(file), num_steps)

    def close(self) -> None:
        """End the pipeline's thread and its groups.

        The end of the process, and of the script's process group, does the same.
        """
        self._runner.watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
