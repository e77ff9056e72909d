"""The fastest cut of a model's layers for each kind of schedule, from the times and the memory of each layer.

A cut is the number of layers of each stage. All cuts are compared by the times of the schedule's computations
(``asap``), in three steps: an even start, moves of one layer as long as they help, then a search of all other cuts,
except cuts that cannot be faster by a bound: a rank's work, plus the work that must precede its first and follow its
last computation. So the result is the best of all cuts, unless ``Best.is_exhaustive`` is False: then the search
ended early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import ceil

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request, ScheduleKind
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Schedule, StageCosts, UnfitSizesError, asap, stages_of

MOST_CHUNKS = 4
"""Most stages of a rank that are tried."""
MOST_OPERATIONS = 200_000
"""Computations that are timed for one schedule before its search ends: a few seconds."""
_LEAST_CUTS = 50
NEAR = 1.05
"""Ratio of steps up to which a schedule may still turn out to be the fastest."""
_OTHER_KINDS = frozenset({"optimal", "seq1f1b"})
"""Kinds that are not tried: orders that depend on the times, and pieces of sequences; also kinds with copies."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Time and memory of a layer for one micro-batch: times in nanoseconds, memory in bytes.

    A backward in one piece is all in ``backward_input``. ``kept`` stays from F to I, ``kept_for_weight`` from I to W.
    ``forward_peak`` and ``backward_peak`` are the most memory during F, and during I and W, above the memory before F.
    ``growth`` is the increase of a backward's peak for each further layer of a stage, above this layer's kept memory:
    gradients that exist together before they are added. ``host`` is the time in which a host launches F, I and W;
    0 if it limits nothing.
    """

    forward: int = 0
    backward_input: int = 0
    backward_weight: int = 0
    kept: int = 0
    kept_for_weight: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    host: int = 0
    growth: int = 0

    @property
    def work(self) -> int:
        """Time of a micro-batch."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Way:
    """One way to run the layers: ``layers`` by their number, and the same with recomputation if a layer has it.

    ``each_stage`` is the additional time of a stage. ``splits`` is True if backwards are I and W.
    """

    name: str
    splits: bool
    layers: tuple[LayerCost, ...]
    recomputed: tuple[LayerCost | None, ...] = ()
    each_stage: LayerCost = LayerCost()


@dataclass(frozen=True)
class Layers:
    """The model of a search: the memory of each layer's weights, gradients and optimizer states, in bytes.

    With ``has_ends`` the first and the last layer are never alone between stages, but belong to the first and to the
    last stage, and stages between them may be empty; without it each stage needs a layer. ``latency`` is the time of a
    message in nanoseconds. ``reductions`` are the times in which the gradients of each layer are summed over data ranks
    at the end of a step, and ``stage_reduction`` is the additional time of a stage.
    """

    static_bytes: tuple[int, ...]
    has_ends: bool
    latency: int = 0
    reductions: tuple[int, ...] = ()
    stage_reduction: int = 0

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.static_bytes)

    def fits(self, num_stages: int) -> bool:
        """True if there is a cut into so many stages."""
        return 1 <= num_stages <= self.num_layers or (self.has_ends and num_stages > 1 and self.num_layers > 1)


@dataclass(frozen=True)
class Problem:
    """The layers of a model in one way, for a pipeline of ``num_ranks`` ranks."""

    layers: Layers
    way: Way
    num_ranks: int
    num_micro_batches: int


@dataclass(frozen=True)
class Best:
    """The fastest cut of one kind of schedule for a problem, and the number of recomputed layers of each stage.

    Times are in nanoseconds; ``peaks`` are the most bytes of each rank. ``is_exhaustive`` is True if no cut is faster.
    """

    kind: str
    num_chunks: int
    problem: Problem
    sizes: tuple[int, ...]
    recomputed: tuple[int, ...]
    step: int
    peaks: tuple[int, ...]
    is_exhaustive: bool


@dataclass(frozen=True)
class Lacking:
    """Why a schedule has no cut within the memory: the smallest need of a cut, on its fullest rank."""

    kind: str
    way: Way
    needed: int
    static: int
    """Of these, weights, gradients and optimizer states."""


