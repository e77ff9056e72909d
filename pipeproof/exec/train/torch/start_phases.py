"""The start of a pipeline in phases: join, place, infer, plan, prove, connect. Each is a function of earlier ones.

A phase runs on every rank, and its error on one rank is an error on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.overlapped_pair import whole_pairs
from pipeproof.exec.store.agreement import Agreement, require_equal
from pipeproof.exec.store.torch_store import TorchStore
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import (
    Modules,
    Request,
    TrainedPlan,
    complete_plan,
    frozen_stages,
    given_plan,
    in_script_words,
    module_entries,
    placement_of,
    schedule_section,
)
from pipeproof.exec.train.plan_layers import Cut, Tie, names_in_plan, planned_cut
from pipeproof.exec.train.stage_boundaries import Boundaries, common_dtype, kind_text
from pipeproof.exec.train.stage_edges import Edges, StageEdges
from pipeproof.exec.train.torch.block_layers import layer_names
from pipeproof.exec.train.torch.channel_groups import ScriptGroup, StageWorld, connect_stages, process_group
from pipeproof.exec.train.torch.data_parallel import Replicas, layout_of, local_part
from pipeproof.exec.train.torch.meta_buffers import require_computed_buffers
from pipeproof.exec.train.torch.model_names import unwrapped
from pipeproof.exec.train.torch.model_stages import ModelStages, cut_ties, shared_objects
from pipeproof.exec.train.torch.module_stage import LossFunction, ModuleStage, trained
from pipeproof.exec.train.torch.replayed_step import require_replayable
from pipeproof.exec.train.torch.split_backward import require_splittable
from pipeproof.exec.train.torch.stage_edges import wrapped
from pipeproof.exec.train.torch.stage_facts import Examples, StageDescriber
from pipeproof.exec.train.torch.stage_keywords import StageKeywords, StepInputs
from pipeproof.exec.train.torch.step_inputs import SplitRules, StepContract
from pipeproof.exec.train.torch.step_loss import LossOn, Normalize
from pipeproof.exec.train.train_rank import checked_plan, require_fits, require_supported
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.torch.graph_capture import Compiler

Split = Literal["whole", "linear", "graph"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``Pipeline`` without the stages and groups, see there."""

    plan: str | Path | Mapping[str, Any] | None
    schedule: str | Path | Sequence[Sequence[str]]
    num_micro_batches: int | None
    loss_fn: LossFunction | None
    example: StepInputs
    split: Split
    compiler: Compiler
    tied: Sequence[Tie]
    edges: Edges
    modules: Modules
    rules: SplitRules
    check_inputs: bool
    scale_grads: bool
    normalize: Normalize
    loss_on: LossOn
    check_finite: bool
    replay: bool
    overlap: bool
    timeout_s: float
    unsafe: bool

    @property
    def averages_losses(self) -> bool:
        """True if losses are means over the micro-batches, unless the loss function divides by all labels."""
        return self.scale_grads and self.normalize == "micro_batches"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of the pipeline; ``rank`` is this one's index in their ``group``."""

    script_group: ScriptGroup
    rank: int
    num_ranks: int
    store: dist.Store
    agreement: Agreement

    @property
    def group(self) -> dist.ProcessGroup:
        """The script's group of these ranks; raises PipelineError once the script has destroyed it."""
        return self.script_group()

    @property
    def global_ranks(self) -> list[int]:
        """Their numbers in the world."""
        return [*dist.get_process_group_ranks(self.group)]


@dataclass(frozen=True, slots=True)
class Placed:
    """The stages of every rank by number, and this rank's modules.

    ``skeleton`` is the plan without layers, and ``layers`` are their names by stage. ``tied`` are weights that stages
    share, each as {stage: name}. ``frozen`` are the stages of frozen modules.
    """

    by_rank: list[list[int]]
    num_stages: int
    skeleton: dict[str, Any]
    layers: Cut
    tied: list[dict[int, str]]
    stages: dict[int, nn.Module]
    replicas: dict[int, Replicas]
    frozen: Collection[int]
    device: torch.device
    keywords: StageKeywords
    edges: StageEdges


@dataclass(frozen=True, slots=True)
class Planned:
    """The keys of the plan, and the ``boundaries`` of all stages; a micro-batch has ``num_rows`` rows.

    ``names`` are the plan's names of the weights of each stage, by those in the stage.

    ``describer`` also describes the stages for steps of other sizes than the ``examples`` have.
    """

    content: dict[str, Any]
    names: list[dict[str, str]]
    boundaries: dict[int, Boundaries]
    num_rows: int
    contract: StepContract
    examples: Examples
    describer: StageDescriber


