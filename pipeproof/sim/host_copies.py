"""Copies of activations between device and host memory: their bytes and times."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from types import MappingProxyType

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.measured_curves import exact
from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.ops import COPY_KINDS
from pipeproof.specs.exact_times import rounded_up
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.stage_memory import Lifetime

COPIED = (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
"""Lifetimes of the activations that are copied: those that a forward stores for its backward."""

_NO_TIMES: Mapping[int, Fraction] = MappingProxyType({})


def copied_bytes(lowered: LoweredPlan, copies: IntColumn) -> IntColumn:
    """Bytes of each of these copies: all that its stage stores of its work item from forward to backward."""
    known: dict[tuple[int, int], int] = {}
    graph, sizes = lowered.graph, lowered.size_of_work_item
    keys = [
        (stage, sizes[item] if sizes else 0)
        for stage, item in zip(graph.stage[copies].tolist(), graph.work_item[copies].tolist(), strict=True)
    ]
    for stage, size in set(keys):
        stored = stored_activations(lowered.spec, lowered.layers_of(stage), lowered.sizes[size])
        known[stage, size] = ceil(sum(part.num_bytes for part in stored if part.lifetime in COPIED))
    return np.array([known[key] for key in keys], dtype=np.int64)


def copy_times(lowered: LoweredPlan) -> Mapping[int, Fraction]:
    """Microseconds of each copy by op id, rounded up to nanoseconds; none where the plan has no ``host_bandwidth``."""
    bandwidth = lowered.spec.cost.host_bandwidth
    copies = np.flatnonzero(lowered.graph.is_kind(COPY_KINDS))
    if bandwidth is None or not len(copies):
        return _NO_TIMES
    bytes_per_us = exact(bandwidth) * 1000
    num_bytes = copied_bytes(lowered, copies).tolist()
    return {op_id: rounded_up(size / bytes_per_us) for op_id, size in zip(copies.tolist(), num_bytes, strict=True)}
