"""The plan of a semi-automatic pipeline of Paddle, from the schedule and the stages of the program that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.pipelining.schedules import Schedule1F1B, ScheduleFThenB, ScheduleVPP

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import Request, TrainedPlan, complete_plan
from pipeproof.exec.train.paddle.start_phases import device_name
from pipeproof.exec.train.plan_layers import StageFacts, merged_ties
from pipeproof.exec.train.stage_boundaries import LeafSpec, common_dtype, dtype_name, kind_text
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check

_KINDS: Mapping[type, Mapping[str, str]] = MappingProxyType(
    {
        ScheduleFThenB: {"kind": "gpipe"},
        Schedule1F1B: {"kind": "1f1b"},
        ScheduleVPP: {"kind": "interleaved", "variant": "torch"},
    }
)
"""The keys of a plan's schedule by the class in Paddle 3.3.1."""


def plan_of_schedule(schedule: Any) -> TrainedPlan:
    """Import the pipeline of a program that Paddle's semi-automatic parallelism runs, as a plan that is checked here.

    Call it on every rank, after the first step: the stages learn their shapes there. The plan has the pipeline of this
    rank alone. Tensors that `shard_tensor` divides over other axes of the mesh (`mp`, `dp`) have their local shapes,
    because stages send these; what the layers exchange over such axes is not in the plan. Paddle adds the gradients of
    all micro-batches, and a plan takes their mean, so gradients of a run by this plan are smaller by their number.

    Args:
        schedule: a `ScheduleFThenB`, `Schedule1F1B` or `ScheduleVPP` of `paddle.distributed.auto_parallel.pipelining`.

    Returns:
        The plan; `findings` has the errors of one that is not proved. `save` writes it, for `pipeproof check LOGS
        --plan`, which compares the messages that `record_paddle` has recorded.

    Raises:
        PipelineError: it is another class, has no shapes yet, or the ranks have different pipelines.
    """
    keys = _KINDS.get(type(schedule))
    if keys is None:
        names = ", ".join(kind.__name__ for kind in _KINDS)
        raise PipelineError(f"`schedule` is {kind_text(schedule)}: give one of {names}, whose order is known")
    stages = getattr(schedule, "_stages", None) or [schedule._stage]  # noqa: SLF001 - Paddle has no public name
    first, count = stages[0], schedule._n_microbatches  # noqa: SLF001
    reports: list[Any] = []
    own = {"stages": {str(stage.stage_index): _facts(stage) for stage in stages}, "ties": _ties(stages)}
    dist.all_gather_object(reports, [first.num_stages, count, own], first.group)
    if len({(num_stages, num_micro_batches) for num_stages, num_micro_batches, _ in reports}) > 1:
        raise PipelineError("the ranks have other numbers of stages or micro-batches: pass the schedule that runs")
    by_number = {int(number): facts for *_, report in reports for number, facts in report["stages"].items()}
    if sorted(by_number) != [*range(first.num_stages)]:
        raise PipelineError(f"the ranks have the stages {sorted(by_number)} of {first.num_stages}: pass all of a rank")
    every = [by_number[number] for number in range(first.num_stages)]
    num_rows = int(every[0]["rows"])
    facts = [
        StageFacts.whole(
            number, each["kind"], each["parameters"],
            [LeafSpec(*leaf).plan_entry(num_rows) for leaf in each["outputs"] if number < first.num_stages - 1],
        )
        for number, each in enumerate(every)
    ]  # fmt: skip
    dtype = next((each["dtype"] for each in every if each["dtype"]), "float32")
    asked = Request(None, dict(keys), count, "paddle", device_name(), dtype, first.group_size, 1)
    skeleton = asked.skeleton(first.num_stages)
    content = complete_plan(skeleton, facts, merged_ties(report["ties"] for *_, report in reports), num_rows)
    report = check(plan_from_dict(content))
    return TrainedPlan(content, report.subject.plan, report.conclusion, report.errors)


def _facts(stage: Any) -> dict[str, Any]:
    """One stage as its rank describes it, in JSON values; shapes are local."""
    if not stage.inputs_meta or stage._outputs_meta is None:  # noqa: SLF001 - the public getter asserts instead
        raise PipelineError("the stages have no shapes yet: call plan_of_schedule after the first step")
    weights = stage.sublayer.named_parameters()
    return {
        "kind": type(stage.sublayer).__name__,
        "rows": _local_shape(stage.inputs_meta[0])[0],
        "parameters": [{"name": name, "shape": _local_shape(weight)} for name, weight in weights],
        "outputs": [
            (_local_shape(meta), dtype_name(meta.dtype), not meta.stop_gradient) for meta in stage.get_outputs_meta()
        ],
        "dtype": common_dtype(stage.sublayer.parameters()),
    }


def _local_shape(tensor: Any) -> list[int]:
    """The shape of this rank's part of a tensor, or of Paddle's record of one."""
    local = getattr(tensor, "_local_shape", None)
    return list(local or tensor.shape)


def _ties(stages: Sequence[Any]) -> dict[str, dict[str, str]]:
    """The weights that this rank's stages share with others, by the number of the pair, and the names in each stage."""
    ties: dict[str, dict[str, str]] = {}
    for stage in stages:
        names = {id(weight): name for name, weight in stage.sublayer.named_parameters()}
        for number, pair in enumerate(stage.shared_parameters or ()):
            name = names.get(id(pair.get("shared_param")))
            if name is not None:
                ties.setdefault(str(number), {})[str(stage.stage_index)] = name
    return ties
