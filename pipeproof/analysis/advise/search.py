"""The search: every candidate is timed, the best are verified, and what is listed has passed.

Candidates are tried in the order of their times, so that only those that may
be listed are checked. Where sends wait for their receives (``cost.p2p``), a
candidate's time is known only when the reference model has run it; the time
without such waits bounds it from below, and decides who is tried next.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from pipeproof.analysis.advise.candidates import Candidates, Changed, Choice
from pipeproof.analysis.advise.critical_path import CriticalPath
from pipeproof.analysis.advise.receive_timing import OtherPost, other_posts
from pipeproof.analysis.advise.schedule_figures import Clock, Figures, asap_clock, block_sequences, clock_of, figures_of
from pipeproof.analysis.tune.frameworks import Framework, named_framework
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.generated_schedule import generating_pair_time, plan_schedule
from pipeproof.comm.lower import blaming_plan, with_measured_times
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.sim_codes import SimulationError
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.check_plan import check
from pipeproof.verify.deadlock.deadlock_verdict import conditions

MAX_REFUSED = 20
"""Candidates that may fail their check before the search gives up: what fails so often is not the schedule's fault."""

Progress = Callable[[str, int, int], None]
"""Callback for progress: the current task, the number done and the total."""


class NoTrainingError(ValueError):
    """A plan that only runs forwards: what is listed as better would not do the same."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its figures."""

    choice: Choice
    spec: PlanSpec
    figures: Figures


@dataclass(frozen=True)
class Verified:
    """A candidate that passed its check.

    ``failing`` are the channel models under which it deadlocks, all of them
    safe on the plan's backend; ``path`` is where its time goes, in
    microseconds.
    """

    candidate: Candidate
    failing: tuple[ChannelModel, ...]
    path: CriticalPath


class Group(Enum):
    """Consequences of a candidate for its user."""

    BETTER = "better"
    """Another order, and maybe other chunks, for the micro-batches that the plan has."""
    COPIED = "copied"
    """The same, with every stage on two ranks."""
    RESIZED = "resized"
    """Other micro-batches, or pieces of sequences: better if their time is in proportion to their tokens."""
    OVER_LIMIT = "over_limit"
    """More memory than there is."""


@dataclass(frozen=True)
class Advice:
    """The advice for one plan.

    ``present`` are the figures of the plan itself (None if its schedule never
    ends) and ``path`` is where its time goes; ``errors`` are the codes for
    which its check fails. ``receives`` is the plan itself with its receives
    posted at another time. ``listed`` are verified candidates, in each group
    the fastest first. Of the others, ``impossible`` has the reasons why they
    do not exist and ``refused`` the codes for which they failed, each with the
    number of candidates. ``gave_up`` is true if the search ended there.
    """

    candidates: Candidates
    backend: str
    present: Figures | None
    path: CriticalPath | None
    errors: tuple[str, ...]
    receives: tuple[OtherPost, ...]
    listed: Mapping[Group, tuple[Verified, ...]]
    num_timed: int
    impossible: Mapping[str, int]
    refused: Mapping[str, int]
    gave_up: bool

    @property
    def best(self) -> Verified | None:
        """Recommended candidate: the fastest of those with the fewest assumptions."""
        groups = (Group.BETTER, Group.COPIED, Group.RESIZED)
        return next((verified for group in groups for verified in self.listed[group]), None)


def advise(
    loaded: LoadedPlan,
    memory_limit: int | None = None,
    *,
    top: int = 5,
    with_over_limit: bool = False,
    every_schedule: bool = False,
    on_progress: Progress | None = None,
) -> Advice:
    """Find better schedules, chunk counts and micro-batch counts for a plan, up to ``top`` of each group.

    ``memory_limit`` is the most activations of the plan's largest stage that
    a rank may hold; without it, ``schedule.memory_limit`` counts. What is over
    the limit is looked for only ``with_over_limit``. Of a plan that names a
    framework (``named_framework``), only the schedules that the framework has
    are tried, unless ``every_schedule`` is set.

    Raises:
        BadPlanError: the plan itself cannot be lowered, or its ``cost.p2p`` is not simulated.
        NoTrainingError: the plan has no backwards.
    """
    with blaming_plan(loaded):
        framework = None if every_schedule else named_framework(loaded.spec)
        return _advise(loaded, memory_limit, top, framework, with_over_limit=with_over_limit, on_progress=on_progress)


def _advise(
    loaded: LoadedPlan, memory_limit: int | None, top: int, framework: Framework | None, *, with_over_limit: bool,
    on_progress: Progress | None,
) -> Advice:  # fmt: skip
    report = check(loaded)
    loaded = with_measured_times(loaded)  # which other cuts are computed from, as from given ones
    lowered = report.subject.plan
    if not any(op.kind is not OpKind.FORWARD for program in lowered.programs for op in program):
        raise NoTrainingError("the plan's schedule has no backward, and advice is about training steps")
    limit = loaded.spec.schedule.memory_limit if memory_limit is None else memory_limit
    candidates = Candidates(loaded, limit, has_copies=lowered.has_copies, framework=framework)
    clock = _present_clock(lowered)
    present = None if clock is None else figures_of(clock, block_sequences(loaded.spec))
    search = _Search(candidates, present, on_progress)
    search.time_all()
    listed: dict[Group, tuple[Verified, ...]] = {}
    for group in Group:
        if group is not Group.OVER_LIMIT or with_over_limit:
            better = [verified for group_listed in listed.values() for verified in group_listed]
            listed[group] = search.verified(group, top, better)
    return Advice(
        candidates=candidates,
        backend=report.subject.backend.name,
        present=present,
        path=None if clock is None else clock.path(),
        errors=tuple(dict.fromkeys(error.code for error in report.errors)),
        receives=() if present is None or report.errors else other_posts(loaded, report, present.makespan_us),
        listed=listed,
        num_timed=len(search.timed),
        impossible=search.impossible,
        refused=search.refused,
        gave_up=search.gave_up,
    )


