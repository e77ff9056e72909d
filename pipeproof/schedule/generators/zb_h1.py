"""ZB-H1: 1F1B with the backward split in two, in no more memory than 1F1B takes on its first rank.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.1
(ZB1P in the authors' code). Rank ``r`` warms up with ``p - 1 - r`` forwards,
as in 1F1B, and runs weight gradients ``r`` rounds behind input gradients.

Without latency and with the same times tf, ti, tw on every rank, for any p and
m, the makespan is exactly the longest of three, with h = max(m, p)::

    (m + p - 1) tf +           h ti + m tw
              h tf + (m + p - 1) ti + m tw
    (m + p - 1) tf + (m + p - 1) ti + max(1, m - p + 1) tw

For m >= p that is m (tf + ti + tw) + (p - 1) max(tf, ti, tf + ti - tw), and rank ``r`` spans m
(tf + ti + tw) + (p - 1 - r) max(ti, tf + ti - tw). The paper gives (p - 1) (tf + ti - tw) for the longest span, which
is equal for tw <= tf. If tf is the shortest of the three, the bubble is (p - 1) ti, and no order is better in the same
memory: the first input gradient reaches rank 0 at p tf + (p - 1) ti, and until then that rank may run p forwards and
nothing else.

Paddle's static pass ``ZBH1`` (m >= p only) has F and I in the same order, but runs most backwards whole: the rank
before then waits for their weight gradients too. The first ``r`` weight gradients of rank ``r`` run at the very end:
its sums are not taken in index order. Its peaks are the same and its makespan is never shorter: if all times are 1, it
is p - 2 longer for p >= 2 (p = 4, m = 8: 29 and not 27).
"""

from __future__ import annotations

from pipeproof.schedule.generators.weight_lag import one_stage
from pipeproof.schedule.programs import Schedule


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank; stage ``r`` is on rank ``r``.

    Every rank holds at most ``min(m, p)`` activations if W frees them, and
    rank ``r`` at most ``min(m, p - r)`` if I does.
    """
    return Schedule(tuple(one_stage(rank, num_micro_batches, num_ranks - 1 - rank, rank) for rank in range(num_ranks)))
