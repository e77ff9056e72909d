"""A schedule for given times of every stage, any placement and a memory limit, at once: the best of many tries.

Two kinds of orders are tried. *Fixed orders* are those of the literature
(``fixed_orders``), where the placement is theirs. *List schedules*
(``list_schedule``) follow the times: each rank begins what a rule prefers as
soon as it can. Which rule is best depends on times, memory and placement, and
none is best everywhere, so that many are tried, those first that won most
often over random workloads. The search ends when a try reaches a bound that no
schedule beats, or when enough operations were scheduled; it is the same in
every run.

Memory is counted from the start of F to the end of W, as Qi et al.
(arXiv:2401.10241) count it. Every backward is split into I and W.

How good it is: for 4 ranks, 8 micro-batches and times of 1 it finds 27 with 4
activations a rank, 32 with 3, 41 with 2 and 72 with 1, where 27, 31, 41 and 72
are proved to be the shortest. Of 188 random workloads with proved optima (2 to
5 ranks, 2 to 9 micro-batches, tight memory among them) it found the shortest in
65 %; it was 1.1 % longer on average and 14.7 % at worst (``benchmarks/optimal.py``).
``solve`` improves on it, and proves bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeproof.schedule.asap import StageCosts, Time, asap
from pipeproof.schedule.generators.fixed_orders import fixed_orders
from pipeproof.schedule.generators.list_schedule import ListSchedule, Priority, Rule, Weights, list_schedule
from pipeproof.schedule.generators.paired_orders import with_pairs
from pipeproof.schedule.generators.workload import Placement, Workload, make_workload
from pipeproof.schedule.programs import Schedule

_MAX_OPERATIONS = 150_000
"""Operations that all rules together may schedule, about half a second of work; one rule may take more."""

_RULES = (
    Rule(Priority.ALTERNATE, Weights.WHEN_FULL, oldest_first=True, patience=1, reserve=2),
    Rule(Priority.ALTERNATE, Weights.WHEN_FULL, oldest_first=False, patience=0, reserve=4),
    Rule(Priority.FORWARD, Weights.WHEN_FULL, oldest_first=False, patience=2, reserve=5),
    Rule(Priority.BACKWARD, Weights.WHEN_IDLE, oldest_first=False, patience=1, reserve=1),
    Rule(Priority.ALTERNATE, Weights.WHEN_FULL, oldest_first=True, patience=0, reserve=3),
    Rule(Priority.ALTERNATE, Weights.WHEN_IDLE, oldest_first=False, patience=1, reserve=2),
    Rule(Priority.BACKWARD, Weights.WHEN_IDLE, oldest_first=True, patience=2, reserve=3),
    Rule(Priority.BACKWARD, Weights.WHEN_FULL, oldest_first=True, patience=0, reserve=2),
    Rule(Priority.FORWARD, Weights.WHEN_FULL, oldest_first=False, patience=1, reserve=5),
    Rule(Priority.ALTERNATE, Weights.WHEN_IDLE, oldest_first=False, patience=0, reserve=0),
    Rule(Priority.BACKWARD, Weights.WHEN_IDLE, oldest_first=False, patience=1, reserve=7),
    Rule(Priority.ALTERNATE, Weights.WHEN_FULL, oldest_first=False, patience=0, reserve=5),
)
"""Each the one that helps those before it most, over random workloads of 2 to 10 ranks; all 288 that there are come
0.1 % closer to the optimum on average."""


def optimal(
    placement: Placement, num_micro_batches: int, costs: StageCosts, memory_limit: int | Sequence[int] | None = None
) -> Schedule:
    """One program of F, I and W per rank, whose stages are ``placement[rank]``.

    ``costs`` are by stage, in any exact unit. With ``costs.in_turns`` a
    forward and a whole backward may run side by side, where that makes the
    step shorter (``paired_orders``); ``costs.overlapped`` is not read.
    ``memory_limit`` is the most
    activations that a rank may hold from F to the end of W, for all ranks or
    one for each. Never slower than a schedule of ``fixed_orders`` that fits in
    the limit, 1F1B and ZB-H1 among them.

    Raises:
        UnfitSizesError: a rank may hold fewer activations than it has stages, or a stage is on two ranks.
        ValueError: the placement is none of all stages, or times are missing or negative.
    """
    work = make_workload(placement, num_micro_batches, costs, memory_limit)
    unpaired = best_order(work)
    return unpaired if work.pairs is None else with_pairs(work, unpaired)[0].schedule


def best_order(work: Workload) -> Schedule:
    """The best of all that is tried."""
    enough = work.least_makespan()
    best: tuple[Time, Schedule | ListSchedule] | None = None
    for makespan, found in _tries(work):
        if best is None or makespan < best[0]:
            best = makespan, found
        if makespan <= enough:
            break
    assert best is not None
    return best[1] if isinstance(best[1], Schedule) else best[1].schedule()


def _tries(work: Workload) -> Iterator[tuple[Time, Schedule | ListSchedule]]:
    """Makespans in ticks, each with what has it."""
    for schedule in fixed_orders(work):
        yield asap(schedule, work.costs).makespan, schedule
    for rule in _RULES[: max(1, _MAX_OPERATIONS // work.num_operations)]:
        found = list_schedule(work, rule)
        yield found.makespan, found