def _present_clock(lowered: LoweredPlan) -> Clock | None:
    """The given plan's clock; None if it never ends, which is no reason to advise nothing."""
    try:
        asap_clock(lowered.schedule, lowered.spec)
    except ValueError:
        return None
    try:
        return clock_of(lowered)
    except SimulationError:
        return None


_Key = tuple[Fraction, Fraction, int, int]


class _Search:
    """Candidates as they are timed, and checked."""

    def __init__(self, candidates: Candidates, present: Figures | None, on_progress: Progress | None) -> None:
        self._candidates, self._present, self._on_progress = candidates, present, on_progress
        self.timed: list[Candidate] = []
        self.impossible: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    @property
    def gave_up(self) -> bool:
        """True if too many candidates failed to continue the search."""
        return self.refused.total() > MAX_REFUSED

    def time_all(self) -> None:
        """Time every candidate that exists, without what messages may wait for."""
        choices = [*self._candidates.choices(None if self._present is None else self._present.peak)]
        for done, choice in enumerate(choices):
            self._report("timing schedules", done, len(choices))
            try:
                spec = self._candidates.plan_of(choice)
                pair_time = generating_pair_time(spec)
                clock = asap_clock(plan_schedule(spec, pair_time), spec, pair_time)
            except BadPlanError as error:
                self.impossible[error.findings[0].message] += 1
                continue
            self.timed.append(Candidate(choice, spec, figures_of(clock, block_sequences(spec))))

    def verified(self, group: Group, top: int, better: Sequence[Verified]) -> tuple[Verified, ...]:
        """The best ``top`` candidates of a group that pass their check and are better than those of ``better``."""
        waiting: list[tuple[_Key, Verified | None]] = [
            (self._key(candidate, index), None) for index, candidate in enumerate(self.timed)
        ]
        heapq.heapify(waiting)
        listed: list[Verified] = []
        while waiting and len(listed) < top and not self.gave_up:
            key, verified = heapq.heappop(waiting)
            candidate = self.timed[key[-1]] if verified is None else verified.candidate
            if self._group(candidate) is not group or not self._improves(candidate, (*better, *listed)):
                continue
            if verified is not None:
                listed.append(verified)
                continue
            self._report(f"checking candidates ({group.value.replace('_', ' ')})", len(listed), top)
            verified = self._verify(candidate)
            if verified is not None:
                heapq.heappush(waiting, (self._key(verified.candidate, key[-1]), verified))
        return tuple(listed)

    def _report(self, task: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(task, done, total)

    def _verify(self, candidate: Candidate) -> Verified | None:
        """Check a candidate by every rule; None if it fails, which is counted."""
        try:
            report = check(LoadedPlan(candidate.spec))
        except BadPlanError as error:  # errors that only lowering finds: gradient sums of copies that cannot be early
            self.impossible[error.findings[0].message] += 1
            return None
        if report.errors:
            self.refused[report.errors[0].code] += 1
            return None
        try:
            clock = clock_of(report.subject.plan)
        except SimulationError as error:
            self.refused[error.findings[0].code] += 1
            return None
        figures = figures_of(clock, block_sequences(candidate.spec))
        return Verified(replace(candidate, figures=figures), conditions(report.subject), clock.path())

    def _group(self, candidate: Candidate) -> Group:
        room = self._candidates.room
        if room is not None and candidate.figures.peak > room:
            return Group.OVER_LIMIT
        changes = self._candidates.changes(candidate.choice)
        if changes & {Changed.MICRO_BATCHES, Changed.SPLITS}:
            return Group.RESIZED
        return Group.COPIED if Changed.COPIES in changes else Group.BETTER

    def _improves(self, candidate: Candidate, listed: Sequence[Verified]) -> bool:
        """True if a candidate is better than the plan, and none of ``listed`` is as good and closer to the plan."""
        figures, present, room = candidate.figures, self._present, self._candidates.room
        is_fit = present is not None and (room is None or present.peak <= room)
        if present is not None and is_fit and not _is_less(figures, present):
            return False
        changes = self._candidates.changes(candidate.choice)
        return not any(
            other.candidate.figures.makespan_us <= figures.makespan_us
            and other.candidate.figures.peak <= figures.peak
            and self._candidates.changes(other.candidate.choice) <= changes
            for other in listed
        )

    def _key(self, candidate: Candidate, index: int) -> _Key:
        """The order in which candidates are tried and listed: by time, memory, changed sizes, and schedules' order."""
        figures = candidate.figures
        return figures.makespan_us, figures.peak, len(self._candidates.changes(candidate.choice)), index


def _is_less(figures: Figures, than: Figures) -> bool:
    """True if a step is shorter, or as long with less memory."""
    return (figures.makespan_us, figures.peak) < (than.makespan_us, than.peak)
