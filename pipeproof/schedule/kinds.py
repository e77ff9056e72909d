"""Table of schedule kinds: name, source, generator and placement of each.

Commands, pages and checks read this table; generators do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.programs import Schedule, StageCosts, UnfitSizesError, even_costs, stages_of
from pipeproof.specs.plan import PlanSpec

VARIANTS = ("torch", "megatron", "fleet", "fleet_fthenb", "fleet_balanced")
"""Variants of interleaved 1F1B; the first is the default."""


class Placement(StrEnum):
    """Placement of stages: round-robin over the ranks, V-shaped, each on two ranks from both ends, or any."""

    LOOP = "loop"
    V = "v"
    BOTH_WAYS = "both_ways"
    ANY = "any"

    @property
    def text(self) -> str:
        """In words, as the end of a sentence."""
        return _PLACEMENT_TEXTS[self]


_PLACEMENT_TEXTS = MappingProxyType(
    {
        Placement.LOOP: "round-robin over the ranks (loop)",
        Placement.V: "in a V, up the ranks and back (v)",
        Placement.BOTH_WAYS: "on two ranks each, from both ends of the pipeline",
        Placement.ANY: "as schedule.placement lists them",
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a plan to a generator; each generator takes the arguments that it needs.

    ``costs`` has the times of every stage, in any unit. ``memory_limit`` is the most chunk activations that a rank may
    hold. ``group_size`` is the number of micro-batches that go through a chunk at a time. ``overlaps`` asks for a
    schedule in which forwards overlap with backwards.
    """

    num_ranks: int
    num_micro_batches: int
    num_chunks: int = 1
    num_sequence_splits: int = 1
    variant: str | None = None
    group_size: int | None = None
    costs: StageCosts | None = None
    memory_limit: int | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    overlaps: bool = False

    @property
    def stage_costs(self) -> StageCosts:
        """The times of the stages; by default 1, 1 and 1."""
        return self.costs or even_costs(sum(map(len, self.stages_of_ranks)))

    @property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The placement; round-robin over the ranks by default."""
        num_stages = self.num_ranks * self.num_chunks
        return self.placement or tuple(tuple(range(rank, num_stages, self.num_ranks)) for rank in range(self.num_ranks))


def _sizes(request: Request) -> tuple[Any, ...]:
    """The arguments of most generators."""
    return request.num_ranks, request.num_micro_batches


def _split_none(num_ranks: int, num_work_items: int) -> int:
    return 0


def _split_all(num_ranks: int, num_work_items: int) -> int:
    return num_work_items


def _split_by_dualpipe_v(num_ranks: int, num_work_items: int) -> int:
    """Rank r splits p - 1 - r backwards of its warm-up and p of its end: p (3p - 1) / 2 over all ranks."""
    return num_ranks * (3 * num_ranks - 1) // 2


def _split_by_dualpipe(num_ranks: int, num_work_items: int) -> int:
    """Two DualPipeV of half the ranks."""
    return 2 * _split_by_dualpipe_v(num_ranks // 2, num_work_items // 2)


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One value of ``schedule.kind``.

    ``min_chunks`` and ``max_chunks`` bound the stages of a rank (None: any number). ``variants`` are the tools whose
    orders differ; the first is the default unless a backend has its own. ``splits_sequences`` means that it works on
    sequence splits.

    ``generator`` names the function that makes it, and the module in ``schedule.generators`` that defines it; the
    default is the name of the kind. ``arguments`` selects the function's arguments from a request. ``split_backwards``
    is the number of backwards that it splits into I and W, by the numbers of ranks and of work items.
    """

    name: str
    title: str
    source: str
    generator: str = ""
    arguments: Callable[[Request], tuple[Any, ...]] = _sizes
    min_chunks: int = 1
    max_chunks: int | None = 1
    placement: Placement = Placement.LOOP
    variants: tuple[str, ...] = ()
    splits_sequences: bool = False
    split_backwards: Callable[[int, int], int] = _split_none

    def num_computations(self, num_ranks: int, num_work_items: int) -> int:
        """The number of operations of a generated schedule, without generating it.

        ``num_work_items`` is stages (copies counted once) times micro-batches times sequence splits.
        """
        return 2 * num_work_items + self.split_backwards(num_ranks, num_work_items)

    def generate(self, request: Request) -> Schedule:
        """The schedule. This loads its generator: a plan needs one generator, and loading all is slow.

        Raises:
            UnfitSizesError: it does not exist for these sizes.
        """
        name = self.generator or self.name
        generator: Callable[..., Schedule] = getattr(import_module(f"pipeproof.schedule.generators.{name}"), name)
        return generator(*self.arguments(request))


