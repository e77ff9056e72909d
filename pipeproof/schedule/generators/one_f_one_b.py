"""1F1B: a short warm-up, then alternately one forward and one backward.

Narayanan et al., "PipeDream", arXiv:1806.03377 (the order), and
"Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv:2104.04473 (with the flush at the end of the step, as here).
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program per pipeline rank ``r``, with ``min(m, p - 1 - r)`` warm-up forwards.

    At most ``min(m, p - r)`` micro-batches are in flight on rank ``r``.
    """
    return Schedule(tuple(_rank_program(stage, num_ranks, num_micro_batches) for stage in range(num_ranks)))


def _rank_program(stage: int, num_ranks: int, num_micro_batches: int) -> tuple[Op, ...]:
    num_warmup = min(num_micro_batches, num_ranks - 1 - stage)
    forwards = [Op(OpKind.FORWARD, stage, k) for k in range(num_micro_batches)]
    backwards = [Op(OpKind.BACKWARD, stage, k) for k in range(num_micro_batches)]
    program = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        program += [forward, backward]
    return tuple(program + backwards[num_micro_batches - num_warmup :])
