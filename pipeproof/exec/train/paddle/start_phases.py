"""The start of a Paddle pipeline in phases: join, place, infer, prove, connect. Each is a function of earlier ones.

The phases from ``infer`` on need the first micro-batch. A phase runs on every rank, and its error on one rank is an
error on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.store.agreement import Agreement, described_in_order, require_equal
from pipeproof.exec.store.paddle_store import PaddleStore, send_at_once, store_address, store_of
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import (
    Request,
    TrainedPlan,
    complete_plan,
    given_plan,
    num_stages_of,
    placement_of,
    schedule_section,
)
from pipeproof.exec.train.paddle.boundary_inference import boundary_of, entry_of, run_stage, zeros_of
from pipeproof.exec.train.paddle.channel_groups import StageWorld, connect_stages
from pipeproof.exec.train.paddle.fleet_settings import (
    FleetSettings,
    fleet_schedule,
    pipeline_settings,
    share_parameters,
)
from pipeproof.exec.train.paddle.module_stage import ModuleStage, SplitBackward
from pipeproof.exec.train.paddle.stage_layers import (
    FleetStages,
    ListStages,
    LossFunction,
    StageLayers,
    call_with_edges,
    cut_layers,
    declared_entries,
    declared_names,
    require_layers,
    require_tied_on_one_rank,
    ties_of,
    trained,
)
from pipeproof.exec.train.paddle.step_data import MicroBatchSizes, rows_of
from pipeproof.exec.train.plan_layers import Cut, StageFacts, declared_cut, merged_ties, names_in_plan, stage_name
from pipeproof.exec.train.stage_boundaries import Boundaries, Form, LeafSpec, common_dtype, specs_of
from pipeproof.exec.train.stage_edges import Edges, StageEdges
from pipeproof.exec.train.train_rank import checked_plan, require_fits, require_supported
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.schedule.ops import OpKind

Tensor: TypeAlias = paddle.Tensor
Boundary: TypeAlias = tuple[Form, tuple[LeafSpec, ...]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``Pipeline`` without the layers and the group, see there. ``losses`` is empty without any."""

    plan: str | Path | Mapping[str, Any] | None
    schedule: str | Path | Sequence[Sequence[str]] | None
    num_micro_batches: int | None
    losses: Sequence[LossFunction]
    seg_method: str | Sequence[int]
    num_chunks: int | None
    edges: Edges
    timeout_s: float
    unsafe: bool


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of the pipeline; ``rank`` is this one's index among them."""

    fleet: FleetSettings
    rank: int
    num_ranks: int
    store: PaddleStore
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Placed:
    """The stages of every rank by number, and this rank's layers.

    ``skeleton`` is the plan without layers. ``described`` are all entries of the list of layers. ``ties`` are weights
    that stages share. The rows of ``sizes`` may be unknown before the first batch.
    """

    by_rank: list[list[int]]
    num_stages: int
    skeleton: dict[str, Any]
    described: Sequence[Any]
    stages: StageLayers
    ties: list[dict[int, str]]
    edges: StageEdges
    sizes: MicroBatchSizes

    def call(self, number: int) -> Callable[[Any], Any]:
        """A stage of this rank as a function of its input, with its edges."""
        edges, call = self.edges.of_stage(number), partial(self.stages.call, number)
        return call if edges is None else partial(call_with_edges, edges, call)

    @property
    def layer_names(self) -> Cut:
        """The names of each stage's layers in the plan."""
        num_stages = self.num_stages
        return declared_cut(self.skeleton, num_stages) or [[stage_name(number)] for number in range(num_stages)]


@dataclass(frozen=True, slots=True)
class Planned:
    """The keys of the plan, the names of each stage's weights in it, and the boundary after each stage."""

    content: dict[str, Any]
    names: list[dict[str, str]]
    boundaries: dict[int, Boundary]
    sizes: MicroBatchSizes


@dataclass(frozen=True, slots=True)
class Connected:
    """This rank's stages and its groups."""

    modules: dict[int, ModuleStage]
    world: StageWorld


def join(group: Any, timeout_s: float) -> Ranks:
    """The ranks of a group, with their store and agreement.

    Raises:
        PipelineError: this rank is not one of them, Fleet overlaps operations that the plan orders, or there is no
            store.
    """
    fleet = pipeline_settings(group)
    rank, num_ranks, store = fleet.ranks.index(dist.get_rank()), len(fleet.ranks), store_of(fleet.ranks)
    return Ranks(fleet, rank, num_ranks, store, Agreement(store, rank, num_ranks, timeout_s))


