"""A schedule for given sizes and times, as shown on the pages of schedules, and the command that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.programs import Schedule, StageCosts, Time, Timed, asap

Times = Time | tuple[Time, ...]
"""One time for all stages, or one for each stage."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of schedule with sizes and times.

    Args:
        p: ranks.
        m: micro-batches.
        v: stages of a rank; None for the fewest that the kind supports.
        k: splits of a sequence.
        f, i, w: times of a micro-batch on a stage: F, and the two parts of a backward.
        c: time of a message between two ranks.
        d: time of a forward overlapped with a whole backward; None for the sum of the two.
    """

    kind: str
    p: int = 4
    m: int = 8
    v: int | None = None
    k: int = 1
    f: Times = 1
    i: Times = 1
    w: Times = 1
    c: Time = 0
    d: Time | None = None
    variant: str | None = None
    memory_limit: int | None = None

    @property
    def num_chunks(self) -> int:
        """Stages of a rank."""
        return SCHEDULE_KINDS[self.kind].min_chunks if self.v is None else self.v

    @property
    def costs(self) -> StageCosts:
        """Times by stage, of one split of a sequence if sequences are split."""
        num_stages = self.p * self.num_chunks
        forward, inputs, weights = (_by_stage(times, num_stages, self.k) for times in (self.f, self.i, self.w))
        overlapped = None if self.d is None else _by_stage(self.d, num_stages, self.k)
        return StageCosts(forward, inputs, weights, self.c, overlapped)

    def schedule(self) -> Schedule:
        """Return the schedule.

        Raises:
            UnfitSizesError: the kind has no schedule for these sizes.
        """
        kind = SCHEDULE_KINDS[self.kind]
        variant = self.variant or next(iter(kind.variants), None)
        request = Request(
            self.p, self.m, self.num_chunks, self.k, variant,
            costs=self.costs, memory_limit=self.memory_limit,
        )  # fmt: skip
        return kind.generate(request)

    def timed(self) -> Timed:
        """Return the schedule with each computation as early as possible."""
        return asap(self.schedule(), self.costs)

    def command(self, *further: str) -> tuple[str, ...]:
        """Return the command line that shows this case."""
        words = ["pipeproof", "schedule", "show", self.kind, "-p", str(self.p), "-m", str(self.m)]
        return (*words, *self._options(), *further)

    def _options(self) -> Iterator[str]:
        kind = SCHEDULE_KINDS[self.kind]
        if self.num_chunks != kind.min_chunks:
            yield from ("-v", str(self.num_chunks))
        if self.variant is not None and self.variant != kind.variants[0]:
            yield from ("--set", f"schedule.variant={self.variant}")
        if self.k > 1:
            yield from ("--set", f"schedule.num_sequence_splits={self.k}")
        if self.memory_limit is not None:
            yield from ("--set", f"schedule.memory_limit={self.memory_limit}")
        if (self.f, self.i, self.w) != (1, 1, 1):
            for name, time in (("forward", self.f), ("backward_input", self.i), ("backward_weight", self.w)):
                yield from ("--set", f"cost.{name}_us={_text(time)}")
        if self.d is not None:
            yield from ("--set", f"cost.overlapped_us={self.d}")
        if self.c:
            yield from ("--set", f"cost.p2p_latency_us={self.c}")


def _by_stage(times: Times, num_stages: int, share: int) -> tuple[Time, ...]:
    each = times if isinstance(times, tuple) else (times,) * num_stages
    return tuple(Fraction(time) / share for time in each)


def _text(times: Times) -> str:
    return f"[{', '.join(map(str, times))}]" if isinstance(times, tuple) else str(times)