def tried_kinds(problem: Problem) -> Iterator[tuple[ScheduleKind, int]]:
    """The kinds and numbers of chunks that can run."""
    layers, num_ranks = problem.layers, problem.num_ranks
    for kind in SCHEDULE_KINDS.values():
        has_split = kind.split_backwards(num_ranks, problem.num_micro_batches) > 0
        is_other = kind.name in _OTHER_KINDS or kind.placement is Placement.BOTH_WAYS
        if is_other or (has_split and not problem.way.splits):
            continue
        least = 2 if kind.placement is Placement.ANY else kind.min_chunks  # with one it is gpipe
        for chunks in range(least, 1 + min(MOST_CHUNKS, kind.max_chunks or MOST_CHUNKS)):
            has_layers = chunks == least or num_ranks * chunks <= layers.num_layers
            if has_layers and layers.fits(num_ranks * chunks) and (num_ranks > 1 or chunks == 1 == kind.min_chunks):
                yield kind, chunks


def begin_search(problem: Problem, kind: ScheduleKind, num_chunks: int, limit: int | None) -> _Search | None:
    """Begin the search for a kind of schedule; None if it does not exist. ``limit`` is bytes of a rank."""
    try:
        schedule = kind.generate(Request(problem.num_ranks, problem.num_micro_batches, num_chunks))
    except UnfitSizesError:
        return None
    search = _Search(problem, schedule, limit)
    search.climb()
    return search


def step_of(best: Best, way: Way) -> tuple[int, list[float]]:
    """The step in nanoseconds of a found cut, run in another way, and each stage's slowdown by its host."""
    problem = replace(best.problem, way=way)
    request = Request(problem.num_ranks, problem.num_micro_batches, best.num_chunks)
    search = _Search(problem, SCHEDULE_KINDS[best.kind].generate(request), None)
    stages = search.stages(best.sizes, best.recomputed)
    return search.step_of(stages), search.slowdowns(stages)


@dataclass(frozen=True)
class _Timed:
    sizes: tuple[int, ...]
    recomputed: tuple[int, ...]
    step: int
    peaks: tuple[int, ...]


