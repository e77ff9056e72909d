"""The operations of one kind on one stage, for many micro-batches at once.

Schedules of large plans have hundreds of thousands of operations. Making them
one by one is most of the time that a generator takes; here no Python code runs
for each of them, which halves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from pipeproof.schedule.ops import Op, OpKind

_REST = tuple(Op._field_defaults[name] for name in Op._fields[3:])


def stage_ops(kind: OpKind, stage: int, micro_batches: Iterable[int]) -> list[Op]:
    """Return ``[Op(kind, stage, micro_batch) for micro_batch in micro_batches]``."""
    fields = zip(repeat(kind), repeat(stage), micro_batches, *map(repeat, _REST), strict=False)
    return list(map(tuple.__new__, repeat(Op), fields))
