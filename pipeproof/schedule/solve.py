"""The best schedule that constraint programming finds, with a bound that none can beat (the ``solve`` extra).

The model is the workload of ``optimal`` as it stands: a start for every
forward, I and W; what each needs and its latency; one operation at a time on a
rank; activations held from the start of F to the end of W. On each stage,
operations of a kind run in index order, which costs nothing (``workload`` says
why) and takes away all schedules that differ only in the names of
micro-batches. OR-tools' CP-SAT minimizes the makespan from the greedy schedule
on. One worker, a fixed seed and a limit in deterministic time give the same
schedule and the same bound in every run with the same OR-tools, proved or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeproof.schedule.asap import StageCosts, Time, asap
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.optimal import best_order
from pipeproof.schedule.programs import Programs, Schedule
from pipeproof.schedule.workload import Placement, Workload, fits, in_index_order, make_workload
from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import BadPlanError, Finding, Severity

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


SOLVER_MISSING = RuleDoc(
    code="PP142",
    title="the solver is not installed",
    severity="error",
    explanation=(
        "`pipeproof schedule solve` looks for schedules with OR-tools, which is a large package and an extra of its "
        "own. Schedules of kind `optimal` do not need it."
    ),
    wrong="pip install pipeproof",
    right="pip install 'pipeproof[solve]'",
    kind=ExampleKind.COMMAND,
)


class SolverMissingError(BadPlanError):
    """OR-tools cannot be imported."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the search is: the shortest makespan so far, and the largest proved bound."""

    makespan: Time
    bound: Time


@dataclass(frozen=True, slots=True)
class Solution:
    """The schedule, its makespan, and the bound that no schedule is below, in the units of the costs.

    ``seconds`` is how long it took on this machine.
    """

    schedule: Schedule
    makespan: Time
    bound: Time
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether no schedule is shorter."""
        return self.makespan == self.bound

    @property
    def gap(self) -> float:
        """By which part of the makespan a schedule could be shorter at most."""
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
    """Search for the shortest schedule; arguments are those of ``optimal``.

    ``time_limit_s`` is in the solver's deterministic seconds, which count its
    steps: on most machines one takes one to three seconds. ``hint`` is the
    schedule to begin with, in place of the greedy one; whatever happens, none
    longer than it comes back. ``on_progress`` is called with each improvement.

    Raises:
        SolverMissingError: OR-tools is not installed.
        UnfitSizesError: as for ``optimal``.
        ValueError: as for ``optimal``; or the hint is not of this work or does not fit in memory, or cannot finish.
    """
    started = time.perf_counter()
    cp_model = _cp_model()
    work = make_workload(placement, num_micro_batches, costs, memory_limit)
    first = best_order(work) if hint is None else _from_hint(hint, work)
    ticks, bound = int(asap(first, work.costs).makespan), work.least_makespan()
    found = first
    if ticks > bound:
        search = _Search(cp_model, work, first, on_progress)
        found, bound = search.run(time_limit_s)
        ticks = int(asap(found, work.costs).makespan)
    return Solution(found, work.in_units(ticks), work.in_units(bound), time.perf_counter() - started)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        message = f"schedules are solved with OR-tools, which cannot be imported: {error}"
        finding = Finding(SOLVER_MISSING.code, Severity.ERROR, message, help="pip install 'pipeproof[solve]'")
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
        raise ValueError("the hint does not compute what is to be scheduled")
    if not fits(schedule, work):
        raise ValueError("the hint holds more activations than the memory limit allows")
    return schedule


_KINDS = (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)


class _Search:
    """The model of a workload, and its search from a first schedule on."""

    def __init__(
        self, cp_model: Any, work: Workload, first: Schedule, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self._cp_model, self._work, self._on_progress = cp_model, work, on_progress
        self._first, self._timed = first, asap(first, work.costs)
        self._horizon = int(self._timed.makespan)
        self._model = cp_model.CpModel()
        self._times = {kind: times for kind, times in zip(_KINDS, (work.forward, work.backward_input, work.backward_weight), strict=True)}
        self._starts = {
            (kind, stage, index): self._model.new_int_var(0, self._horizon - times[stage], f"{stage}{kind}{index}")
            for kind, times in self._times.items()
            for stage in range(work.num_stages)
            for index in range(work.num_micro_batches)
        }
        self._makespan = self._model.new_int_var(work.least_makespan(), self._horizon, "makespan")
