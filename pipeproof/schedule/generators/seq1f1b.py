"""Seq1F1B: 1F1B over sequence splits, which follow each other through the pipeline.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training",
arXiv:2406.03488, section 3. Causal attention of a split reads keys and values of the splits before it. So forwards of a
micro-batch run from its first split to its last, and backwards from the last to the first.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule, in_turn


def seq1f1b(num_ranks: int, num_micro_batches: int, num_splits: int) -> Schedule:
    """One program per pipeline rank ``r``, with ``min(m k, p - 1 - r + k - 1)`` warm-up forwards of one split each.

    At most ``min(m k, p - r + k - 1)`` splits are in flight on rank ``r``.
    With one split this is 1F1B, whose operations name no split.
    """
    splits: list[int | None] = [None] if num_splits == 1 else [*range(num_splits)]
    onward = [(micro_batch, split) for micro_batch in range(num_micro_batches) for split in splits]
    back = [(micro_batch, split) for micro_batch in range(num_micro_batches) for split in reversed(splits)]
    return Schedule(
        tuple(_rank_program(stage, num_ranks - 1 - stage + num_splits - 1, onward, back) for stage in range(num_ranks))
    )


_WorkItems = list[tuple[int, int | None]]


def _rank_program(stage: int, num_warmup: int, onward: _WorkItems, back: _WorkItems) -> Program:
    forwards = [Op(OpKind.FORWARD, stage, micro_batch, split=split) for micro_batch, split in onward]
    backwards = [Op(OpKind.BACKWARD, stage, micro_batch, split=split) for micro_batch, split in back]
    return in_turn(forwards, backwards, num_warmup)
