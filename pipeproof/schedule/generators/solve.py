"""The best schedule that constraint programming finds, with a bound that none can beat (the ``solve`` extra).

The model is the workload of ``optimal``: a start for every forward, I and W; what each needs and its latency; one
operation at a time on a rank; activations held from the start of F to the end of W. On each stage, operations of a kind
run in index order, which costs nothing (``workload`` explains why) and removes all schedules that differ only in the
names of micro-batches. OR-tools' CP-SAT minimizes the makespan from the greedy schedule on. One worker, a fixed seed
and a limit in deterministic time give the same schedule and the same bound in every run with the same OR-tools, proved
or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeproof.diagnostics.finding import BadPlanError, ExampleKind, RuleDoc
from pipeproof.diagnostics.install_command import install_extra
from pipeproof.schedule.generators.optimal import best_order
from pipeproof.schedule.generators.workload import Placement, Workload, fits, in_index_order, make_workload, most_held
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule, StageCosts, Time, UnfitSizesError, asap

_F, _I, _W = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
_KINDS = (_F, _I, _W)

_MAX_TICKS = 2**45
"""Longest schedule for the solver, which adds many 64-bit integers."""


SOLVER_MISSING = RuleDoc(
    code="PP142",
    title="the solver is not installed",
    explanation=(
        "`pipeproof schedule show --time-limit` looks for schedules with OR-tools, which is a large package and an "
        "extra of its own. Without a time limit, schedules of kind `optimal` do not need it."
    ),
    wrong="pip install pipeproof",
    right="pip install 'pipeproof[solve]'",
    kind=ExampleKind.COMMAND,
)


class SolverMissingError(BadPlanError):
    """OR-tools cannot be imported."""


class UnfitHintError(ValueError):
    """A schedule that is not a solution cannot be the hint."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the search: the shortest makespan so far, and the largest proved bound."""

    makespan: Time
    bound: Time


@dataclass(frozen=True, slots=True)
class Solution:
    """The schedule, its makespan, and the bound that no schedule is below, in the units of the costs.

    ``seconds`` is how long the search took on this machine, None without one.
    """

    schedule: Schedule
    makespan: Time
    bound: Time
    seconds: float | None = None

    @property
    def proved(self) -> bool:
        """True if no schedule is shorter."""
        return self.makespan == self.bound

    @property
    def gap(self) -> float:
        """Largest part of the makespan by which a schedule could be shorter."""
        return float((self.makespan - self.bound) / self.makespan)


