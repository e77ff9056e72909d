"""Actions that PyTorch adds around computations for the weights: gathering, dropping, and finishing their gradients.

``_add_unshard_reshard`` and ``_add_reduce_grad`` of torch 2.13
(``torch/distributed/pipelining/schedules.py``):

- Before an operation, the stages among the next three of the rank that are
  not there are gathered (UNSHARD), in the order in which they are needed, and
  those that are there and not among the next three are dropped (RESHARD)
  before that. At the end all are dropped.
- Behind the last B or W of a stage its gradients are finished (REDUCE_GRAD):
  reduced where weights are sharded, and divided by the number of
  micro-batches. A file without it runs, and its gradients are that much too
  large.

Where several stages are dropped together, theirs go in the order of a hash
table and ours in the order of their numbers; nothing depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeproof.schedule.columns import Row
from pipeproof.schedule.formats.inexpressible import steps_of
from pipeproof.schedule.ops import Op, OpKind

NUM_AHEAD = 3
"""Stages whose weights are there at a time: one for a forward, one for a backward, one that is being gathered."""

_LAST_PARTS = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)


def with_weights(rows: Sequence[Row], num_micro_batches: int, form: str) -> Iterator[Row]:
    """The computations of a rank with UNSHARD, RESHARD and REDUCE_GRAD rows. Linear in operations times stages.

    ``form`` is the name of the format in messages.

    Raises:
        InexpressibleError: rows are one call that is no overlapped pair.
    """
    steps = list(steps_of(rows, form))
    gathered: set[int] = set()
    num_done: Counter[int] = Counter()
    for step, ahead in zip(steps, _stages_ahead(steps), strict=True):
        for stage in sorted(gathered.difference(ahead)):
            yield Row(Op(OpKind.RESHARD, stage))
        for stage in ahead:
            if stage not in gathered:
                yield Row(Op(OpKind.UNSHARD, stage))
        gathered = set(ahead)
        yield from step
        for op in (row.op for row in step):
            num_done[op.stage] += op.kind in _LAST_PARTS
            if op.kind in _LAST_PARTS and num_done[op.stage] == num_micro_batches:
                yield Row(Op(OpKind.REDUCE_GRAD, op.stage))
    for stage in sorted(gathered):
        yield Row(Op(OpKind.RESHARD, stage))


def _stages_ahead(steps: Sequence[Sequence[Row]]) -> list[tuple[int, ...]]:
    """For each step the next three stages from it on, in order; both of a pair where it has the third.

    Goes from the last step to the first and keeps the stages in the order of their next use.
    """
    ahead: list[tuple[int, ...]] = []
    next_use: list[tuple[int, int]] = []  # (place of the step, stage), the nearest first
    for place in reversed(range(len(steps))):
        stages = list(dict.fromkeys(row.op.stage for row in steps[place]))
        next_use = [(place, stage) for stage in stages] + [use for use in next_use if use[1] not in stages]
        furthest = next_use[:NUM_AHEAD][-1][0]
        ahead.append(tuple(stage for use, (step, stage) in enumerate(next_use) if use < NUM_AHEAD or step == furthest))
    return ahead[::-1]