@dataclass(frozen=True, slots=True)
class Connected:
    """This rank's stages and its groups; ``watched`` is the agreement for the thread that watches the steps."""

    modules: dict[int, ModuleStage]
    world: StageWorld
    watched: Agreement


def join(group: dist.ProcessGroup | dist.DeviceMesh | None, timeout_s: float) -> Ranks:
    """The ranks of a group, with their store and agreement.

    Raises:
        PipelineError: this rank is not one of them, or there is no store.
    """
    own = process_group(group)
    store, ranks = store_of(own), dist.get_process_group_ranks(own)
    rank = ranks.index(dist.get_rank())
    return Ranks(ScriptGroup(own), rank, len(ranks), store, Agreement(TorchStore(store), rank, len(ranks), timeout_s))


def place(
    ranks: Ranks,
    settings: Settings,
    stages: Mapping[int, nn.Module],
    data_group: dist.ProcessGroup | dist.DeviceMesh | None,
) -> Placed:
    """Agree on the arguments, and on the rank of each stage.

    Raises:
        PipelineError: the ranks were given other arguments, or stages that do not fit together.
    """
    agreement = ranks.agreement
    shards = None if data_group is None else process_group(data_group)
    answers = agreement.gather("request", lambda: _request(settings, stages, shards, ranks.num_ranks))
    asked = same_request(answers)
    numbers = sorted({number for other in answers for number in other["stages"]})
    own_numbers = () if isinstance(stages, ModelStages) else [other["stages"] for other in answers]
    skeleton = agreement.gather("sizes", lambda: asked.skeleton(len(numbers), own_numbers))[0]
    by_rank, layers = agreement.gather(
        "placement",
        lambda: [
            in_script_words(lambda: placed_stages(answers, numbers, skeleton), has_plan=asked.plan is not None),
            planned_cut(asked.plan, _layers_of(answers)),
        ],
    )[0]
    own = {number: stages[number] for number in by_rank[ranks.rank]}
    tied = [{int(number): str(name) for number, name in names.items()} for names in answers[0]["tied"]]
    device: list[torch.device] = []
    frozen = frozen_stages(skeleton)

    def own_layouts() -> list[str]:
        device.append(device_of(own.values()))
        require_computed_buffers(own)
        require_frozen(own, frozen)
        return tied_layouts(own, tied)

    layouts = agreement.gather("modules", own_layouts)
    agreement.gather("tied weights", lambda: require_same_layouts(tied, layouts))
    edges = agreement.gather("edges", lambda: StageEdges.of(settings.edges, skeleton, layers).edges)
    around = StageEdges({name: (producer, tuple(users), route) for name, (producer, users, route) in edges[0].items()})
    replicas = {number: Replicas(number, module, shards, partial(wrapped, around)) for number, module in own.items()}
    agreement.gather("split", lambda: _require_splittable(replicas, settings.split))
    modules = {number: each.call() for number, each in replicas.items()}
    keywords = StageKeywords.gathered(agreement, modules, has_loss_fn=settings.loss_fn is not None)
    agreement.gather("rules", lambda: settings.rules.require_valid(keywords))
    return Placed(by_rank, len(numbers), skeleton, layers, tied, own, replicas, frozen, device[0], keywords, around)


def infer(ranks: Ranks, settings: Settings, placed: Placed) -> Planned:
    """Run each stage once on the example, and complete the plan with its outputs.

    Raises:
        PipelineError: a stage fails on the example, or its output cannot cross.
    """
    describer = StageDescriber(
        ranks.agreement, ranks.rank, placed.num_stages, placed.replicas, placed.device, settings.split != "whole",
        StepContract(placed.keywords, settings.rules), placed.layers,
        bool(placed.skeleton["model"].get("layers")), placed.edges, placed.frozen,
    )  # fmt: skip
    num = placed.skeleton["schedule"]["num_micro_batches"]
    facts, boundaries, num_rows, examples = describer.describe(settings.example, placed.by_rank, num)
    content = complete_plan(placed.skeleton, facts, placed.tied, num_rows, examples.seq_lengths)
    made = {name: entry for each in facts for name, entry in each.edges.items()}
    if made and not content.get("edges"):
        content["edges"] = placed.edges.plan_entries([[layer.name for layer in each.layers] for each in facts], made)
    contract = StepContract(placed.keywords.with_boundaries(boundaries), settings.rules)
    names = names_in_plan(facts, placed.tied)
    describer = replace(describer, layers=[[layer.name for layer in each.layers] for each in facts], is_planned=True)
    return Planned(content, names, boundaries, num_rows, contract, examples, describer)