def place(ranks: Ranks, settings: Settings, layers: PipelineLayer | Sequence[Any]) -> Placed:
    """Agree on the arguments and on the rank of each stage, and build this rank's layers.

    Raises:
        PipelineError: the ranks were given other arguments, or layers that do not fit the schedule.
    """
    agreement, fleet = ranks.agreement, ranks.fleet
    answers = agreement.gather("request", lambda: _request(ranks, settings, layers))
    if ranks.num_ranks > 1:
        send_at_once({store_address()[1]})  # rank 0 has accepted all connections by now
    require_equal([other["settings"] for other in answers], "an argument of Pipeline")
    require_equal([other["request"] for other in answers], "the plan, the schedule or the number of micro-batches")
    asked = Request(**answers[0]["request"])
    skeleton, stages = agreement.own("stages", lambda: _built(ranks, settings, asked, layers))
    answers = agreement.gather("ties", lambda: _stage_facts(skeleton, stages))
    require_equal([other["skeleton"] for other in answers], "the plan")
    if asked.plan is None or "dtype" not in asked.plan.get("run", {}):
        skeleton["run"]["dtype"] = next((other["dtype"] for other in answers if other["dtype"]), "float32")
    by_rank = [[int(number) for number in other["stages"]] for other in answers]
    agreement.gather("placement", lambda: _require_one_rank(by_rank))
    count = skeleton["schedule"]["num_micro_batches"]
    num_rows = skeleton["schedule"].get("micro_batch_size")
    if num_rows is None and count == fleet.accumulate_steps:
        num_rows = fleet.micro_batch_size
    share_parameters(stages.layers)
    described = layers._layers_desc if isinstance(layers, PipelineLayer) else layers  # noqa: SLF001 - of all ranks
    ties = merged_ties(other["ties"] for other in answers)
    placed = Placed(
        by_rank, len(stages.parts) - 1, skeleton, described, stages, ties, StageEdges({}),
        MicroBatchSizes(count, num_rows),
    )  # fmt: skip
    return replace(placed, edges=StageEdges.of(settings.edges, skeleton, placed.layer_names))


def infer(ranks: Ranks, placed: Placed, first_inputs: Callable[[], Any]) -> Planned:
    """Run each stage once on the first micro-batch, and complete the plan with its outputs.

    ``first_inputs`` is called on each rank; the rank of the first stage needs its result.

    Raises:
        PipelineError: a stage fails, its output cannot cross, or the plan has other rows.
    """
    agreement, stages = ranks.agreement, placed.stages
    inputs = agreement.own("first batch", first_inputs)
    entries = described_in_order(agreement, stages.numbers, partial(_inferred, placed, inputs))
    num_rows = int(entries[0]["rows"])
    agreement.gather("sizes", lambda: _require_rows(placed.skeleton, num_rows))
    boundaries = {number: boundary_of(entries[number]) for number in range(placed.num_stages)}
    facts: list[StageFacts] = []
    made: dict[str, dict[str, Any]] = {}
    for n, (_, specs) in boundaries.items():
        outputs, leaving = [spec.plan_entry(num_rows) for spec in specs], placed.edges.leaving(n)
        own = outputs[: len(outputs) - len(leaving)]
        facts.append(StageFacts.whole(n, entries[n]["kind"], entries[n]["parameters"], own, entries[n]["kept"]))
        passed = zip(leaving, outputs[len(own) :], strict=True)
        made |= {name: output for name, output in passed if placed.edges.edges[name][0] == n}
    skeleton = dict(placed.skeleton)
    if not skeleton["model"].get("layers"):
        skeleton.pop("stages", None)
    content = complete_plan(skeleton, facts, placed.ties, num_rows)
    if made and not content.get("edges"):
        content["edges"] = placed.edges.plan_entries(placed.layer_names, made)
    names = names_in_plan(facts, placed.ties)
    return Planned(content, names, boundaries, MicroBatchSizes(placed.sizes.count, num_rows))


