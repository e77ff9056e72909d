"""Interleaved zero bubble: ZB-H1 on several stages (chunks) of each rank, round-robin.

PyTorch's ``ScheduleInterleavedZeroBubble``, after ZB1P of Qi et al., "Zero
Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.1. Stage ``c * p + r``
is chunk ``c`` of rank ``r``. Micro-batches go through the chunks in
``max(1, m // p)`` rounds of ``g`` each, which must come out even. Rank ``r``
warms up with ``(v - 1) g + p - 1 - r`` forwards (half the slope of interleaved 1F1B) and
runs weight gradients ``r`` rounds behind. One chunk gives ZB-H1.

Without latency, with the same times tf, ti, tw for every chunk and m >= p, the
makespan is exactly v m (tf + ti + tw) + (p - 1) max(tf, ti, tf + ti - tw): the
bubble of ZB-H1 in times of one chunk instead of a whole rank. With m < p it is
longer (p = 4, m = 2, v = 2, unit times: 19 and not 15).
"""

from __future__ import annotations

from pipeproof.schedule.generators.round_robin import equal_rounds, from_the_last_chunk, order_of_groups
from pipeproof.schedule.generators.weight_lag import with_weight_lag
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule


def interleaved_zb(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """One program of F, I and W per pipeline rank, in the order of PyTorch.

    Every rank holds at most ``min(v m, (v - 1) g + p)`` chunk activations if W
    frees them (``v p`` where p divides m), and rank ``r`` at most
    ``min(v m, (v - 1) g + p - r)`` if I does.

    Raises:
        UnfitSizesError: the micro-batches do not come out even in rounds; the help names the nearest that do.
    """
    rounds = equal_rounds("interleaved zero bubble", num_ranks, num_micro_batches)
    forwards = order_of_groups(rounds, num_chunks)
    backwards = from_the_last_chunk(forwards, num_chunks)
    before_last_chunk = (num_chunks - 1) * rounds[0]
    return Schedule(
        tuple(
            with_weight_lag(
                [Op(OpKind.FORWARD, chunk * num_ranks + rank, k) for chunk, k in forwards],
                [Op(OpKind.BACKWARD_INPUT, chunk * num_ranks + rank, k) for chunk, k in backwards],
                num_warmup=before_last_chunk + num_ranks - 1 - rank,
                weight_lag=rank,
            )
            for rank in range(num_ranks)
        )
    )
