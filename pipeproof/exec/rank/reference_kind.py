"""Kind of comparison of a run: bits of the unpartitioned model, bits of the ordered reference, or a bound.

The ordered reference adds in the plan's order. PyTorch has none: where one would be needed, the unpartitioned model
computes every step from the ranks' own weights, and the distance is compared with a bound. Over several steps the
optimizer would turn rounding differences into whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.comm.accumulation_order import Accumulation, accumulation_of
from pipeproof.comm.op_graph import LoweredPlan, index_of, stage_weights

Array = npt.NDArray[Any]


def needs_ordered_reference(plan: LoweredPlan) -> bool:
    """Return True if the plan adds in another order than the unpartitioned model, which runs micro-batches in order.

    A compiler adds in an order of its own, and so do kernels that are not deterministic.
    """
    topology = plan.spec.topology
    return (
        plan.spec.run.compiler is not None
        or not plan.spec.run.deterministic
        or max(topology.tp, topology.cp, topology.ep, topology.dp) > 1
        or accumulation_of(plan) is not Accumulation.IN_ORDER
    )


def is_checked_by_bound(plan: LoweredPlan) -> bool:
    """Return True if every step is compared with one of the unpartitioned model from the ranks' weights, by a bound."""
    return plan.spec.run.backend == "torch" and needs_ordered_reference(plan)


def assembled_weights(plan: LoweredPlan, ranks: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
    """Assemble the shards of ranks to whole weights; other arrays (biases of routers) are taken as they are.

    Where several ranks have the same array or shard, that of the first rank is taken. The ranks must have all weights.
    """
    whole = {name: array for _, own in sorted(ranks.items(), reverse=True) for name, array in own.items()}
    for stage, parameter in stage_weights(plan):
        holders = [rank for rank in plan.ranks_of_weight(stage, parameter.name) if rank in ranks]
        assembled = np.empty(parameter.shape, dtype=ranks[holders[0]][parameter.name].dtype)
        for rank in reversed(holders):
            region = tuple(slice(start, stop) for start, stop in index_of(plan, parameter, rank))
            assembled[region] = ranks[rank][parameter.name]
        whole[parameter.name] = assembled
    return whole