_in_a_v = partial(ScheduleKind, min_chunks=2, max_chunks=2, placement=Placement.V)

_KINDS = (
    ScheduleKind(
        "gpipe",
        "all forwards, then all backwards",
        "Huang et al., GPipe, arXiv:1811.06965",
    ),
    ScheduleKind(
        "1f1b",
        "a short warm-up, then alternately one forward and one backward",
        "Narayanan et al., PipeDream, arXiv:1806.03377; with the flush, arXiv:2104.04473",
        generator="one_f_one_b",
        arguments=lambda r: (*_sizes(r), r.overlaps),
    ),
    ScheduleKind(
        "eager_1f1b",
        "1F1B with a warm-up twice as long, which hides transfers",
        "Zhuang et al., On Optimizing the Communication of Model Parallelism, arXiv:2211.05322",
    ),
    ScheduleKind(
        "interleaved",
        "1F1B that alternates between several stages of each rank",
        "Narayanan et al., Megatron-LM, arXiv:2104.04473",
        arguments=lambda r: (*_sizes(r), r.num_chunks, r.variant or VARIANTS[0], r.group_size, r.overlaps),
        min_chunks=2,
        max_chunks=None,
        variants=VARIANTS,
    ),
    ScheduleKind(
        "looped_bfs",
        "each stage of a rank takes all micro-batches before the next stage begins",
        "Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953",
        arguments=lambda r: (*_sizes(r), r.num_chunks, r.placement),
        max_chunks=None,
        placement=Placement.ANY,
    ),
    ScheduleKind(
        "zb_h1",
        "1F1B whose weight gradients fill the end, in the memory of 1F1B",
        "Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1",
        split_backwards=_split_all,
    ),
    ScheduleKind(
        "zb_h2",
        "a longer warm-up and later weight gradients: no rank idles, in about twice the memory",
        "Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.2",
        split_backwards=_split_all,
    ),
    ScheduleKind(
        "interleaved_zb",
        "ZB-H1 that alternates between several stages of each rank",
        "Qi et al., arXiv:2401.10241, on chunks as PyTorch's ScheduleInterleavedZeroBubble has it",
        arguments=lambda r: (*_sizes(r), r.num_chunks),
        min_chunks=2,
        max_chunks=None,
        split_backwards=_split_all,
    ),
    _in_a_v(
        "zb_v",
        "stages in a V: no rank idles, in the memory of 1F1B",
        "Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 6",
        split_backwards=_split_all,
    ),
    _in_a_v(
        "v_half",
        "stages in a V, in half of the memory of 1F1B, for any times of F, I and W that are not far apart",
        "Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
        split_backwards=_split_all,
    ),
    _in_a_v(
        "v_min",
        "stages in a V, in a third of the memory of 1F1B, for equal times of F, I and W",
        "Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
        split_backwards=_split_all,
    ),
    ScheduleKind(
        "dualpipe",
        "both ends feed micro-batches; forwards of one direction overlap with backwards of the other",
        "DeepSeek-V3, arXiv:2412.19437; deepseek-ai/DualPipe",
        placement=Placement.BOTH_WAYS,
        split_backwards=_split_by_dualpipe,
    ),
    _in_a_v(
        "dualpipe_v",
        "DualPipe cut in half: stages in a V, forwards of one direction overlap with backwards of the other",
        "Sea AI Lab and DeepSeek, deepseek-ai/DualPipe; PyTorch and Paddle Fleet have the same order",
        split_backwards=_split_by_dualpipe_v,
    ),
    ScheduleKind(
        "chimera",
        "two 1F1B pipelines in opposite directions through the same ranks",
        "Li and Hoefler, Chimera, arXiv:2107.06925",
        placement=Placement.BOTH_WAYS,
    ),
    ScheduleKind(
        "seq1f1b",
        "1F1B over sequence splits",
        "Sun et al., Seq1F1B, arXiv:2406.03488",
        arguments=lambda r: (*_sizes(r), r.num_sequence_splits),
        splits_sequences=True,
    ),
    ScheduleKind(
        "optimal",
        "the best of many orders for the times of each stage, any placement and a memory limit",
        "greedy; pipeproof schedule show --time-limit improves on it",
        arguments=lambda r: (r.stages_of_ranks, r.num_micro_batches, r.stage_costs, r.memory_limit),
        max_chunks=None,
        placement=Placement.ANY,
        split_backwards=_split_all,
    ),
)