def solve(
    placement: Placement,
    num_micro_batches: int,
    costs: StageCosts,
    memory_limit: int | Sequence[int] | None = None,
    *,
    time_limit_s: float = 60.0,
    hint: Schedule | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Search for the shortest schedule; for the arguments see ``optimal``.

    ``time_limit_s`` is in the solver's deterministic seconds, which count its
    steps: one takes about one to ten seconds. The search begins with the greedy
    schedule or with ``hint``, if that is shorter, and nothing longer comes
    back. ``on_progress`` is called with each improvement.

    Raises:
        SolverMissingError: OR-tools is not installed.
        UnfitSizesError: see ``optimal``; or the common tick of the times is tiny compared with them.
        UnfitHintError: the hint is not of this work, cannot finish or does not fit in memory.
        ValueError: see ``optimal``.
    """
    started = time.perf_counter()
    cp_model = _cp_model()
    work = make_workload(placement, num_micro_batches, costs, memory_limit)
    first = best_order(work)
    bound = work.least_makespan()
    if hint is not None:
        first = min(first, _from_hint(hint, work), key=lambda schedule: asap(schedule, work.costs).makespan)
    ticks = int(asap(first, work.costs).makespan)
    if ticks > _MAX_TICKS:
        raise UnfitSizesError(
            f"the times have so many digits that a step takes {ticks:.0e} of their common part, and the solver counts "
            f"to {_MAX_TICKS:.0e}",
            help="round the times of the stages",
            key=("cost",),
        )
    best = first
    if ticks > bound:
        best, bound = _Search(cp_model, work, first).run(time_limit_s, on_progress)
        ticks = int(asap(best, work.costs).makespan)
    return Solution(best, work.in_units(ticks), work.in_units(bound), time.perf_counter() - started)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        message = f"schedules are solved with OR-tools, which cannot be imported: {error}"
        finding = SOLVER_MISSING.finding(message, help=install_extra("solve"))
        raise SolverMissingError(finding) from error
    return cp_model


def _from_hint(hint: Schedule, work: Workload) -> Schedule:
    """The hint in index order, with all backwards in two."""
    schedule = Schedule(in_index_order(hint.programs))
    ops = [{(op.kind, op.stage, op.micro_batch) for op in program} for program in schedule.programs]
    wanted = [
        {(kind, stage, index) for kind in _KINDS for stage in stages for index in range(work.num_micro_batches)}
        for stages in work.placement
    ]
    if ops != wanted:
        raise UnfitHintError("the hint does not compute what is to be scheduled")
    if not fits(schedule, work):
        held = [f"{peak} on rank {rank}" for rank, peak in enumerate(most_held(schedule.programs))]
        raise UnfitHintError(f"the hint holds more activations than the memory limit allows: {', '.join(held)}")
    try:
        asap(schedule, work.costs)
    except ValueError as error:
        raise UnfitHintError(f"the hint cannot finish: {error}") from error
    return schedule


class _Search:
    """The model of a workload, and the search from a first schedule on."""

    def __init__(self, cp_model: Any, work: Workload, first: Schedule) -> None:
        self._cp_model, self._work, self._first = cp_model, work, first
        self._model = cp_model.CpModel()
        timed = asap(first, work.costs)
        self._horizon = int(timed.makespan)
        self._least = work.least_makespan()
        self._makespan = self._model.new_int_var(self._least, self._horizon, "makespan")
        self._model.add_hint(self._makespan, self._horizon)
        self._starts: dict[Op, Any] = {}
        self._ends: dict[Op, Any] = {}
        for program, starts in zip(timed.programs, timed.starts, strict=True):
            self._add_operations(program, starts)
        for stage in range(work.num_stages):
            self._add_order(stage)
        for rank, stages in enumerate(work.placement):
            if work.limits[rank] < work.num_micro_batches * len(stages):
                self._add_memory(stages, work.limits[rank])
        self._model.minimize(self._makespan)

    def run(self, time_limit_s: float, on_progress: Callable[[Progress], None] | None) -> tuple[Schedule, int]:
        """The best schedule, and the bound in ticks."""
        solver = self._cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = time_limit_s
        status = solver.solve(self._model, None if on_progress is None else self._reporter(on_progress))
        if status == self._cp_model.UNKNOWN:  # the time was too short to begin
            return self._first, self._least
        assert status in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE), "the first schedule is a solution"
        return self._schedule(solver.value), round(solver.best_objective_bound)

    def _add_operations(self, program: Program, hinted_starts: Sequence[Time]) -> None:
        """Add the operations of one rank, which runs one at a time."""
        intervals = []
        for op, hinted_start in zip(program, hinted_starts, strict=True):
            duration = self._work.costs.of(op)
            start = self._model.new_int_var(0, self._horizon - duration, str(op))
            self._model.add_hint(start, int(hinted_start))
            self._starts[op], self._ends[op] = start, start + duration
            intervals.append(self._model.new_fixed_size_interval_var(start, duration, f"time of {op}"))
        self._model.add_no_overlap(intervals)

    def _add_order(self, stage: int) -> None:
        """Add the inputs of each operation of a stage, and the order of operations of one kind."""
        edges = (0, *self._work.edges(), 0)
        for index in range(self._work.num_micro_batches):
            forward, backward, weight = (Op(kind, stage, index) for kind in _KINDS)
            if stage:
                self._add_before(Op(_F, stage - 1, index), forward, edges[stage])
            if stage + 1 < self._work.num_stages:
                self._add_before(Op(_I, stage + 1, index), backward, edges[stage + 1])
            else:
                self._add_before(forward, backward)
            self._add_before(backward, weight)
            for op in (forward, backward, weight) if index else ():
                self._add_before(Op(op.kind, stage, index - 1), op)
        last = Op(_W, stage, self._work.num_micro_batches - 1)
        self._model.add(self._makespan >= self._ends[last])

    def _add_before(self, first: Op, second: Op, latency: int = 0) -> None:
        self._model.add(self._starts[second] >= self._ends[first] + latency)

    def _add_memory(self, stages: Sequence[int], limit: int) -> None:
        """Allow at most ``limit`` activations on one rank; with one stage this is an order, because of index order."""
        num_batches = self._work.num_micro_batches
        for stage in stages:
            for index in range(limit, num_batches):
                self._add_before(Op(_W, stage, index - limit), Op(_F, stage, index))
        if len(stages) > 1:
            lives = [
                self._life(Op(_F, stage, index), Op(_W, stage, index))
                for stage in stages
                for index in range(num_batches)
            ]
            self._model.add_cumulative(lives, [1] * len(lives), limit)

    def _life(self, forward: Op, weight: Op) -> Any:
        """The interval for which an activation is held."""
        length = self._model.new_int_var(0, self._horizon, f"length of {forward}")
        return self._model.new_interval_var(self._starts[forward], length, self._ends[weight], f"life of {forward}")

    def _schedule(self, value: Callable[[Any], int]) -> Schedule:
        """Programs in the order of time; operations without duration in the order of their dependencies."""

        def order(op: Op) -> tuple[int, int, int, int, int]:
            assert op.micro_batch is not None
            kind = _KINDS.index(op.kind)
            return value(self._starts[op]), value(self._ends[op]), kind, op.micro_batch, -op.stage

        return Schedule(tuple(tuple(sorted(program, key=order)) for program in self._first.programs))

    def _reporter(self, on_progress: Callable[[Progress], None]) -> Any:
        in_units = self._work.in_units

        class Reporter(self._cp_model.CpSolverSolutionCallback):  # type: ignore[misc,name-defined]
            def on_solution_callback(self) -> None:
                bound = round(self.best_objective_bound)
                on_progress(Progress(in_units(round(self.objective_value)), in_units(bound)))

        return Reporter()
