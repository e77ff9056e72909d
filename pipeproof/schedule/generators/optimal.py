"""A schedule for the times of every stage, any placement and a memory limit, without a search: the best of many tries.

Two kinds of orders are tried. *Fixed orders* come from the literature (``fixed_orders``), if the placement fits. *List
schedules* (``list_schedule``) follow the times: each rank begins the operation that a rule prefers as soon as it can.
The best rule depends on times, memory and placement. Many rules are tried, first the rules that won most often over
random workloads. The search ends when a try reaches a bound that no schedule beats, or when enough operations were
scheduled; it is the same in every run.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.interleaved_zb import interleaved_zb
from pipeproof.schedule.generators.list_schedule import ListSchedule, Priority, Rule, Weights, list_schedule
from pipeproof.schedule.generators.v_half import v_half
from pipeproof.schedule.generators.v_min import v_min
from pipeproof.schedule.generators.weight_lag import one_stage
from pipeproof.schedule.generators.workload import Placement, Workload, fits, in_index_order, make_workload
from pipeproof.schedule.generators.zb_v import zb_v
from pipeproof.schedule.programs import Schedule, StageCosts, Time, UnfitSizesError, asap

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
"""Each rule improves most on the rules before it, over random workloads of 2 to 10 ranks; all 288 possible rules come
0.1 % closer to the optimum on average."""


def optimal(
    placement: Placement, num_micro_batches: int, costs: StageCosts, memory_limit: int | Sequence[int] | None = None
) -> Schedule:
    """One program of F, I and W per rank, whose stages are ``placement[rank]``.

    ``costs`` are by stage, in any exact unit; ``costs.overlapped`` is not read.
    ``memory_limit`` is the most activations that a rank may hold from F to the
    end of W, for all ranks or one for each. Never slower than a schedule of ``fixed_orders`` that fits in
    the limit, 1F1B and ZB-H1 among them.

    Raises:
        UnfitSizesError: a rank may hold fewer activations than it has stages, or a stage is on two ranks.
        ValueError: the placement is none of all stages, or times are missing or negative.
    """
    return best_order(make_workload(placement, num_micro_batches, costs, memory_limit))


def best_order(work: Workload) -> Schedule:
    """The best of all tries."""
    enough = work.least_makespan()
    best: tuple[Time, Schedule | ListSchedule] | None = None
    for makespan, candidate in _tries(work):
        if best is None or makespan < best[0]:
            best = makespan, candidate
        if makespan <= enough:
            break
    assert best is not None
    return best[1] if isinstance(best[1], Schedule) else best[1].schedule()


def _tries(work: Workload) -> Iterator[tuple[Time, Schedule | ListSchedule]]:
    """Makespans in ticks, each with its schedule."""
    for schedule in fixed_orders(work):
        yield asap(schedule, work.costs).makespan, schedule
    for rule in _RULES[: max(1, _MAX_OPERATIONS // work.num_operations)]:
        candidate = list_schedule(work, rule)
        yield candidate.makespan, candidate


# Orders of the literature for a workload, which ``optimal`` tries before it uses times. With one stage per rank: rounds
# of F, I and W with the warm-ups of 1F1B, ZB-H1 and ZB-H2 (Qi et al., arXiv:2401.10241), limited by the memory of a
# rank. With several, round-robin or in a V: the known schedules for that, if they exist for these sizes and fit in
# memory.


def fixed_orders(work: Workload) -> Iterator[Schedule]:
    """Schedules of F, I and W in index order that fit in the memory of each rank; none for other placements."""
    if work.num_stages == len(work.placement):
        yield from _round_robin_orders(work)
        return
    for make in _makers(work):
        with suppress(UnfitSizesError):
            schedule = make()
            if fits(schedule, work):
                yield Schedule(in_index_order(schedule.programs))


def _makers(work: Workload) -> tuple[Callable[[], Schedule], ...]:
    num_ranks, num_batches = len(work.placement), work.num_micro_batches
    num_chunks = len(work.placement[0])
    in_turn = tuple(tuple(range(rank, num_chunks * num_ranks, num_ranks)) for rank in range(num_ranks))
    v_placement = tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    if work.placement == in_turn:
        return (
            lambda: interleaved(num_ranks, num_batches, num_chunks),
            lambda: interleaved_zb(num_ranks, num_batches, num_chunks),
        )
    if work.placement == v_placement:
        return (
            lambda: zb_v(num_ranks, num_batches),
            lambda: v_half(num_ranks, num_batches),
            lambda: v_min(num_ranks, num_batches),
        )
    return ()


def _round_robin_orders(work: Workload) -> Iterator[Schedule]:
    """Three warm-ups, each with W at once, some rounds later, and as late as memory allows."""
    num_batches, num_stages = work.num_micro_batches, work.num_stages
    last = num_stages - 1
    limits = [work.limits[rank] for rank in work.rank_of]
    places = [limit if limit < num_batches else num_stages + num_batches for limit in limits]
    seen = set()
    for more in (0, max(0, num_batches - num_stages), last):  # 1F1B and ZB-H1; ZB-H2 for few micro-batches; ZB-H2
        wanted = (min(last - stage + min(last - stage, more), capacity - 1) for stage, capacity in enumerate(places))
        warmups = tuple(accumulate(wanted, min))  # what the stage before does not begin with would never come
        for latest in (
            (0,) * num_stages,
            tuple(stage + min(stage, more) for stage in range(num_stages)),
            (num_batches,) * num_stages,
        ):
            lags = tuple(
                min(lag, capacity - 1 - warmup) for lag, capacity, warmup in zip(latest, places, warmups, strict=True)
            )
            if (warmups, lags) not in seen:
                seen.add((warmups, lags))
                yield _rounds(work, warmups, lags)


def _rounds(work: Workload, warmups: Sequence[int], lags: Sequence[int]) -> Schedule:
    stages = (stage for (stage,) in work.placement)
    return Schedule(tuple(one_stage(stage, work.num_micro_batches, warmups[stage], lags[stage]) for stage in stages))