SCHEDULE_KINDS: Mapping[str, ScheduleKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""``schedule.kind`` by name, in the order of the documentation."""


def assigned(schedule: Schedule, placement: Sequence[Sequence[int]]) -> Schedule:
    """The schedule with its ranks in the order of their stages in ``placement``.

    Raises:
        UnfitSizesError: the placement does not put the stages of a schedule's rank together.
    """
    own = stages_of(schedule.programs)
    free = grouped((stages, rank) for rank, stages in enumerate(own))
    order = []
    for rank, wanted in enumerate(placement):
        ranks = free.get(tuple(sorted(wanted)))
        if not ranks:
            raise UnfitSizesError(
                f"rank {rank} has the stages {list(wanted)}, which this schedule does not put on one rank",
                help=f"assign {', '.join(str(list(stages)) for stages in own)} to the ranks in any order, or use "
                "looped_bfs or optimal, which take any placement",
                key=("schedule", "placement"),
            )
        order.append(ranks.pop(0))
    return Schedule(
        tuple(schedule.programs[rank] for rank in order),
        tuple(schedule.pairs[rank] for rank in order) if schedule.pairs else (),
    )


def stages_of_ranks(plan: PlanSpec) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, for a schedule that takes any placement."""
    placement, num_ranks = plan.schedule.placement, plan.topology.pp
    if isinstance(placement, tuple):
        return placement
    chunks = range(plan.schedule.num_chunks)
    reverses = placement == "v"
    return tuple(
        tuple(chunk * num_ranks + (num_ranks - 1 - rank if reverses and chunk % 2 else rank) for chunk in chunks)
        for rank in range(num_ranks)
    )


def ends_share_ranks(plan: PlanSpec) -> bool:
    """True if all ranks that hold the last stage also hold the first; False for a schedule from a file."""
    schedule, last = plan.schedule, plan.num_stages - 1
    if isinstance(schedule.placement, tuple):
        return all(0 in stages for stages in schedule.placement if last in stages)
    kind = SCHEDULE_KINDS.get(schedule.kind)
    natural = Placement.ANY if kind is None else kind.placement
    if plan.topology.pp == 1 or natural is Placement.BOTH_WAYS:
        return True
    reverses = natural is Placement.V or schedule.placement == "v"
    return reverses and schedule.num_chunks % 2 == 0


# Variants and sizes for which each kind of schedule exists; readable without loading a generator.
#
# A condition is a Python expression in ``p`` (ranks) and ``m`` (micro-batches);
# the tests compare it with what the generators refuse.


ANY_SIZES = "any"
"""In place of a condition: any number of ranks and micro-batches fits."""

_ROUNDS = "m % max(1, m // p) == 0"

_CONDITIONS: Mapping[tuple[str, str | None], str] = MappingProxyType(
    {
        ("interleaved", "torch"): _ROUNDS,
        ("interleaved", "megatron"): "m % p == 0",
        ("interleaved", "fleet"): "m == p or m >= 2 * p",
        ("interleaved", "fleet_fthenb"): "m == p",
        ("interleaved", "fleet_balanced"): "m >= p",
        ("interleaved_zb", None): _ROUNDS,
        ("dualpipe", None): "p % 2 == 0 and m % 2 == 0 and m >= 2 * p",
        ("dualpipe_v", None): "m >= 2 * p",
        ("chimera", None): "p % 2 == 0",
    }
)


def sizes_of(kind: str, variant: str | None = None) -> str:
    """The condition of a kind, or of one of its variants; ``ANY_SIZES`` without a condition."""
    return _CONDITIONS.get((kind, variant), ANY_SIZES)
