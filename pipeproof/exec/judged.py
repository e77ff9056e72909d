"""What a run is held against: the uncut model's bits, those of one that adds in the plan's order, or a bound.

PyTorch has no reference that adds in the plan's order. Where one would be
needed, every step is taken by the uncut model from the weights that the ranks
themselves had, and held within the bound: over several steps the optimizer
would turn differences that are rounding alone into whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.comm.accumulation import Accumulation, accumulation_of
from pipeproof.comm.held import index_of
from pipeproof.comm.lowered import LoweredPlan

Array = npt.NDArray[Any]


def needs_ordered(plan: LoweredPlan) -> bool:
    """Whether the plan adds in another order than the uncut model, which runs micro-batches one by one."""
    topology = plan.spec.topology
    return (
        max(topology.tp, topology.cp, topology.ep, topology.dp) > 1
        or accumulation_of(plan) is not Accumulation.IN_ORDER
    )


def is_by_bound(plan: LoweredPlan) -> bool:
    """Whether steps are taken by the uncut model alone, from the ranks' own weights, and held within the bound."""
    return plan.spec.run.backend == "torch" and needs_ordered(plan)


def whole_weights(plan: LoweredPlan, ranks: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """What all ranks have of weights, put together; what is no weight (biases of routers) is of the first that has it.

    Of ranks that hold the same part, the first one's is taken.
    """
    whole = {name: array for rank in reversed(ranks) for name, array in rank.items()}
    for stage in range(len(plan.stages)):
        for layer in plan.layers_of(stage):
            for parameter in layer.parameters:
                holders = plan.ranks_of_weight(stage, parameter.name)
                joined = np.empty(parameter.shape, dtype=ranks[holders[0]][parameter.name].dtype)
                for rank in reversed(holders):
                    place = tuple(slice(start, stop) for start, stop in index_of(plan, parameter, rank))
                    joined[place] = ranks[rank][parameter.name]
                whole[parameter.name] = joined
    return whole
