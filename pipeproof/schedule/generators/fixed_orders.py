"""Orders of the literature for a workload, which ``optimal`` tries before it uses times.

Where each rank has one stage, rounds of F, I and W with the warm-ups of 1F1B,
ZB-H1 and ZB-H2 (Qi et al., arXiv:2401.10241), limited by the memory of a rank.
Where it has several, round-robin or in a V, the schedules that are known for
that, if they exist for these sizes and fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.interleaved_zb import interleaved_zb
from pipeproof.schedule.generators.stage_ops import stage_ops
from pipeproof.schedule.generators.v_half import v_half
from pipeproof.schedule.generators.v_min import v_min
from pipeproof.schedule.generators.weight_lag import with_weight_lag
from pipeproof.schedule.generators.workload import Workload, fits, in_index_order
from pipeproof.schedule.generators.zb_v import zb_v
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Schedule, UnfitSizesError


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
        wanted = (min(last - stage + min(last - stage, more), place - 1) for stage, place in enumerate(places))
        warmups = tuple(accumulate(wanted, min))  # what the stage before does not begin with would never come
        for latest in (
            (0,) * num_stages,
            tuple(stage + min(stage, more) for stage in range(num_stages)),
            (num_batches,) * num_stages,
        ):
            lags = tuple(
                min(lag, place - 1 - warmup) for lag, place, warmup in zip(latest, places, warmups, strict=True)
            )
            if (warmups, lags) not in seen:
                seen.add((warmups, lags))
                yield _rounds(work, warmups, lags)


def _rounds(work: Workload, warmups: Sequence[int], lags: Sequence[int]) -> Schedule:
    indices = range(work.num_micro_batches)
    return Schedule(
        tuple(
            with_weight_lag(
                stage_ops(OpKind.FORWARD, stage, indices),
                stage_ops(OpKind.BACKWARD_INPUT, stage, indices),
                num_warmup=warmups[stage],
                weight_lag=lags[stage],
            )
            for (stage,) in work.placement
        )
    )
