"""Candidate plans: other schedules, chunk counts and micro-batch counts for the work of a given plan.

A candidate is a whole plan, so the plan that is timed, verified and written
down is the same one. It has the model, the ranks and the global batch of the
given plan. The times of its stages are derived:

- a layer takes the time that it takes in the given plan (``recut`` derives it from the times of stages);
- a micro-batch of half the sequences takes half the time: the lower efficiency of small kernels is unknown here;
- a message takes the given latency for any size.

Times that the plan computes (``cost.analytic``) are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any

from pipeproof.analysis.advise.recut import layer_times, num_blocks, stage_times
from pipeproof.analysis.advise.schedule_figures import block_sequences
from pipeproof.analysis.tune.frameworks import Framework
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, ScheduleKind
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.pipeline_checks import GENERATED_WITH_PAIRS, check_overlap
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import counts_in_even_cut, layer_order
from pipeproof.stages.describe.model_family import stage_layers

MAX_SPLITS = 8
"""Most pieces of a sequence that are tried."""

MAX_FORWARDS = 100_000
"""Most forwards of a step with more micro-batches than the plan has."""

_OPTIMAL, _MAX_OPTIMAL_CHUNKS = "optimal", 2
"""The kind that is made for given times and a memory limit. To make one takes as long as to make many others, so it is
tried with the plan's own micro-batches only, and with few chunks."""

_CHOSEN = (
    "kind", "variant", "path", "format", "programs", "num_micro_batches", "micro_batch_size", "num_chunks",
    "micro_batch_group_size", "num_sequence_splits", "placement", "memory_limit", "overlap",
)  # fmt: skip
"""Keys of the schedule that a candidate replaces."""
_TIMES = ("forward_us", "backward_us", "backward_input_us", "backward_weight_us", "overlapped_us")
"""The keys of the cost section that have a time for each stage."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Schedule of a candidate."""

    kind: str
    num_chunks: int
    num_micro_batches: int
    micro_batch_size: int
    num_sequence_splits: int = 1
    variant: str | None = None
    placement: str | None = None
    memory_limit: int | None = None
    overlap: Any = None
    """The value in a plan; None without one."""


class Changed(Enum):
    """Changes of a candidate in addition to the order of work; each one has a cost for its user."""

    MICRO_BATCHES = "micro-batches"
    SPLITS = "splits"
    CHUNKS = "chunks"
    COPIES = "copies"


