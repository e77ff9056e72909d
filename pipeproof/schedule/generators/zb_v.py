"""ZB-V: two stages per rank in a V, no rank idles, in the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 6, in the order of PyTorch's
``ScheduleZBVZeroBubble``. Stage ``r`` is the chunk of rank ``r`` on the way down, stage ``2p - 1 - r`` its chunk on the
way back up. So the loss is on rank 0, where forwards turn into backwards at once.

All times are per chunk, the same for all, and there is no latency. If
tf = ti = tw = t, the makespan is max(6m + p - 1, 4m + 4p - 2) t for any p and m; with
m >= 2p - 1 every rank spans exactly its work, 6 m t. For other times,
m >= 2p - 1 and n = p - 1 >= 1, the makespan is exactly 2 m (tf + ti + tw) plus the longest of::

    n ti
    2n (ti - tw)
    max(tf, ti) + (n - 1) tw
    (2n - 1) tf - (n - 1) ti + max(0, tf - ti - tw) + n max(0, ti - 2 tw)

So the idle time never grows with m, but it does with the difference of the
times: where W takes long, ZB-H1 on stages of twice the size is faster in the same memory (p = 4,
m = 8, tf = ti = 1, tw = 10: 198 and not 213).

For m < 2p - 1 the missing micro-batches are left out of the order for 2p - 1, as in PyTorch. It is valid but not the
best: for m = 1 it takes 4p + 2 (p > 1), one more than the chain of forwards and backwards, because rank p - 1 runs W
between its two I.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank.

    Rank ``r`` holds at most ``min(2p, m + 1 + r, 2m)`` chunk activations,
    whether I frees them or W: ``2p`` on every rank where m >= 2p - 1.
    """
    return Schedule(tuple(_rank_program(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)))


def _rank_program(rank: int, num_ranks: int, num_micro_batches: int) -> Program:
    """Each stage runs each kind in index order: letters define the program; letters left over are dropped."""
    ops = {
        letter: iter([Op(kind, stage, k) for k in range(num_micro_batches)])
        for letters, stage in (("FIW", rank), ("fiw", 2 * num_ranks - 1 - rank))
        for letter, kind in zip(letters, (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT), strict=True)
    }
    letters = _letters(rank, num_ranks, max(num_micro_batches, 2 * num_ranks - 1))
    return tuple(op for letter in letters if (op := next(ops[letter], None)) is not None)


def _letters(rank: int, num_ranks: int, num_micro_batches: int) -> str:
    """F, I and W of the stage on the way down, f, i and w of the one on the way up, for m >= 2p - 1."""
    to_turn = num_ranks - rank  # stages from this one to the turn of the V, itself included
    num_warmup = num_ranks + to_turn - 1  # forwards on the way down before the first on the way up that has an I behind
    return (
        "F" * (2 * to_turn - 1)
        + "fF" * rank
        + "fiw" * to_turn
        + "FIWfiw" * (num_micro_batches - num_warmup)
        + "IWfiw" * (to_turn - 1)
        + "Ii" * rank
        + "IW" * to_turn
        + "w" * rank
        + "W" * rank
    )