def prove(ranks: Ranks, settings: Settings, placed: Placed, planned: Planned) -> TrainedPlan:
    """Lower the plan on every rank, and check it.

    Raises:
        PlanRefused: it is not proved, and ``unsafe`` is not set.
        PipelineError: the layers differ from the plan's, or cannot have one of its keys.
    """
    plan = checked_plan(planned.content, ranks.agreement, "plan", unsafe=settings.unsafe)
    ranks.agreement.gather("supported", lambda: _require_supported(ranks, placed, planned, plan.lowered))
    return plan


def connect(ranks: Ranks, placed: Placed, planned: Planned, plan: TrainedPlan) -> Connected:
    """Make this rank's stages and groups, and give copies of a weight the value of the first holder.

    Raises:
        PipelineError: a weight cannot have a split backward, or the ranks cannot connect.
    """
    lowered = plan.lowered
    modules = ranks.agreement.own("modules", lambda: _module_stages(ranks, placed, planned, lowered))
    world = connect_stages(lowered.graph, ranks.agreement, ranks.store)
    _share_start(world, lowered, modules, ranks.rank)
    return Connected(modules, world)


def device_name() -> str:
    """The plan's name of Paddle's current device."""
    return "cpu" if paddle.device.get_device() == "cpu" else "gpu"


def _request(ranks: Ranks, settings: Settings, layers: PipelineLayer | Sequence[Any]) -> dict[str, Any]:
    require_layers(layers)
    is_cut = isinstance(layers, PipelineLayer)
    if is_cut and (settings.seg_method != "uniform" or settings.num_chunks):
        raise PipelineError("a PipelineLayer is cut already: give seg_method and num_virtual_pipeline_stages to it")
    if is_cut and settings.edges:
        raise PipelineError("Fleet runs the stages of a PipelineLayer, without edges: give Pipeline the list of layers")
    content = None if settings.plan is None else given_plan(settings.plan)
    planned = (content or {}).get("schedule", {})
    if settings.schedule is not None and planned:
        raise PipelineError("the plan has a schedule, and Pipeline has one too: leave out one of the two")
    count = planned.get("num_micro_batches", ranks.fleet.accumulate_steps)
    if settings.num_micro_batches is not None:
        count = settings.num_micro_batches
    if count is None:
        raise PipelineError("give Pipeline a plan, or num_micro_batches")
    if settings.schedule is not None:
        section = schedule_section(settings.schedule)
    elif is_cut:
        section = fleet_schedule(layers, ranks.fleet, count)
    else:
        section = {"kind": "1f1b"}
    asked = Request(content, section, count, "paddle", device_name(), "float32", ranks.num_ranks, 1)
    return {
        "request": asdict(asked),
        "settings": [
            list(ranks.fleet.ranks),
            settings.timeout_s,
            settings.unsafe,
            [[name, *edge] for name, edge in settings.edges.items()],
        ],
    }


def _built(
    ranks: Ranks, settings: Settings, asked: Request, layers: PipelineLayer | Sequence[Any]
) -> tuple[dict[str, Any], StageLayers]:
    if isinstance(layers, PipelineLayer):
        stages: StageLayers = FleetStages(layers)
        stages.losses = settings.losses or stages.losses
        skeleton = asked.skeleton(len(stages.parts) - 1)
        _require_placement(skeleton, stages, ranks.rank, ranks.num_ranks)
        require_tied_on_one_rank(layers._layers_desc, stages)  # noqa: SLF001 - all layers, of other ranks too
        return skeleton, stages
    num_stages = num_stages_of(asked.plan, asked.schedule, ranks.num_ranks, settings.num_chunks)
    skeleton = asked.skeleton(num_stages)
    parts = declared_entries(skeleton, num_stages, len(layers))
    if parts is None:
        method = skeleton.get("stages") if isinstance(skeleton.get("stages"), str) else settings.seg_method
        parts = cut_layers(layers, num_stages, method or "uniform")
    own = placement_of(skeleton, num_stages)[ranks.rank]
    losses: Sequence[LossFunction | None] = settings.losses or (None,)
    stages = ListStages(layers, parts, own, losses)
    require_tied_on_one_rank(layers, stages)
    return skeleton, stages


def _stage_facts(skeleton: Mapping[str, Any], stages: StageLayers) -> dict[str, Any]:
    ties = {key: {str(stage): name for stage, name in names.items()} for key, names in ties_of(stages).items()}
    return {
        "stages": list(stages.numbers),
        "ties": ties,
        "dtype": common_dtype(stages.layers.parameters()),
        "skeleton": skeleton,
    }


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


