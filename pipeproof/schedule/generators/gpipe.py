"""GPipe: all forwards, then all backwards (Paddle calls it FThenB).

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism", arXiv:1811.06965.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program per pipeline rank: ``F0 .. F(m-1) B0 .. B(m-1)``.

    Backward runs in index order too, and every weight gradient accumulates in index order (the order of the
    single-process reference).
    """
    return Schedule(
        tuple(
            tuple(
                Op(kind, stage, micro_batch)
                for kind in (OpKind.FORWARD, OpKind.BACKWARD)
                for micro_batch in range(num_micro_batches)
            )
            for stage in range(num_ranks)
        )
    )
