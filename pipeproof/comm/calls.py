"""Which operations are issued as one call."""

from __future__ import annotations

import numpy as np

from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import COMPUTE_KINDS
from pipeproof.schedule.optable import OpGraph


def calls_of(graph: OpGraph) -> IntColumn:
    """By operation, the number of its call on its rank, which is its batch; NONE if it is issued by itself.

    A batch of computations alone is no call: they overlap, and the host comes
    to them one by one.
    """
    batched = graph.batch != NONE
    others = batched & ~graph.is_kind(COMPUTE_KINDS)
    if not (batched & ~others).any():
        return graph.batch
    batch = packed(graph.rank, graph.batch)
    return np.where(batched & np.isin(batch, batch[others]), graph.batch, NONE)