def _inferred(placed: Placed, inputs: Any, number: int, before: Mapping[str, Any]) -> dict[str, Any]:
    stages = placed.stages
    module, edges = stages.module(number), placed.edges
    value, num_rows = (zeros_of(*_input_of(edges, number, before)), before["rows"]) if before else (
        inputs, rows_of(inputs))  # fmt: skip
    is_last = number == placed.num_stages - 1
    run = run_stage(number, module, placed.call(number), value, is_last=is_last)
    weights = [{"name": name, "shape": list(weight.shape)} for name, weight in trained(module).items()]
    names = [type(item.module).__name__ for item in stages.items(number) if item.module is not None]
    kind = names[0] if len(names) == 1 else "PipelineLayer"
    entry = {**entry_of(run, num_rows), "kind": kind, "parameters": weights}
    made = edges.direct(number, makes=True)
    direct = dict(zip(made, entry["out"][len(entry["out"]) - len(made) :], strict=True))
    return {**entry, "direct": {**before.get("direct", {}), **direct}}


def _input_of(edges: StageEdges, number: int, before: Mapping[str, Any]) -> Boundary:
    """The form and the tensors of a stage's input, by the report of the stage before it."""
    form, specs = boundary_of(before)
    crossing = specs[: len(specs) - len(edges.direct(number - 1, makes=True))]
    used = specs_of([before["direct"][name] for name in edges.direct(number, makes=False)])
    return edges.input_form(number, form, len(specs)), (*crossing, *used)


def _require_rows(skeleton: Mapping[str, Any], num_rows: int) -> None:
    planned = skeleton["schedule"].get("micro_batch_size")
    if planned is not None and planned != num_rows:
        raise PipelineError(f"the plan has schedule.micro_batch_size {planned}, and a micro-batch has {num_rows} rows")


def _require_supported(ranks: Ranks, placed: Placed, planned: Planned, lowered: LoweredPlan) -> None:
    require_supported(lowered.spec)
    numbers, boundaries = placed.stages.numbers, planned.boundaries
    weights = {n: _weights_of(placed, planned, n) for n in numbers}
    require_fits(lowered, ranks.rank, weights, {n: boundaries[n][1] for n in numbers})


def _weights_of(placed: Placed, planned: Planned, number: int) -> dict[str, Tensor]:
    declared = declared_names(placed.stages, number, placed.skeleton)
    if declared is not None:
        return declared
    return {planned.names[number][name]: weight for name, weight in trained(placed.stages.module(number)).items()}


def _module_stages(
    ranks: Ranks, placed: Placed, planned: Planned, lowered: LoweredPlan
) -> dict[int, ModuleStage]:  # fmt: skip
    stages, boundaries = placed.stages, planned.boundaries
    weights = list(trained(stages.layers).values())
    has_split = any(op.kind is OpKind.BACKWARD_WEIGHT for op in lowered.programs[ranks.rank])
    if has_split and any(hasattr(weight, "main_grad") for weight in weights):
        raise PipelineError("weights with main_grad need a schedule without W, such as 1f1b or interleaved")
    split = SplitBackward([stages.layers], weights) if has_split else None
    return {
        number: ModuleStage(
            number,
            stages.module(number),
            placed.call(number),
            Boundaries(
                placed.edges.input_form(number, boundaries[number - 1][0], len(boundaries[number - 1][1]))
                if number
                else None,
                *boundaries[number],
            ),
            stages.losses,
            _weights_of(placed, planned, number),
            num_losses=1 if ranks.fleet.delay_scale_loss else placed.sizes.count,
            split=split,
        )
        for number in stages.numbers
    }


def _share_start(world: StageWorld, lowered: LoweredPlan, modules: Mapping[int, ModuleStage], rank: int) -> None:
    by_ranks = {each.ranks: each for each in world.collectives.values()}
    with paddle.no_grad():
        for holders in sorted(by_ranks):
            for number in sorted(modules):
                for weight in lowered.weights_of(number, rank):
                    if lowered.shared_weights.places(number, weight.name) == holders:
                        by_ranks[holders].broadcast(modules[number].parameters[weight.name], holders[0])
