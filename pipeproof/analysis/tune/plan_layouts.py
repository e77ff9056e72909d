"""Layouts on a plan's own ranks: other schedules, chunks, micro-batches and splits for its work.

A layout has the model, the mesh, the global batch and the memory settings of the plan. Times that the plan computes
(``cost.analytic``) are computed for each layout. Given times move with the work:

- a layer takes the same time as in the given plan (``repartition`` derives it from the times of stages);
- a micro-batch of half the sequences takes half the time. Kernels on small inputs take longer, so other micro-batches
  and splits are tried only if ``fix`` names them;
- a message takes the given latency for any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Any

from pipeproof.analysis.sweep.evaluate_point import num_sequences
from pipeproof.analysis.tune.frameworks import Framework
from pipeproof.analysis.tune.layouts import MAX_FORWARDS, Bound, Layout, chunk_counts_of, divisors
from pipeproof.analysis.tune.present_step import PresentStep, present_step
from pipeproof.analysis.tune.repartition import layer_times, num_blocks, stage_times
from pipeproof.analysis.tune.step_clock import asap_clock, block_sequences, figures_of
from pipeproof.comm.generated_schedule import plan_schedule
from pipeproof.comm.lower import with_measured_times
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement
from pipeproof.specs.exact_times import TIME_KEYS
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.pipeline_checks import GENERATED_WITH_PAIRS, check_overlap
from pipeproof.stages.describe.layer import counts_in_even_cut, layer_order
from pipeproof.stages.describe.model_family import stage_layers

FIXABLE = ("vpp", "mbs", "splits", "schedule", "overlap")
"""Names that ``fix`` takes."""

MAX_SPLITS = 8
"""Most pieces of a sequence that are tried unless ``fix`` names more."""

MAX_BATCHES = 16
"""Micro-batch sizes that are tried unless ``fix`` names them: those nearest to the given one."""

MAX_BOUNDED_FORWARDS = 2_000_000
"""Forwards of all layouts that are tried: the bound of a layout takes its schedule, some 20 us for each forward."""

_OPTIMAL, _MAX_OPTIMAL_CHUNKS = "optimal", 2
"""The kind that is made for given times and a memory limit. Making one takes as long as making many others, so it is
tried with the plan's own micro-batches only, and with few chunks."""

_CHOSEN = (
    "kind", "variant", "path", "format", "programs", "num_micro_batches", "micro_batch_size", "num_chunks",
    "micro_batch_group_size", "num_sequence_splits", "placement", "memory_limit", "overlap",
)  # fmt: skip
"""Keys of the schedule that a layout replaces."""
_TIMES = (*TIME_KEYS, "overlapped_us")
"""The keys of the cost section that have a time for each stage."""