def prove(ranks: Ranks, settings: Settings, planned: Planned) -> TrainedPlan:
    """Lower the plan on every rank, and check it.

    Raises:
        PlanRefused: it is not proved, and ``unsafe`` is not set.
        PipelineError: a script's modules cannot have one of its keys.
    """
    plan = checked_plan(planned.content, ranks.agreement, "plan", unsafe=settings.unsafe)
    require_supported(plan.lowered.spec)
    if alternates(plan, settings) and not any(whole_pairs(plan.lowered.graph, rank) for rank in range(ranks.num_ranks)):
        raise PipelineError(
            "overlap=True, and no computations of the schedule overlap: use kind 1f1b, interleaved, dualpipe or "
            "dualpipe_v, or a file with pairs"
        )
    return plan


def alternates(plan: TrainedPlan, settings: Settings) -> bool:
    """True if the computations of an overlapped pair alternate at overlap points of their modules."""
    return plan.lowered.spec.schedule.alternation is not None or settings.overlap


def connect(
    ranks: Ranks, settings: Settings, placed: Placed, planned: Planned, plan: TrainedPlan, undo: ExitStack
) -> Connected:
    """Make this rank's stages and groups, and give copies of a weight one value.

    Raises:
        PipelineError: the modules differ from the plan's stages, or the ranks cannot connect.
    """
    lowered = plan.lowered
    watched = ranks.agreement.of_thread()  # while rank 0, which serves it, is here
    modules = ranks.agreement.own("connecting", lambda: _module_stages(ranks, settings, placed, planned, plan))
    world = connect_stages(
        lowered.graph, ranks.rank, placed.device, dist.PrefixStore("channels/", ranks.store), ranks.script_group,
        settings.timeout_s,
    )  # fmt: skip
    undo.callback(world.close)
    undo.callback(world.abort)
    share_start(world, lowered, modules, ranks.rank)
    return Connected(modules, world, watched)


def _request(
    settings: Settings, stages: Mapping[int, nn.Module], shards: dist.ProcessGroup | None, num_ranks: int
) -> dict[str, Any]:
    _require_arguments(settings, stages)
    modules = list(stages.values())
    replicas = [Replicas(number, module, shards) for number, module in stages.items()]
    sizes = {each.size for each in replicas}
    if len(sizes) > 1:
        raise PipelineError(f"stages of one rank have {sorted(sizes)} replicas: all need the same number")
    device = device_of(modules, allow_meta=True)
    if settings.replay:
        require_replayable(device, is_sharded=any(each.is_sharded for each in replicas), reads=settings.check_finite)
    request = Request(
        None if settings.plan is None else given_plan(settings.plan),
        schedule_section(settings.schedule),
        settings.num_micro_batches,
        "torch",
        "gpu" if device.type == "cuda" else "cpu",
        common_dtype(weight for module in modules for weight in module.parameters()) or "float32",
        num_ranks,
        sizes.pop(),
        settings.overlap,
        module_entries(settings.modules),
    )
    same = (
        "split", "compiler", "check_inputs", "scale_grads", "normalize", "loss_on", "replay", "overlap",
        "unsafe",
    )  # fmt: skip
    return {
        "request": asdict(request),
        "settings": {name: getattr(settings, name) for name in same}
        | settings.rules.content
        | {"edges": [[name, *edge] for name, edge in settings.edges.items()]},
        "whole": len(stages) if isinstance(stages, ModelStages) else None,
        "stages": sorted(stages),
        "layers": {str(number): layer_names(number, module) for number, module in stages.items()},
        "tied": [*trained_ties(stages), *map(dict, settings.tied)],
    }


