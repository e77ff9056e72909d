"""ZB-H2: no rank idles between its first and its last operation, for about twice the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.2 (ZB2P in the authors' code), for m >= 2p -
1. There rank ``r`` fills the wait for its first input gradient with forwards, ``2 (p - 1 - r)`` of them before the
first round, and runs weight gradients ``2 r`` rounds behind input gradients: all ranks end in the order in which they
began. This is ZB-H1 with both numbers doubled. The paper has no order for fewer micro-batches; here each number is then
raised by at most m - p, which for m <= p leaves ZB-H1 itself.

Without latency, with the same times tf, ti, tw on every rank, n = p - 1, m >= p and
s = min(m - p, n), the makespan is exactly m (tf + ti + tw) plus the longest of::

    n tf + (n - s) max(0, ti - tw)
    n ti - s tf
    s tf + (n - s) ti
    n (tf + ti) - (n + s) tw

It is never longer than ZB-H1's. For m >= 2p - 1, where s = n, it is n max(tf, ti - tf, tf + ti - 2 tw), and rank ``r``
spans m (tf + ti + tw) + (n - r) max(0, ti - tf, tf + ti - 2 tw). So no rank idles iff ti <= tf and tf + ti <= 2 tw,
which equal times fulfil. The paper gives n (tf + ti - 2 tw) for the longest span, which is this where it exceeds the
other two.
"""

from __future__ import annotations

from pipeproof.schedule.generators.weight_lag import one_stage
from pipeproof.schedule.programs import Schedule


def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank; stage ``r`` is on rank ``r``.

    With m >= 2p - 1, every rank holds at most ``2p - 1`` activations if W frees them, and rank ``r`` at most ``2 (p - 1
    - r) + 1`` if I does. With s = m - p from 0 to p - 1, those are ``p + min(p - 1 - r, s) + min(r,
    s)`` and ``p - r + min(p - 1 - r, s)``; with fewer micro-batches, the numbers of ZB-H1.
    """
    spare = max(0, num_micro_batches - num_ranks)
    return Schedule(
        tuple(
            one_stage(rank, num_micro_batches, behind + min(behind, spare), rank + min(rank, spare))
            for rank, behind in enumerate(reversed(range(num_ranks)))
        )
    )
