"""A schedule for given times of every stage, any placement and a memory limit, at once: the best of many tries.

Two kinds of orders are tried. *Turns* are the fixed orders of the
zero-bubble family, 1F1B, ZB-H1 and ZB-H2 (Qi et al., arXiv:2401.10241), cut
to the memory limit; they exist where each rank has one stage. *List
schedules* (``list_schedule``) follow the times: each rank begins what a rule
prefers as soon as it can. Which rule is best depends on times, memory and
placement, and no rule is best everywhere, so that many are tried, those first
that won most often over random workloads. The search ends when a try
reaches a bound that no schedule beats, or when enough operations were
scheduled; it is the same in every run.

Memory is counted as the paper counts it: an activation from the start of F to
the end of W. Every backward is split into I and W.

How good it is: for 4 ranks, 8 micro-batches and times of 1, where the optima
are proved, it finds 27 of 27 with 4 activations, 32 of 31 with 3, 41 of 41
with 2 and 72 of 72 with 1. ``solve`` improves on it, and proves bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, product

from pipeproof.schedule.asap import StageCosts, Time, asap
from pipeproof.schedule.interleaved import interleaved
from pipeproof.schedule.interleaved_zb import interleaved_zb
from pipeproof.schedule.list_schedule import ListSchedule, Rule, Turn, Weights, list_schedule
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, UnfitSizesError
from pipeproof.schedule.v_half import v_half
from pipeproof.schedule.v_min import v_min
from pipeproof.schedule.weight_lag import with_weight_lag
from pipeproof.schedule.workload import Placement, Workload, fits, in_index_order, make_workload
from pipeproof.schedule.zb_v import zb_v

_MAX_OPERATIONS = 150_000
"""Operations that all rules together may schedule, about half a second of work; one rule may take more."""

_NO_LIMIT = 2**62

_BEST_RULES = (
    Rule(Turn.ALTERNATE, Weights.WHEN_FULL, oldest_first=True, patience=1, reserve=2),
    Rule(Turn.ALTERNATE, Weights.WHEN_FULL, oldest_first=False, patience=0, reserve=4),
    Rule(Turn.FORWARD, Weights.WHEN_FULL, oldest_first=False, patience=2, reserve=5),
    Rule(Turn.BACKWARD, Weights.WHEN_IDLE, oldest_first=False, patience=1, reserve=1),
    Rule(Turn.ALTERNATE, Weights.WHEN_FULL, oldest_first=True, patience=0, reserve=3),
    Rule(Turn.ALTERNATE, Weights.WHEN_IDLE, oldest_first=False, patience=1, reserve=2),
    Rule(Turn.BACKWARD, Weights.WHEN_IDLE, oldest_first=True, patience=2, reserve=3),
    Rule(Turn.BACKWARD, Weights.WHEN_FULL, oldest_first=True, patience=0, reserve=2),
    Rule(Turn.FORWARD, Weights.WHEN_FULL, oldest_first=False, patience=1, reserve=5),
    Rule(Turn.ALTERNATE, Weights.WHEN_IDLE, oldest_first=False, patience=0, reserve=0),
    Rule(Turn.BACKWARD, Weights.WHEN_IDLE, oldest_first=False, patience=1, reserve=7),
    Rule(Turn.ALTERNATE, Weights.WHEN_FULL, oldest_first=False, patience=0, reserve=5),
)
"""Each the one that helps those before it most, over random workloads of 2 to 10 ranks. Together they come within 0.2 %
of all rules on average."""


def optimal(
    placement: Placement, num_micro_batches: int, costs: StageCosts, memory_limit: int | Sequence[int] | None = None
) -> Schedule:
    """One program of F, I and W per rank, whose stages are ``placement[rank]``.

    ``costs`` are by stage, in any exact unit; nothing runs side by side, so
    that ``costs.overlapped`` is not read. ``memory_limit`` is the most
    activations that a rank may hold from F to the end of W, for all ranks or
    one for each. Never slower than 1F1B or ZB-H1, where these fit in the limit.

    Raises:
        UnfitSizesError: a rank may hold fewer activations than it has stages, or a stage is on two ranks.
        ValueError: the placement is none of all stages, or times are missing or negative.
    """
    return best_order(make_workload(placement, num_micro_batches, costs, memory_limit))


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
    for schedule in chain(_in_turns(work), _known(work)):
        yield asap(schedule, work.costs).makespan, schedule
    num_rules = max(1, _MAX_OPERATIONS // work.num_operations)
    for _, rule in zip(range(num_rules), _rules(), strict=False):
        found = list_schedule(work, rule)
        yield found.makespan, found


def _rules() -> Iterator[Rule]:
    """All rules, the best first."""
    yield from _BEST_RULES
    for reserve, turn, weights, oldest_first, patience in product(range(8), Turn, Weights, (False, True), range(3)):
        rule = Rule(turn, weights, oldest_first=oldest_first, patience=patience, reserve=reserve)
        if rule not in _BEST_RULES:
            yield rule


def _known(work: Workload) -> Iterator[Schedule]:
    """Schedules of the literature for several stages on each rank, those that exist for the sizes and fit in memory."""
    num_ranks, num_batches = len(work.placement), work.num_micro_batches
    num_chunks, rest = divmod(work.num_stages, num_ranks)
    if rest or num_chunks == 1:
        return
    makers: dict[tuple[tuple[int, ...], ...], tuple[Callable[[], Schedule], ...]] = {
        tuple(tuple(range(rank, work.num_stages, num_ranks)) for rank in range(num_ranks)): (
            lambda: interleaved(num_ranks, num_batches, num_chunks),
            lambda: interleaved_zb(num_ranks, num_batches, num_chunks),
        ),
        tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)): (
            lambda: zb_v(num_ranks, num_batches),
            lambda: v_half(num_ranks, num_batches),
            lambda: v_min(num_ranks, num_batches),
        ),
    }
    for make in makers.get(work.placement, ()):
        with suppress(UnfitSizesError):
            schedule = Schedule(in_index_order(make().programs))
            if fits(schedule, work):
                yield schedule


def _in_turns(work: Workload) -> Iterator[Schedule]:
    """Turns of F, I and W, cut to memory: the warm-up of 1F1B and longer ones, W at once, as in ZB-H1 and ZB-H2, or late.

    ``more`` is how much longer than in 1F1B and ZB-H1 the warm-up and the wait of W may be.
    """
    last = len(work.placement) - 1
    if work.num_stages > last + 1:
        return
    num_batches = work.num_micro_batches
    places = [work.limits[rank] if work.limits[rank] < num_batches else _NO_LIMIT for rank in work.rank_of]
    seen = set()
    for more in (0, max(0, num_batches - last - 1), last):
        wanted = (min(last - stage + min(last - stage, more), place - 1) for stage, place in enumerate(places))
        warmups = tuple(accumulate(wanted, min))  # more than the stage before has would never come
        for late in ([0] * (last + 1), [stage + min(stage, more) for stage in range(last + 1)], [num_batches] * last):
            lags = tuple(min(lag, place - 1 - warmup) for lag, place, warmup in zip(late, places, warmups, strict=False))
            if (warmups, lags) not in seen:
                seen.add((warmups, lags))
                yield _turns(work, warmups, lags)


def _turns(work: Workload, warmups: Sequence[int], lags: Sequence[int]) -> Schedule:
    programs = []
    for (stage,) in work.placement:
        forwards, inputs = (
            [Op(kind, stage, index) for index in range(work.num_micro_batches)]
            for kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT)
        )
        programs.append(with_weight_lag(forwards, inputs, num_warmup=warmups[stage], weight_lag=lags[stage]))
    return Schedule(tuple(programs))
