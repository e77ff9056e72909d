"""Agreement of a pipeline's ranks on what the script passed: the request, the stages and tied weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.store.agreement import require_equal
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import Request, placement_of
from pipeproof.exec.train.plan_layers import Tie
from pipeproof.exec.train.torch.channel_groups import StageWorld
from pipeproof.exec.train.torch.data_parallel import layout_of, local_part
from pipeproof.exec.train.torch.model_names import unwrapped
from pipeproof.exec.train.torch.model_stages import ModelStages, cut_ties, shared_objects
from pipeproof.exec.train.torch.module_stage import ModuleStage, trained

_COUNTS: Counter[str] = Counter()
"""Pipelines of each group that this process has made: all members make them in one order."""


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """A part of the default group's store for the next pipeline of a group.

    Raises:
        PipelineError: the default group was made without a store.
    """
    try:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    except (AssertionError, KeyError, ValueError) as error:
        raise PipelineError(f"the default process group has no store: {error}") from None
    if store is None:
        raise PipelineError("the default process group has no store: initialise it with torchrun or a TCP store")
    ranks = ".".join(map(str, dist.get_process_group_ranks(group)))
    name = f"{group.group_name}/{sha256(ranks.encode()).hexdigest()[:16]}"
    _COUNTS[name] += 1
    return dist.PrefixStore(f"pipeproof/{name}/{_COUNTS[name]}/", store)


def device_of(modules: Iterable[nn.Module], *, allow_meta: bool = False) -> torch.device:
    """The device of the modules: that of their first parameter or buffer, else the CPU.

    With ``allow_meta`` some may be on the meta device: those of other ranks.

    Raises:
        PipelineError: some are on the meta device, or they are on several devices.
    """
    devices: dict[torch.device, None] = {}
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.device.type != "meta":
                devices[tensor.device] = None
            elif not allow_meta:
                raise PipelineError(f"{name} of a stage of this rank is on the meta device: materialize it first")
    if len(devices) > 1:
        raise PipelineError(f"the stages of this rank are on {', '.join(map(str, devices))}: put them on one device")
    device = next(iter(devices), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def same_request(answers: Sequence[Mapping[str, Any]]) -> Request:
    """The request, which must be one on all ranks; types may differ where one has no floating-point parameters."""
    for key, name in (("tied", "`tied`"), ("whole", "the number of stages of a ModelStages")):
        require_equal([other[key] for other in answers], name)
    require_equal([other["settings"] for other in answers], "an argument of Pipeline")
    requests = [dict(other["request"]) for other in answers]
    dtypes = [request.pop("dtype") for request in requests]
    for key in requests[0]:
        require_equal([request[key] for request in requests], f"`{key}`")
    return Request(**requests[0], dtype=dtypes[0])


def placed_stages(
    answers: Sequence[Mapping[str, Any]], numbers: Sequence[int], skeleton: Mapping[str, Any]
) -> list[list[int]]:
    """The stages of each rank by the plan, which must be those that the ranks have.

    Raises:
        PipelineError: a stage is missing, on the wrong rank or on two.
    """
    num_stages = len(numbers)
    missing = [number for number in range(max(numbers) + 1) if number not in numbers]
    if missing:
        raise PipelineError(f"no rank has stage {missing[0]}: stages are numbered from 0 to {max(numbers)}")
    placed = placement_of(skeleton, num_stages)
    planned_stages = len({number for own in placed for number in own})
    if planned_stages != num_stages:
        raise PipelineError(
            f"the schedule has {planned_stages} stages, and there are {num_stages}: cut the model into {planned_stages}"
        )
    for number in range(num_stages):
        holders = [rank for rank, other in enumerate(answers) if other["whole"] is None and number in other["stages"]]
        planned = [rank for rank, own in enumerate(placed) if number in own]
        if len(holders) > len(planned):
            raise PipelineError(f"stage {number} is on ranks {holders}, and the schedule puts it on {planned} alone")
    for rank, other in enumerate(answers):
        given, planned = list(other["stages"]), list(placed[rank])
        if other["whole"] is None and given != planned:
            raise PipelineError(
                f"rank {rank} has stages {given}, and {skeleton['schedule']['kind']} on {len(placed)} ranks puts "
                f"stages {planned} there; `stages_of_rank` gives them"
            )
    return placed


def trained_ties(stages: Mapping[int, nn.Module]) -> list[dict[int, str]]:
    """The weights that stages of a ``ModelStages`` share, without frozen ones: these have no gradients to sum."""
    if not isinstance(stages, ModelStages):
        return []
    return [names for names in stages.tied if all(name in trained(stages[number]) for number, name in names.items())]


def tied_layouts(stages: Mapping[int, nn.Module], tied: Sequence[Tie]) -> list[str]:
    """This rank's part of each tied weight as text; empty for one that it does not have.

    Raises:
        PipelineError: a name does not exist, stages of one rank have separate copies of one weight, or they share one
            that is not tied, with each other or with stages of other ranks.
    """
    for shared in shared_objects({number: trained(stage) for number, stage in stages.items()}):
        if not any(shared.items() <= dict(tie).items() for tie in tied):
            raise PipelineError(f"stages {list(shared)} share a Parameter that is not tied: pass tied=[{shared}]")
    for number, stage in stages.items():
        for shared in cut_ties(unwrapped(stage)):
            if shared.get(number) in trained(stage) and not any(tie.get(number) == shared[number] for tie in tied):
                raise PipelineError(
                    f"stages {list(shared)} of the model share {shared[number]}, and it is not tied: pass the result "
                    f"of the cut itself as `stages`, or tied=[{shared}]"
                )
    layouts = []
    for names in tied:
        held = []
        for number, name in names.items():
            if number in stages:
                weights = trained(stages[number])
                if name not in weights:
                    raise PipelineError(f"`tied` names {name!r} of stage {number}, which has no such trained parameter")
                held.append(weights[name])
        if len({id(weight) for weight in held}) > 1:
            raise PipelineError(f"{dict(names)} are on one rank and must be one Parameter: assign it to both modules")
        layouts.append(layout_of(held[0]) if held else "")
    return layouts


def require_same_layouts(tied: Sequence[Tie], layouts: Sequence[Sequence[str]]) -> None:
    """Refuse tied weights whose parts differ between the ranks; ``layouts`` are those of ``tied_layouts`` by rank.

    Raises:
        PipelineError: names the stages and the layouts.
    """
    for index, names in enumerate(tied):
        by_rank = {rank: own[index] for rank, own in enumerate(layouts) if own[index]}
        if len(set(by_rank.values())) > 1:
            shown = ", ".join(f"{layout} on rank {rank}" for rank, layout in by_rank.items())
            raise PipelineError(f"tied weights {dict(names)} must have one type, shape and distribution: {shown}")


def share_start(world: StageWorld, plan: LoweredPlan, stages: Mapping[int, ModuleStage], rank: int) -> None:
    """Give the copies of a weight, or of a stage, the values of its first holder."""
    by_ranks = {each.members: each for each in world.collectives.values()}
    with torch.no_grad():
        for holders in sorted(by_ranks):
            for number in sorted(stages):
                for weight in plan.weights_of(number, rank):
                    if plan.shared_weights.places(number, weight.name) == holders:
                        by_ranks[holders].broadcast(local_part(stages[number].parameters[weight.name].data))
                if plan.holders[number] == holders:
                    for buffer in stages[number].module.buffers():
                        by_ranks[holders].broadcast(buffer)