class Candidates:
    """The candidates for one plan.

    ``memory_limit`` is in activations of the plan's largest stage for one of
    its micro-batches. ``room`` is the same in activations of a transformer
    block for one sequence, and ``activation`` the size of one of the former.
    ``spec`` is the plan, ``data`` the plan as it would be written;
    ``has_copies`` is true if its schedule has every stage on two ranks.
    ``framework`` is the one whose schedules are tried; None for all schedules.
    """

    def __init__(
        self,
        loaded: LoadedPlan,
        memory_limit: int | None,
        *,
        has_copies: bool = False,
        framework: Framework | None = None,
    ) -> None:
        self.spec = loaded.spec
        self.framework = framework
        self._has_copies = has_copies
        self._layers = stage_layers(loaded.spec)
        self._costs: dict[tuple[int, int], dict[str, Any]] = {}
        self.data: Mapping[str, Any] = loaded.spec.model_dump(mode="json", exclude_unset=True)
        self.activation = max(block_sequences(loaded.spec))
        self.room = None if memory_limit is None else memory_limit * self.activation

    def choices(self, held: Fraction | None) -> Iterator[Choice]:
        """Everything to try, in the order of the schedules.

        ``held`` is the given plan's own peak (None if it never ends): where no
        limit is given, a schedule that is made for one is tried with that too.
        """
        for kind in SCHEDULE_KINDS.values():
            for num_micro_batches, size in self._batches:
                for num_chunks in self._chunk_counts(kind):
                    is_more = num_micro_batches > self.spec.schedule.num_micro_batches
                    if is_more and self.spec.topology.pp * num_chunks * num_micro_batches > MAX_FORWARDS:
                        continue
                    choice = self._of_framework(Choice(kind.name, num_chunks, num_micro_batches, size))
                    if choice is not None:
                        yield from self._variations(kind, choice, held)

    def _of_framework(self, choice: Choice) -> Choice | None:
        """A choice with the framework's variant of its kind; None if the framework does not run it."""
        if self.framework is None:
            return choice
        own = self.framework.schedule_of(
            choice.kind, self.spec.topology.pp, choice.num_micro_batches, choice.num_chunks, self.spec.schedule.variant
        )
        return None if own is None else replace(choice, variant=own.variant)

    def changes(self, choice: Choice) -> frozenset[Changed]:
        """Changes of a choice in addition to the order of work."""
        given, num_ranks = self.spec.schedule, self.spec.topology.pp
        changed = {
            Changed.MICRO_BATCHES: choice.num_micro_batches != given.num_micro_batches,
            Changed.SPLITS: choice.num_sequence_splits != given.num_sequence_splits,
            Changed.CHUNKS: choice.num_chunks * num_ranks != self.spec.num_stages,
            Changed.COPIES: SCHEDULE_KINDS[choice.kind].placement is Placement.BOTH_WAYS and not self._has_copies,
        }
        return frozenset(what for what, is_changed in changed.items() if is_changed)

    def plan_of(self, choice: Choice) -> PlanSpec:
        """The whole plan of a choice.

        Raises:
            BadPlanError: there is no such plan, or its layers cannot be cut so.
        """
        data = dict(self.data)
        data["schedule"] = self._schedule(choice)
        num_stages = self.spec.topology.pp * choice.num_chunks
        if num_stages != self.spec.num_stages:
            data.pop("stages", None)
        given = self.spec.num_stages, self.spec.schedule.micro_batch_size
        if (num_stages, choice.micro_batch_size) != given and self.spec.cost.analytic is None:
            data["cost"] = self._cost(data, num_stages, choice.micro_batch_size)
        return plan_from_dict(data).spec

    def _schedule(self, choice: Choice) -> dict[str, Any]:
        given = self.data["schedule"]
        own = ("variant", "micro_batch_group_size") if choice.kind == given["kind"] else ()
        chosen = {
            "kind": choice.kind,
            **{key: given[key] for key in own if key in given},
            **({} if choice.variant is None else {"variant": choice.variant}),
            "num_micro_batches": choice.num_micro_batches,
            "micro_batch_size": choice.micro_batch_size,
            "num_chunks": choice.num_chunks if choice.num_chunks > 1 else None,
            "num_sequence_splits": choice.num_sequence_splits if choice.num_sequence_splits > 1 else None,
            "placement": choice.placement,
            "memory_limit": choice.memory_limit,
            "overlap": choice.overlap,
        }
        if choice.overlap is not None and choice.kind == "interleaved":
            chosen["variant"] = "megatron"  # no other has pairs
        if "memory_limit" in given and choice.memory_limit is None and self.room is not None:
            chosen["memory_limit"] = max(1, int(self.room // self._largest_activation(choice)))
        kept = {key: value for key, value in given.items() if key not in _CHOSEN}
        return {**{key: value for key, value in chosen.items() if value is not None}, **kept}

    def _cost(self, data: Mapping[str, Any], num_stages: int, size: int) -> dict[str, Any]:
        """The cost section with the times of other stages, or of other micro-batches."""
        if (num_stages, size) not in self._costs:
            given = self.data.get("cost", {})
            cost = {key: value for key, value in given.items() if key not in _TIMES}
            share = Fraction(size, self.spec.schedule.micro_batch_size)
            is_recut = num_stages != self.spec.num_stages
            stages = stage_layers(plan_from_dict({**data, "cost": {}}).spec) if is_recut else self._layers
            for name, times in self._times().items():
                recut = stage_times(stages, layer_times(self._layers, times)) if is_recut else times
                scaled = [_written(time * share) for time in recut]
                cost[name] = scaled if len(set(scaled)) > 1 else scaled[0]
            if is_recut and isinstance(
                self.spec.cost.optimizer_us, tuple
            ):  # it depends on the weights, not on the micro-batch
                updates = stage_times(stages, layer_times(self._layers, self.spec.cost.optimizer_us))
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
        num, size = schedule.num_micro_batches, schedule.micro_batch_size
        fixed = schedule.last_micro_batch_size is not None or schedule.seq_lengths is not None
        fixed = fixed or self.spec.is_custom  # whose data come in micro-batches as they are
        if fixed or any(boundary.shape is not None for boundary in self.spec.boundaries):
            return [(num, size)]
        coarser = [(num // factor, size * factor) for factor in _divisors(num)]
        return coarser + [(num * factor, size // factor) for factor in _divisors(size) if factor > 1]

    def _chunk_counts(self, kind: ScheduleKind) -> list[int]:
        """The numbers of chunks that a schedule takes and that the layers can be cut into.

        These divide the blocks of a rank; what takes one number only gets it where there are as many blocks.
        """
        num_ranks, num_stages = self.spec.topology.pp, self.spec.num_stages
        counts = set() if num_stages % num_ranks else {num_stages // num_ranks}
        per_rank = sum(map(counts_in_even_cut, layer_order(self.spec.gpt))) // num_ranks if self._can_be_recut else 0
        if per_rank:
            counts |= {*_divisors(per_rank)} | {count for count in (kind.min_chunks,) if count <= per_rank}
        most = kind.max_chunks or max(counts, default=0)
        return [count for count in sorted(counts) if kind.min_chunks <= count <= most]

    @cached_property
    def _can_be_recut(self) -> bool:
        """True if the plan's stages have all layers, and no key describes a single edge between them."""
        if self.spec.is_custom:  # of which nobody knows what each takes
            return False
        given = sorted(name for names in self._layers for name in names)
        known = sorted(layer_order(self.spec.gpt))
        return given == known and all(self._layers) and all(b.edge is None for b in self.spec.boundaries)

    def _variations(self, kind: ScheduleKind, base: Choice, held: Fraction | None) -> Iterator[Choice]:
        """The same sizes with the splits, placements and memory limits that a schedule takes."""
        is_free = kind.placement is Placement.ANY and base.num_chunks > 1 and self.framework is None
        placements = (None, "v") if is_free else (None,)
        length = self.spec.model.seq_length
        splits = [n for n in range(2, MAX_SPLITS + 1) if length % n == 0] if kind.splits_sequences else [1]
        limits = self._limits(base, held) if kind.name == _OPTIMAL else [None]
        for placement, num_splits, limit, overlap in product(placements, splits, limits, self._overlaps(kind.name)):
            yield replace(
                base, placement=placement, num_sequence_splits=num_splits, memory_limit=limit, overlap=overlap
            )

    def _overlaps(self, kind: str) -> tuple[Any, ...]:
        """The values of ``schedule.overlap`` for a kind: what is given, and none; else pairs where they hide anything.

        Of a framework, only those that it has.
        """
        given = self.data["schedule"].get("overlap")
        if kind not in GENERATED_WITH_PAIRS or not self._can_overlap:
            return (None,)
        if given not in (None, "none"):
            return (given, None)
        if self.spec.is_custom:
            return (None,)
        has_pairs = self.framework is None or kind in self.framework.kinds_that_overlap
        return (None, "pairs") if has_pairs else (None,)

    @cached_property
    def _can_overlap(self) -> bool:
        """True if the plan may have pairs that take turns, with another kind of schedule."""
        update = {"kind": "dualpipe", "overlap": "pairs"}
        other = self.spec.model_copy(update={"schedule": self.spec.schedule.model_copy(update=update)})
        return not check_overlap(other)

    def _limits(self, base: Choice, held: Fraction | None) -> list[int | None]:
        """The memory limits to make a schedule for: the given one; without it, what the plan holds, and none."""
        changes = self.changes(base)
        if Changed.MICRO_BATCHES in changes or (Changed.CHUNKS in changes and base.num_chunks > _MAX_OPTIMAL_CHUNKS):
            return []
        one = self._largest_activation(base)
        if self.room is not None:
            return [int(self.room // one)]
        return [None] if held is None else [int(held // one), None]

    def _largest_activation(self, choice: Choice) -> int:
        """An activation of a choice's largest stage, in those of a block for one sequence."""
        num_stages = self.spec.topology.pp * choice.num_chunks
        given = max(1, *map(num_blocks, self._layers))
        blocks = given if num_stages == self.spec.num_stages else ceil(self.spec.gpt.num_layers / num_stages)
        return blocks * choice.micro_batch_size


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _written(time: Fraction) -> int | str:
    """A time as a plan has it."""
    return time.numerator if time.denominator == 1 else str(time)
