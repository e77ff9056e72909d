"""torchtitan's trainer on a checked plan: ``ModelSpec.pipelining_fn`` (torchtitan 0.3).

A script or a config function sets one field, and trains as before::

    from pipeproof.exec.train.torch.titan import pipelining

    config.model_spec.pipelining_fn = pipelining()                 # the schedule that the job names
    config.model_spec.pipelining_fn = pipelining(schedule="zb_h1")    # another one, on the stages of the job

torchtitan cuts the model, applies its parallelisms to each stage and places the stages: by
``parallelism.pipeline_parallel_schedule`` round-robin or, with ZBVZeroBubble and DualPipeV, in a V. Another
``schedule`` must place them likewise, or the first step is refused.

The trainer materializes the weights after this function. The pipeline is therefore made, and its plan proved, in the
first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.pipeline import Pipeline
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.torch.start_phases import Split
from pipeproof.interop.importers.torch_pipelining import SCHEDULES

Arguments = Sequence[tuple[Any, ...]]
"""Positional arguments of the first stage, by micro-batch."""

Pipelined = tuple["TitanSchedule", list[nn.Module], bool, bool]
"""The schedule, this rank's stages, and whether it has the first and the last one, as torchtitan's trainer needs."""


def pipelining(
    *,
    plan: str | Path | Mapping[str, Any] | None = None,
    schedule: str | Path | Sequence[Sequence[str]] | None = None,
    split: Split = "whole",
    timeout_s: float = 600.0,
    check_finite: bool = False,
    unsafe: bool = False,
    cut: Callable[..., Any] | None = None,
) -> Callable[..., Pipelined]:
    """Return a ``pipelining_fn`` for torchtitan's ``ModelSpec``.

    Args:
        plan: as ``Pipeline`` has it; default: made of the schedule and the model.
        schedule: as ``Pipeline`` has it; default: the one that the job names, or its CSV file.
        split: as ``Pipeline`` has it; torchtitan applies ``fully_shard`` to every stage, which allows ``whole`` alone.
        timeout_s: as ``Pipeline`` has it.
        check_finite: as ``Pipeline`` has it.
        unsafe: as ``Pipeline`` has it.
        cut: the ``pipelining_fn`` that cuts the model; default: torchtitan's ``pipeline_llm``. For a model with vision
            ``pipeline_vlm``.
    """

    def pipelining_fn(
        model: nn.Module, *, parallel_dims: Any, parallelism: Any, loss_fn: Any, **others: Any
    ) -> Pipelined:
        cut_model = cut or import_module("torchtitan.distributed.pipeline_parallel").pipeline_llm
        own, parts, has_first, has_last = cut_model(
            model, parallel_dims=parallel_dims, parallelism=parallelism, loss_fn=loss_fn, **others
        )
        made = {
            "plan": plan,
            "schedule": job_schedule(parallelism) if schedule is None and plan is None else schedule or "1f1b",
            "group": parallel_dims.get_mesh("pp"),
            "split": split,
            "timeout_s": timeout_s,
            "check_finite": check_finite,
            "unsafe": unsafe,
        }
        stages = own._stages if hasattr(own, "_stages") else [own._stage]  # noqa: SLF001 - torchtitan returns no more
        numbered = {stage.stage_index: part for stage, part in zip(stages, parts, strict=True)}
        return TitanSchedule(numbered, loss_fn, made), parts, has_first, has_last

    return pipelining_fn


def pipelining_fn(model: nn.Module, **settings: Any) -> Pipelined:
    """Cut a model as torchtitan's ``pipeline_llm``, for the schedule that the job names; a ``pipelining_fn``."""
    return pipelining()(model, **settings)