class PlanLayouts:
    """The layouts of one plan on its own ranks, with the step of the unchanged plan (``present``).

    ``fix`` has the allowed values of the names in ``FIXABLE``. ``schedule.memory_limit`` of the plan is in activations
    of its largest stage for one of its micro-batches; layouts that hold more are left out.

    Raises:
        BadPlanError: the plan itself cannot be lowered, or its ``cost.p2p`` is not simulated.
        TuneError: the plan has no backwards.
    """

    def __init__(self, loaded: LoadedPlan, framework: Framework, fix: Mapping[str, Sequence[Any]]) -> None:
        self.framework, self.fix = framework, fix
        self.removed: Counter[str] = Counter()
        self.present: PresentStep = present_step(loaded)
        self.spec = with_measured_times(loaded).spec  # other cuts are computed from these, as from given times
        self.num_gpus, self.global_batch = self.spec.topology.num_ranks, num_sequences(self.spec)
        self.seq_length, self.cost_source = self.spec.model.seq_length, loaded.spec.cost_source
        analytic = self.spec.cost.analytic
        self.device = None if analytic is None else str(analytic.device)
        self.data: Mapping[str, Any] = self.spec.model_dump(mode="json", exclude_unset=True)
        self._layers = stage_layers(self.spec)
        self._costs: dict[tuple[int, int], dict[str, Any]] = {}
        limit = self.spec.schedule.memory_limit
        self._room = None if limit is None else limit * max(block_sequences(self.spec))

    @property
    def slowest_us(self) -> Fraction | None:
        """The time of the plan's step, which no layout may exceed; None if it never ends or is over its limit."""
        figures = self.present.figures
        is_over = self._room is not None and figures is not None and figures.peak > self._room
        return None if is_over else self.present.step_us

    def layouts(self) -> Iterator[Layout]:
        """Yield everything to try, the micro-batches of the plan first."""
        num_ranks, declared = self.spec.topology.pp, self.spec.schedule
        num_forwards = 0
        for num_micro_batches, size in self._batches:
            for schedule in self.framework.schedules:
                if not (self._allows("schedule", schedule.kind) and schedule.fits(num_ranks, num_micro_batches)):
                    continue
                for vpp in chunk_counts_of(schedule, self._chunk_counts(schedule.kind)):
                    if (
                        num_micro_batches > declared.num_micro_batches
                        and num_ranks * vpp * num_micro_batches > MAX_FORWARDS
                    ):
                        continue
                    sizes = vpp, size, num_micro_batches
                    for layout in self._variations(schedule.kind, schedule.variant, sizes, overlaps=schedule.overlaps):
                        if num_forwards > MAX_BOUNDED_FORWARDS:
                            self.removed[f"after {MAX_BOUNDED_FORWARDS:,} forwards of others"] += 1
                        else:
                            num_forwards += layout.num_forwards
                            yield layout

    def bound(self, layout: Layout, limit_bytes: float) -> Bound | None:
        """The time of a layout's computations alone; None if there is no such plan.

        If collectives are hidden, ``cost.analytic`` may have a shorter step; given times do not.
        """
        try:
            spec = plan_from_dict(self.plan_of(layout)).spec
            clock = asap_clock(plan_schedule(spec), spec)
        except BadPlanError:
            return None
        figures = figures_of(clock, block_sequences(spec))
        is_over = self._room is not None and figures.peak > self._room
        return Bound(float(figures.makespan_us), inf if is_over else 0.0)

    def plan_of(self, layout: Layout) -> dict[str, Any]:
        """The whole plan of a layout.

        Raises:
            BadPlanError: its layers do not have such a cut.
        """
        data = dict(self.data)
        data["schedule"] = self._schedule(layout)
        if layout.num_stages != self.spec.num_stages:
            data.pop("stages", None)
        declared = self.spec.num_stages, self.spec.schedule.micro_batch_size
        if (layout.num_stages, layout.mbs) != declared and self.spec.cost.analytic is None:
            data["cost"] = self._cost(data, layout.num_stages, layout.mbs)
        return data

    def notes(self, layouts: Sequence[Layout]) -> Iterator[str]:
        """Sentences about the times and needs of some layouts."""
        declared = self.spec.schedule
        if self.spec.cost.analytic is None:
            if any(layout.num_stages != self.spec.num_stages for layout in layouts):
                yield "Costs are per layer: stages of another partition take the times of their layers in this plan."
            if any((layout.mbs, layout.num_sequence_splits) != (declared.micro_batch_size, declared.num_sequence_splits)
                   for layout in layouts):  # fmt: skip
                yield "Times are taken to be in proportion to tokens; kernels on small inputs take longer."
        both_ways = [kind for kind in dict.fromkeys(layout.kind for layout in layouts)
                     if SCHEDULE_KINDS[kind].placement is Placement.BOTH_WAYS and kind != declared.kind]  # fmt: skip
        if both_ways:
            yield f"{' and '.join(both_ways)}: every stage is on two ranks, with its weights on both."

    def _schedule(self, layout: Layout) -> dict[str, Any]:
        declared = self.data["schedule"]
        own = ("variant", "micro_batch_group_size") if layout.kind == declared["kind"] else ()
        chosen = {
            "kind": layout.kind,
            **{key: declared[key] for key in own if key in declared},
            **({} if layout.variant is None else {"variant": layout.variant}),
            "num_micro_batches": layout.num_micro_batches,
            "micro_batch_size": layout.mbs,
            "num_chunks": layout.vpp if layout.vpp > 1 else None,
            "num_sequence_splits": layout.num_sequence_splits if layout.num_sequence_splits > 1 else None,
            "placement": layout.placement,
            "memory_limit": layout.memory_limit,
            "overlap": {"none": None, self._given_overlap: declared.get("overlap")}.get(layout.overlap, layout.overlap),
        }
        if layout.overlap != "none" and layout.kind == "interleaved":
            chosen["variant"] = "megatron"  # no other has pairs
        if "memory_limit" in declared and layout.memory_limit is None and self._room is not None:
            chosen["memory_limit"] = max(1, int(self._room // self._largest_activation(layout.vpp, layout.mbs)))
        kept = {key: value for key, value in declared.items() if key not in _CHOSEN}
        return {**{key: value for key, value in chosen.items() if value is not None}, **kept}

    def _cost(self, data: Mapping[str, Any], num_stages: int, size: int) -> dict[str, Any]:
        """The cost section with the times of other stages, or of other micro-batches."""
        if (num_stages, size) not in self._costs:
            declared = self.spec.cost
            cost = {key: value for key, value in self.data.get("cost", {}).items() if key not in _TIMES}
            share = Fraction(size, self.spec.schedule.micro_batch_size)
            is_repartitioned = num_stages != self.spec.num_stages
            stages = stage_layers(plan_from_dict({**data, "cost": {}}).spec) if is_repartitioned else self._layers
            for name, times in self._times().items():
                moved = stage_times(stages, layer_times(self._layers, times)) if is_repartitioned else times
                scaled = [_written(time * share) for time in moved]
                cost[name] = scaled if len(set(scaled)) > 1 else scaled[0]
            if is_repartitioned and isinstance(declared.optimizer_us, tuple):  # it depends only on the weights
                updates = stage_times(stages, layer_times(self._layers, declared.optimizer_us))
                cost["optimizer_us"] = [_written(time) for time in updates]
            self._costs[num_stages, size] = cost
        return self._costs[num_stages, size]

    def _times(self) -> dict[str, list[Fraction]]:
        """The given plan's times by stage, by key."""
        cost, stages = self.spec.cost, range(self.spec.num_stages)
        times = {"forward_us": [cost.forward_of(stage) for stage in stages]}
        if cost.backward_input_us is None:
            times["backward_us"] = [cost.backward_of(stage) for stage in stages]
        else:
            times["backward_input_us"] = [cost.backward_input_of(stage) for stage in stages]
            times["backward_weight_us"] = [cost.backward_weight_of(stage) for stage in stages]
        if cost.overlapped_us is not None:
            times["overlapped_us"] = [cost.overlapped_of(stage, stage) for stage in stages]
        return times

    @cached_property
    def _batches(self) -> list[tuple[int, int]]:
        """Numbers of micro-batches and their sizes that make the same global batch, the given ones first."""
        schedule = self.spec.schedule
        declared = schedule.num_micro_batches, schedule.micro_batch_size
        is_fixed = schedule.last_micro_batch_size is not None or schedule.seq_lengths is not None
        is_fixed = is_fixed or self.spec.is_custom  # the sizes of its micro-batches are fixed by the data
        if is_fixed or any(boundary.shape is not None for boundary in self.spec.boundaries):
            return [declared] if self._allows("mbs", schedule.micro_batch_size) else []
        if self.spec.cost.analytic is None and "mbs" not in self.fix:
            return [declared]
        total = declared[0] * declared[1]
        sizes = [size for size in divisors(total) if size != declared[1]]
        if "mbs" not in self.fix:
            nearest = sorted(sizes, key=lambda size: max(size, declared[1]) / min(size, declared[1]))
            if nearest[MAX_BATCHES:]:
                self.removed["a size of micro-batches far from the given one"] += len(nearest[MAX_BATCHES:])
            sizes = sorted(nearest[:MAX_BATCHES])
        others = [(total // size, size) for size in sizes]
        return [batch for batch in (declared, *others) if self._allows("mbs", batch[1])]

    def _chunk_counts(self, kind: str) -> list[int]:
        """Numbers of stages of a rank: the divisors of its blocks, and the least number of the schedule."""
        num_ranks, num_stages = self.spec.topology.pp, self.spec.num_stages
        counts = set() if num_stages % num_ranks else {num_stages // num_ranks}
        per_rank = sum(map(counts_in_even_cut, layer_order(self.spec.gpt))) // num_ranks if self._can_repartition else 0
        if per_rank:
            least = SCHEDULE_KINDS[kind].min_chunks
            counts |= {*divisors(per_rank)} | ({least} if least <= per_rank else set())
        return [count for count in sorted(counts) if self._allows("vpp", count)]

    @cached_property
    def _can_repartition(self) -> bool:
        """True if the plan's stages have all layers, and no key describes a single edge between them."""
        if self.spec.is_custom:  # the times of its layers are not known
            return False
        declared = sorted(name for names in self._layers for name in names)
        expected = sorted(layer_order(self.spec.gpt))
        return declared == expected and all(self._layers) and all(b.edge is None for b in self.spec.boundaries)

    def _variations(
        self, kind: str, variant: str | None, sizes: tuple[int, int, int], *, overlaps: bool
    ) -> Iterator[Layout]:
        """The same sizes with the splits, placements, memory limits and overlaps of a schedule."""
        vpp, size, num_micro_batches = sizes
        axes, memory = self.spec.topology, self.spec.memory
        is_free = SCHEDULE_KINDS[kind].placement is Placement.ANY and vpp > 1 and self.framework.name == "any"
        limits = self._limits(vpp, size) if kind == _OPTIMAL else [None]
        choices = product((None, "v") if is_free else (None,), self._splits(kind), limits,
                          self._overlaps(kind, overlaps=overlaps))  # fmt: skip
        cut = "even" if vpp * axes.pp != self.spec.num_stages or not self.spec.stages else "given"
        for placement, num_splits, limit, overlap in choices:
            yield Layout(
                axes.pp, vpp, axes.tp, axes.cp, axes.ep, axes.dp, size, num_micro_batches, kind, variant, cut,
                memory.recompute, memory.shard_optimizer, overlap, placement, num_splits, limit,
            )  # fmt: skip

    def _splits(self, kind: str) -> list[int]:
        """Numbers of pieces of a sequence."""
        own = self.spec.schedule.num_sequence_splits
        if not SCHEDULE_KINDS[kind].splits_sequences:
            return [1] if own == 1 or self._tries_splits else []
        if not self._tries_splits:
            return [own] if own > 1 else []
        length = self.spec.model.seq_length
        most = length if "splits" in self.fix else MAX_SPLITS
        return [n for n in range(2, most + 1) if length % n == 0 and self._allows("splits", n)]

    @property
    def _tries_splits(self) -> bool:
        return self.spec.cost.analytic is not None or "splits" in self.fix

    def _overlaps(self, kind: str, *, overlaps: bool) -> list[str]:
        """Values of ``schedule.overlap``: the given one and none; without it, pairs where they hide anything."""
        others = []
        if kind in GENERATED_WITH_PAIRS and self._can_overlap:
            if self._given_overlap != "none":
                others = [self._given_overlap]
            elif overlaps and not self.spec.is_custom:
                others = ["pairs"]
        return [overlap for overlap in ("none", *others) if self._allows("overlap", overlap)]

    @property
    def _given_overlap(self) -> str:
        schedule = self.spec.schedule
        return schedule.overlap if isinstance(schedule.overlap, str) else ",".join(schedule.overlap)

    @cached_property
    def _can_overlap(self) -> bool:
        """True if the plan may have alternating pairs, with another kind of schedule."""
        update = {"kind": "dualpipe", "overlap": "pairs"}
        schedule = self.spec.schedule.model_copy(update=update)
        return not any(check_overlap(self.spec.model_copy(update={"schedule": schedule})))

    def _limits(self, vpp: int, size: int) -> list[int | None]:
        """The memory limits of schedules: the given one; without it, the plan's own maximum, and none."""
        is_repartitioned = vpp * self.spec.topology.pp != self.spec.num_stages
        if size != self.spec.schedule.micro_batch_size or (is_repartitioned and vpp > _MAX_OPTIMAL_CHUNKS):
            return []
        one = self._largest_activation(vpp, size)
        if self._room is not None:
            return [int(self._room // one)]
        figures = self.present.figures
        return [None] if figures is None else [int(figures.peak // one), None]

    def _largest_activation(self, vpp: int, size: int) -> int:
        """An activation of the largest stage, in units of one block's activation for one sequence."""
        num_stages = self.spec.topology.pp * vpp
        most_blocks = max(1, *map(num_blocks, self._layers))
        blocks = most_blocks if num_stages == self.spec.num_stages else ceil(self.spec.gpt.num_layers / num_stages)
        return blocks * size

    def _allows(self, name: str, value: object) -> bool:
        return name not in self.fix or value in self.fix[name]


def _written(time: Fraction) -> int | str:
    """A time as it is written in a plan."""
    return time.numerator if time.denominator == 1 else str(time)
