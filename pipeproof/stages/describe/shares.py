"""How weights are cut into the shares that data-parallel ranks update: stage 1 of arXiv:1910.02054.

With ``memory.shard_optimizer: dp`` the part of a weight that a rank holds is
flattened, in C order, and cut into as many equal shares as there are dp
ranks; the last ones are shorter, or empty, where the number of elements does
not divide. Rank k keeps the optimizer's states of share k and updates it. On
the wire shares are filled up with zeros to one size.

Fleet's ``DygraphShardingOptimizerV2`` and Megatron-LM's distributed optimizer
cut buffers of many weights in the same way; here each weight is a buffer of
its own. Fleet's first version gives whole weights to ranks.
"""

from __future__ import annotations

from pipeproof.specs.plan import PlanSpec


def num_shares(plan: PlanSpec) -> int:
    """How many ranks share out what the optimizer does for a weight; 1 where each does all."""
    return plan.topology.dp if plan.memory.shard_optimizer == "dp" else 1


def share_numel(numel: int, shares: int) -> int:
    """Elements of the first share, which is the size of all on the wire."""
    return -(-numel // shares)


def share_range(numel: int, shares: int, place: int) -> tuple[int, int]:
    """The half-open range of the flattened weight that is the share of the rank at ``place``; it may be empty."""
    size = share_numel(numel, shares)
    return min(place * size, numel), min((place + 1) * size, numel)
