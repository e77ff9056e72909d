"""1F1B: a short warm-up, then alternately one forward and one backward.

Narayanan et al., "PipeDream", arXiv:1806.03377 (the order), and
"Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv:2104.04473 (with the flush at the end of the step, as here).

With overlaps on one rank it is the combined 1F1B of Megatron-Core
(``megatron/core/pipeline_parallel/combined_1f1b.py``, 2026): with one more warm-up forward, the forward and the
backward of each later pair do not depend on each other. Megatron-Core has no order for several ranks with one stage
each. A pair sends both its outputs at its end: a micro-batch takes two pairs from a rank to the next one and back. Here
each rank has two forwards more in its warm-up than the next rank, and no rank waits for that way.
"""

from __future__ import annotations

from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Schedule, in_turn, stage_ops, steady_pairs


def one_f_one_b(num_ranks: int, num_micro_batches: int, overlaps: bool = False) -> Schedule:  # noqa: FBT002
    """One program per pipeline rank ``r``, with ``min(m, p - 1 - r)`` warm-up forwards.

    At most ``min(m, p - r)`` micro-batches are in flight on rank ``r``. If forwards ``overlaps`` with backwards, there
    are ``min(m, 2 (p - 1 - r) + 1)`` warm-up forwards, and one micro-batch more in flight. With equal times of stages
    that is never slower than without pairs, if a pair takes at most the time of its two computations.
    """
    ranks_behind = range(num_ranks - 1, -1, -1)
    num_warmup = [min(num_micro_batches, 2 * behind + 1 if overlaps else behind) for behind in ranks_behind]
    programs, micro_batches = [], range(num_micro_batches)
    for stage, warmup in enumerate(num_warmup):
        forwards = stage_ops(OpKind.FORWARD, stage, micro_batches)
        programs.append(in_turn(forwards, stage_ops(OpKind.BACKWARD, stage, micro_batches), warmup))
    return Schedule(tuple(programs), steady_pairs(num_micro_batches, num_warmup) if overlaps else ())