def job_schedule(parallelism: Any) -> str | Path:
    """The schedule of a job's ``parallelism``: a kind, or the CSV file.

    Raises:
        PipelineError: PyTorch has a schedule of that name, and pipeproof has not.
    """
    if parallelism.pipeline_parallel_schedule_csv:
        return Path(parallelism.pipeline_parallel_schedule_csv)
    names = {name.lower(): kind for name, (kind, _) in SCHEDULES.items()}
    name: str = parallelism.pipeline_parallel_schedule
    if name.lower() not in names:
        raise PipelineError(
            f"parallelism.pipeline_parallel_schedule is {name!r}: use one of {', '.join(SCHEDULES)}, or give "
            "pipelining() a schedule"
        )
    return names[name.lower()]


class TitanSchedule:
    """The methods of PyTorch's schedules that torchtitan's trainer and validator call.

    ``stages`` are this rank's by global number, ``settings`` arguments of ``Pipeline``. The loss function returns
    ``(loss, metrics)``; losses and gradients are sums over micro-batches, which the loss function scales itself.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], loss_fn: Callable[..., Any], settings: Mapping[str, Any]
    ) -> None:
        self._stages, self._loss_fn, self._settings = dict(stages), loss_fn, dict(settings)
        self._loss_kwargs: Mapping[str, Any] = {}
        self._pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, with its ``plan``; it exists after the first step.

        Raises:
            PipelineError: there was no step.
        """
        if self._pipeline is None:
            raise PipelineError("the pipeline is made in the first step, when the trainer has materialized the weights")
        return self._pipeline

    def step(
        self,
        *,
        arg_mbs: Arguments | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Run forward and backward of all micro-batches; ``losses`` gets the loss of each, where the last stage is.

        Raises:
            PlanRefused: in the first step, the plan is not proved.
            PipelineError: a module raised on some rank, or the data does not fit; every rank raises it.
        """
        if return_outputs:
            raise PipelineError("outputs of a training step are not kept: pass return_outputs=False")
        pipeline = self._made(arg_mbs, kwarg_mbs)
        self._loss_kwargs = loss_kwargs or {}
        pipeline.step(*_columns(arg_mbs), target=_listed(target_mbs), losses=losses, **_named(kwarg_mbs))

    def eval(
        self,
        *,
        arg_mbs: Arguments | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run the forwards alone; ``losses`` gets their sum, where the last stage is.

        Raises:
            PipelineError: as ``step``.
        """
        pipeline = self._made(arg_mbs, kwarg_mbs)
        self._loss_kwargs = loss_kwargs or {}
        total = pipeline.eval_step(*_columns(arg_mbs), target=_listed(target_mbs), **_named(kwarg_mbs))
        if losses is not None and total is not None:
            losses.append(total)

    def _made(self, arg_mbs: Arguments | None, kwarg_mbs: Sequence[Mapping[str, Any]] | None) -> Pipeline:
        """The pipeline; boundaries are found with the first micro-batch of the first call."""
        if self._pipeline is None:
            if kwarg_mbs is None:
                raise PipelineError("pass kwarg_mbs on every rank: {} for a micro-batch without keyword arguments")
            num = len(kwarg_mbs)
            self._pipeline = Pipeline(
                self._stages,
                num_micro_batches=num,
                loss_fn=self._loss,
                example=_columns([arg_mbs[0]] * num if arg_mbs else None),
                example_kwargs=_named([kwarg_mbs[0]] * num),
                scale_grads=False,
                **self._settings,
            )
        return self._pipeline

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        loss: torch.Tensor = self._loss_fn(output, target, **self._loss_kwargs)[0]
        return loss


def _columns(entries: Arguments | None) -> list[MicroBatches]:
    """Positional arguments that are listed by micro-batch, as those of ``Pipeline.step``."""
    return [MicroBatches(column) for column in zip(*entries or (), strict=True)]


def _named(entries: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Keyword arguments that are listed by micro-batch, as those of ``Pipeline.step``."""
    return {name: MicroBatches(each[name] for each in entries or ()) for name in (entries or ({},))[0]}


def _listed(values: Sequence[Any] | None) -> MicroBatches | None:
    return None if values is None else MicroBatches(values)