@dataclass
class _Search:
    problem: Problem
    schedule: Schedule
    limit: int | None
    best: _Timed | None = None
    is_exhaustive: bool = False
    least_needed: int = 0
    least_static: int = 0
    _timed: dict[tuple[int, ...], _Timed | None] = field(default_factory=dict)
    _num_visits: int = 0

    def __post_init__(self) -> None:
        self.layers, self.way = self.problem.layers, self.problem.way
        self.stages_of_ranks = stages_of(self.schedule.programs)
        self.num_stages = sum(map(len, self.stages_of_ranks))
        self.rank_of = {stage: rank for rank, stages in enumerate(self.stages_of_ranks) for stage in stages}
        self._work = [0, *accumulate(layer.work for layer in self.way.layers)]
        self._forwards = [0, *accumulate(layer.forward for layer in self.way.layers)]
        self._first = [min(stages) for stages in self.stages_of_ranks]
        self._most_cuts = max(_LEAST_CUTS, MOST_OPERATIONS // sum(map(len, self.schedule.programs)))

    def compare_all(self) -> None:
        """Find the fastest of all cuts."""
        self.is_exhaustive = True
        self._visit((), 0, [0] * len(self.stages_of_ranks))

    def result(self, kind: str, num_chunks: int) -> Best | Lacking:
        """The fastest cut so far, or the reason why there is none."""
        best = self.best
        if best is None:
            return Lacking(kind, self.way, self.least_needed, self.least_static)
        return Best(
            kind, num_chunks, self.problem, best.sizes, best.recomputed, best.step, best.peaks, self.is_exhaustive
        )

    # --- one cut ---

    def _consider(self, sizes: tuple[int, ...]) -> _Timed | None:
        if sizes not in self._timed:
            timed = self._timed[sizes] = self._time(sizes)
            if timed is not None and (self.best is None or _key(timed) < _key(self.best)):
                self.best = timed
        return self._timed[sizes]

    def _time(self, sizes: tuple[int, ...]) -> _Timed | None:
        """The step of a cut with as few recomputed layers as the memory needs; None if it needs more."""
        recomputed = [0] * self.num_stages
        own = self.stages(sizes, recomputed)
        peaks = []
        for rank, stages in enumerate(self.stages_of_ranks):
            while True:
                peak, _ = self._peak(rank, own)
                if self.limit is None or peak <= self.limit:
                    break
                more = next((s for s in stages if recomputed[s] < len(self._recomputable(own[s].numbers))), None)
                if more is None:
                    self._note_lacking(sizes)
                    return None
                recomputed[more] += 1
                own[more] = self._stage(own[more].numbers, recomputed[more])
            peaks.append(peak)
        return _Timed(sizes, tuple(recomputed), self.step_of(own), tuple(peaks))

    def step_of(self, own: Sequence[_Stage]) -> int:
        """The step in nanoseconds."""
        factors = self.slowdowns(own)
        forwards, inputs, weights = (
            [int(factor * getattr(stage.cost, key)) for factor, stage in zip(factors, own, strict=True)]
            for key in ("forward", "backward_input", "backward_weight")
        )
        costs = StageCosts(forwards, inputs, weights, self.layers.latency)
        ends = asap(self.schedule, costs).ends
        return int(max(
            max(of_rank) + sum(map(self._reduction, [own[s] for s in stages]))
            for of_rank, stages in zip(ends, self.stages_of_ranks, strict=True)
        ))  # fmt: skip

    def _reduction(self, stage: _Stage) -> int:
        """The time in which the gradients of a stage are summed over data ranks."""
        reductions = self.layers.reductions[stage.numbers.start : stage.numbers.stop]
        return sum(reductions) + self.layers.stage_reduction if reductions else 0

    def slowdowns(self, own: Sequence[_Stage]) -> list[float]:
        """Factors of each stage's work: if the host of a rank needs longer than its device, all its work is slower."""
        factors = [1.0] * self.num_stages
        for stages in self.stages_of_ranks:
            work, host = (sum(getattr(own[s].cost, key) for s in stages) for key in ("work", "host"))
            for stage in stages:
                factors[stage] = max(1.0, host / work) if work else 1.0
        return factors

    def _recomputable(self, numbers: range) -> list[int]:
        return [n for n in numbers if n < len(self.way.recomputed) and self.way.recomputed[n] is not None]

    def stages(self, sizes: Sequence[int], recomputed: Sequence[int]) -> list[_Stage]:
        """The stages of a cut."""
        return [self._stage(*each) for each in zip(numbers_of_stages(sizes), recomputed, strict=True)]

    def _stage(self, numbers: range, num_recomputed: int) -> _Stage:
        chosen = set(self._recomputable(numbers)[:num_recomputed])
        costs = [self.way.recomputed[n] if n in chosen else self.way.layers[n] for n in numbers]
        return _stage_of(numbers, [cost for cost in costs if cost is not None], self.way.each_stage)

    def _note_lacking(self, sizes: tuple[int, ...]) -> None:
        """Note the need of a cut on its fullest rank with all possible recomputation."""
        own = self.stages(sizes, [self.layers.num_layers] * self.num_stages)
        peak, static = max(self._peak(rank, own) for rank in range(len(self.stages_of_ranks)))
        if not self.least_needed or peak < self.least_needed:
            self.least_needed, self.least_static = peak, static

    def _peak(self, rank: int, own: Sequence[_Stage]) -> tuple[int, int]:
        """The most bytes of a rank, and of these the static ones."""
        static = sum(self.layers.static_bytes[n] for s in self.stages_of_ranks[rank] for n in own[s].numbers)
        held = peak = static
        for op in self.schedule.programs[rank]:
            cost = own[op.stage].cost
            if op.kind is OpKind.FORWARD:
                peak = max(peak, held + cost.forward_peak)
                held += cost.kept
            elif op.kind is OpKind.BACKWARD_WEIGHT:
                peak = max(peak, held - cost.kept_for_weight + cost.backward_peak)
                held -= cost.kept_for_weight
            else:
                peak = max(peak, held - cost.kept + cost.backward_peak)
                held -= cost.kept
                held += cost.kept_for_weight if op.kind is OpKind.BACKWARD_INPUT else 0
        return peak, static

    # --- all cuts ---

    def _least(self, stage: int) -> int:
        """The fewest layers of a stage."""
        return 0 if self.layers.has_ends and 0 < stage < self.num_stages - 1 else 1

    def _even(self) -> tuple[int, ...]:
        """A cut whose stages have about the same work."""
        sizes, at = [], 0
        for stage in range(self.num_stages):
            rest = sum(map(self._least, range(stage + 1, self.num_stages)))
            target = self._work[-1] * (stage + 1) / self.num_stages
            end = max(at + self._least(stage), min(range(len(self._work)), key=lambda n: abs(self._work[n] - target)))
            end = min(end, self.layers.num_layers - rest) if stage < self.num_stages - 1 else self.layers.num_layers
            sizes.append(end - at)
            at = end
        return tuple(sizes)

    def climb(self) -> None:
        """Find a cut from which no move of one layer leads to a shorter step."""
        even = self._even()
        self._consider(even)
        while True:
            before = self.best
            start = even if before is None else before.sizes
            for source in range(self.num_stages):
                for target in range(self.num_stages):
                    if len(self._timed) >= self._most_cuts:
                        return
                    if source != target and start[source] > self._least(source):
                        moved = list(start)
                        moved[source] -= 1
                        moved[target] += 1
                        self._consider(tuple(moved))
            if self.best is before:
                return

    def _visit(self, sizes: tuple[int, ...], at: int, work: list[int]) -> None:
        """Try all cuts that begin with ``sizes`` and may be faster; ``work`` is each rank's work so far."""
        stage = len(sizes)
        if stage == self.num_stages:
            self._consider(sizes)
            return
        rest = sum(map(self._least, range(stage + 1, self.num_stages)))
        is_last = stage == self.num_stages - 1
        most = self.layers.num_layers - at - rest
        rank = self.rank_of[stage]
        for size in range(most if is_last else self._least(stage), most + 1):
            self._num_visits += 1
            if len(self._timed) >= self._most_cuts or self._num_visits >= 100 * self._most_cuts:
                self.is_exhaustive = False
                return
            end = at + size
            more = self._work[end] - self._work[at] + (self.way.each_stage.work if size else 0)
            work[rank] += more
            longer = (*sizes, size)
            bound = self._bound(longer, end, work)
            if self.best is None or bound < self.best.step:
                self._visit(longer, end, work)
            work[rank] -= more
            if self.best is not None and self._bound_of(rank, longer, work[rank] + more) >= self.best.step:
                break  # a larger stage takes longer still

    def _bound(self, sizes: Sequence[int], end: int, work: Sequence[int]) -> int:
        """A lower bound of the step of all cuts that begin so."""
        rest = self._work[-1] - self._work[end]
        mean = ceil((sum(work) + rest) / len(work)) * self.problem.num_micro_batches
        return max(mean, *(self._bound_of(rank, sizes, own) for rank, own in enumerate(work)))

    def _bound_of(self, rank: int, sizes: Sequence[int], work: int) -> int:
        """The work of a rank, after the forwards of all stages before its first one."""
        first = self._first[rank]
        before = self._forwards[sum(sizes[:first])] + first * self.layers.latency if first <= len(sizes) else 0
        return before + work * self.problem.num_micro_batches


def _key(timed: _Timed) -> tuple[int, int, tuple[int, ...]]:
    return timed.step, max(timed.peaks), timed.sizes


@dataclass(frozen=True, slots=True)
class _Stage:
    numbers: range
    cost: LayerCost


def _stage_of(numbers: range, costs: Sequence[LayerCost], each_stage: LayerCost) -> _Stage:
    """A stage of layers: a forward runs on top of the memory that earlier layers keep, a backward, too."""
    if not costs:
        return _Stage(numbers, LayerCost())
    growth = sum(cost.growth for cost in costs)
    costs = [each_stage, *costs]
    before = [0, *accumulate(cost.kept for cost in costs)]
    return _Stage(
        numbers,
        LayerCost(
            sum(cost.forward for cost in costs),
            sum(cost.backward_input for cost in costs),
            sum(cost.backward_weight for cost in costs),
            before[-1],
            sum(cost.kept_for_weight for cost in costs),
            max(kept + cost.forward_peak for kept, cost in zip(before, costs, strict=False)),
            max(kept + cost.backward_peak + growth - cost.growth for kept, cost in zip(before, costs, strict=False)),
            sum(cost.host for cost in costs),
        ),
    )


def search_cuts(problems: Sequence[Problem], limit: int | None = None) -> tuple[list[Best], list[Lacking]]:
    """The fastest cut of each problem and schedule, the fastest first, and those without one within ``limit`` bytes.

    All cuts are compared if the best of a few is within ``NEAR`` of the fastest schedule.
    """
    begun = [
        (search, kind.name, chunks)
        for problem in problems
        for kind, chunks in tried_kinds(problem)
        if (search := begin_search(problem, kind, chunks, limit)) is not None
    ]
    fastest = min((search.best.step for search, *_ in begun if search.best is not None), default=0)
    for search, *_ in begun:
        if search.best is None or search.best.step <= NEAR * fastest:
            search.compare_all()
    results = [search.result(name, chunks) for search, name, chunks in begun]
    best_cuts = [result for result in results if isinstance(result, Best)]
    lacking = [result for result in results if isinstance(result, Lacking)]
    return sorted(best_cuts, key=lambda best: (best.step, len(best.sizes), best.kind)), lacking


def numbers_of_stages(sizes: Sequence[int]) -> list[range]:
    """The layers of each stage of a cut."""
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]