def _require_arguments(settings: Settings, stages: Mapping[int, nn.Module]) -> None:
    if settings.split not in ("whole", "linear", "graph"):
        raise PipelineError(f"split is {settings.split!r}: use 'whole', 'linear' or 'graph'")
    if settings.compiler not in ("inductor", "eager"):
        raise PipelineError(f"compiler is {settings.compiler!r}: use 'inductor' or 'eager'")
    if settings.normalize not in ("micro_batches", "tokens"):
        raise PipelineError(f"normalize is {settings.normalize!r}: use 'micro_batches' or 'tokens'")
    if settings.normalize == "tokens" and not settings.scale_grads:
        raise PipelineError("normalize='tokens' divides sums by their count: leave out scale_grads=False")
    if settings.loss_on not in ("last", "all"):
        raise PipelineError(f"loss_on is {settings.loss_on!r}: use 'last' or 'all'")
    if settings.replay and settings.edges:
        raise PipelineError("replay=True with edges has not been tried on a GPU: leave out replay")
    if settings.example.args == () and not settings.example.kwargs and not settings.example.stage_kwargs:
        raise PipelineError("give Pipeline an `example`: the arguments of the first stage for one micro-batch")
    if settings.timeout_s <= 0:
        raise PipelineError(f"timeout_s is {settings.timeout_s}: give a number of seconds")
    if not isinstance(stages, Mapping):
        raise PipelineError(f"`stages` is {kind_text(stages)}: give this rank's modules by stage, {{number: module}}")
    if not all(isinstance(number, int) and number >= 0 for number in stages):
        raise PipelineError(f"`stages` has the keys {list(stages)}: they are numbers of stages, from 0")
    if not stages or not all(isinstance(module, nn.Module) for module in stages.values()):
        raise PipelineError("give this rank at least one stage: stages={number: module}")


def _layers_of(answers: Sequence[Mapping[str, Any]]) -> Cut:
    """The names of the layers of all stages, from those that each rank was given."""
    named = {int(number): names for other in answers for number, names in other["layers"].items()}
    return [named[number] for number in sorted(named)]


def _require_splittable(replicas: Mapping[int, Replicas], split: Split) -> None:
    for number, each in replicas.items():
        if split == "linear":
            require_splittable(number, each.call(), is_sharded=each.is_sharded)


def _module_stages(
    ranks: Ranks, settings: Settings, placed: Placed, planned: Planned, plan: TrainedPlan
) -> dict[int, ModuleStage]:
    lowered, boundaries = plan.lowered, planned.boundaries
    splitting = {op.stage for op in lowered.programs[ranks.rank] if op.kind is OpKind.BACKWARD_WEIGHT}
    modules = {
        number: ModuleStage(
            number, each.call(), boundaries[number], settings.loss_fn,
            planned.names[number],
            normalize=settings.normalize,
            splits=settings.split != "whole" and number in splitting, check_finite=settings.check_finite,
            compiler=settings.compiler if settings.split == "graph" else None, is_sharded=each.is_sharded,
        )
        for number, each in placed.replicas.items()
    }  # fmt: skip
    weights = {n: stage.parameters for n, stage in modules.items()}
    require_fits(lowered, ranks.rank, weights, {n: boundaries[n].outputs for n in modules})
    return modules


# --- Agreement of the ranks on what the script passed: the request, the stages and tied weights ---


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
    """The device of the modules: the device of their first parameter or buffer, else the CPU.

    With ``allow_meta`` modules of other ranks may be on the meta device.

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
    """The request, which must be equal on all ranks; types may differ if a rank has no floating-point parameters."""
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
    """The stages of each rank by the plan; the ranks must have exactly these.

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
        actual, planned = list(other["stages"]), list(placed[rank])
        if other["whole"] is None and actual != planned:
            raise PipelineError(
                f"rank {rank} has stages {actual}, and {skeleton['schedule']['kind']} on {len(placed)} ranks puts "
                f"stages {planned} there; `stages_of_rank` gives them"
            )
    return placed


def require_frozen(stages: Mapping[int, nn.Module], frozen: Collection[int]) -> None:
    """Refuse stages of a frozen module that have weights to train.

    Raises:
        PipelineError: names a weight.
    """
    for number, stage in stages.items():
        weight = next(iter(trained(stage)), None) if number in frozen else None
        if weight is not None:
            raise PipelineError(f"stage {number} is of a frozen module, and {weight} is trained: requires_grad_(False)")


def trained_ties(stages: Mapping[int, nn.Module]) -> list[dict[int, str]]:
    """The weights that stages of a ``ModelStages`` share, without frozen ones: these have no gradients to sum."""
    if not isinstance(stages, ModelStages):
        return []
    return [names for names in stages.tied if all(name in trained(stages[number]) for number, name in names.items())]


def tied_layouts(stages: Mapping[int, nn.Module], tied: Sequence[Tie]) -> list[str]:
    """This rank's part of each tied weight as text; empty for a weight that it does not have.

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
    """Refuse tied weights whose parts differ between the ranks; ``layouts`` has the ``tied_layouts`` of each rank.

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
                    module = stages[number].module
                    frozen = (weight.data for weight in module.parameters() if not weight.requires_grad)
                    for value in (*module.buffers(), *frozen):
                        by_ranks[holders].broadcast(value)
