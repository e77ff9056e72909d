"""Looped breadth-first: every stage of a rank takes all micro-batches before the next stage begins.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv:2211.05953. It is the order of PyTorch's ``ScheduleLoopedBFS``
(torch 2.13, ``torch/distributed/pipelining/schedules.py``): backwards take stages and micro-batches from the last, and
a weight gradient accumulates in the reverse of index order. Weights of a stage are needed once for all forwards and
once for all backwards, an advantage for sharded weights. All activations of the step are held at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, stage_ops


def looped_bfs(
    num_ranks: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    placement: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """One program per pipeline rank: forwards by rising stage, backwards by falling stage.

    ``placement`` has the stages of each rank, in any order and not
    necessarily as many on each; without it stage ``c * p + r`` is chunk ``c``
    of rank ``r``. Every placement works: stages feed each other upwards only.
    """
    if placement is None:
        placement = [range(rank, num_chunks * num_ranks, num_ranks) for rank in range(num_ranks)]
    return Schedule(tuple(_rank_program(sorted(stages), num_micro_batches) for stages in placement))


def _rank_program(stages: Sequence[int], num_micro_batches: int) -> tuple[Op, ...]:
    onward = range(num_micro_batches)
    forwards = [op for stage in stages for op in stage_ops(OpKind.FORWARD, stage, onward)]
    backwards = [op for stage in reversed(stages) for op in stage_ops(OpKind.BACKWARD, stage, reversed(onward))]
    return (*forwards, *backwards)
