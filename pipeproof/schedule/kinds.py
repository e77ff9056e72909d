"""Every kind of schedule that a generator makes: what it is called, whose it is, which stages it takes.

Commands, pages and checks read this table; a generator itself knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from pipeproof.schedule.asap import StageCosts, even_costs
from pipeproof.schedule.gpipe import gpipe
from pipeproof.schedule.interleaved import interleaved
from pipeproof.schedule.one_f_one_b import one_f_one_b
from pipeproof.schedule.programs import Schedule


class Placement(StrEnum):
    """Where stages lie: in turn around the ranks, there and back, or each on two ranks from both ends."""

    LOOP = "loop"
    V = "v"
    BOTH_WAYS = "both_ways"


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan asks of a generator; each takes what it needs.

    ``costs`` has the times of every stage, in any unit. ``memory_limit`` is
    the most chunk activations that a rank may hold. ``group_size`` is how many
    micro-batches go through a chunk at a time.
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

    @property
    def stage_costs(self) -> StageCosts:
        """The times of the stages; 1, 1 and 1 where none were given."""
        return self.costs or even_costs(self.num_ranks * self.num_chunks)


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One value of ``schedule.kind``.

    ``min_chunks`` and ``max_chunks`` bound the stages of a rank (None: any
    number). ``variants`` are the tools whose orders differ, the first being
    the default where no backend says otherwise.
    """

    name: str
    title: str
    source: str
    generate: Callable[[Request], Schedule]
    min_chunks: int = 1
    max_chunks: int | None = 1
    placement: Placement = Placement.LOOP
    variants: tuple[str, ...] = ()


_KINDS = (
    ScheduleKind(
        "gpipe",
        "all forwards, then all backwards",
        "Huang et al., GPipe, arXiv:1811.06965",
        lambda r: gpipe(r.num_ranks, r.num_micro_batches),
    ),
    ScheduleKind(
        "1f1b",
        "a short warm-up, then one forward and one backward in turn",
        "Narayanan et al., PipeDream, arXiv:1806.03377; with the flush, arXiv:2104.04473",
        lambda r: one_f_one_b(r.num_ranks, r.num_micro_batches),
    ),
    ScheduleKind(
        "interleaved",
        "1F1B that takes turns between several stages of each rank",
        "Narayanan et al., Megatron-LM, arXiv:2104.04473",
        lambda r: interleaved(r.num_ranks, r.num_micro_batches, r.num_chunks),
        min_chunks=2,
        max_chunks=None,
    ),
)

SCHEDULE_KINDS: Mapping[str, ScheduleKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""``schedule.kind`` to what it is, in the order in which people should read about them."""
