"""Bytes of a stage's training state on one rank (weights, gradients, optimizer state), and optimizer shards.

With ``memory.shard_optimizer: dp`` (stage 1 of arXiv:1910.02054) a rank's part of a weight is flattened in C order and
split into as many equal shards as there are dp ranks. The last shards are shorter, or empty, if the number of elements
does not divide. Rank k has the optimizer state of shard k and updates it. For communication shards are padded with
zeros to equal size. Fleet's ``DygraphShardingOptimizerV2`` and Megatron-LM's distributed optimizer split buffers of
many weights in the same way; here each weight is a separate buffer. Megatron-LM's shards are over all ranks that hold
a weight (``memory.optimizer_ranks: replicas``), which memory and times follow. Fleet's first version assigns whole
weights to ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import Layer, Parameter

FLOAT32 = 4
"""Bytes of a float32 element."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a stage's training state on one rank; ``updated`` are weights and gradients that its optimizer moves."""

    parameters: int
    gradients: int
    optimizer: int
    updated: Fraction


def memory_dtype(plan: PlanSpec) -> str:
    """The type of weights and activations: from ``memory``, else ``cost.analytic``, else ``run``."""
    analytic = plan.cost.analytic
    return plan.memory.dtype or (analytic.dtype if analytic is not None else None) or plan.run.dtype


def optimizer_bytes(plan: PlanSpec) -> float:
    """Bytes of optimizer state per parameter, before sharding."""
    if plan.memory.optimizer_bytes is not None:
        return plan.memory.optimizer_bytes
    item, main = dtype_bytes(memory_dtype(plan)), plan.run.main_grad_dtype
    state_item = max(item, FLOAT32 if main is None else dtype_bytes(main))
    copy = state_item if item < state_item else 0
    return copy + (2 * state_item if plan.run.optimizer == "adamw" else 0)


def state_of(plan: PlanSpec, layers: Iterable[Layer]) -> StateBytes:
    """Bytes on one rank for the layers' own weights."""
    return state_of_weights(plan, (weight for layer in layers for weight in layer.parameters))


def state_of_weights(plan: PlanSpec, weights: Iterable[Parameter]) -> StateBytes:
    """Bytes on one rank for some weights."""
    axes = {"tp": plan.topology.tp, "ep": plan.topology.ep}
    sizes: dict[int, list[int]] = {}  # by number of shards
    for weight in weights:
        sizes.setdefault(state_shards(plan, weight), []).append(prod(weight.local_shape(axes)))
    numel = sum(map(sum, sizes.values()))
    item, gradient_item = dtype_bytes(memory_dtype(plan)), dtype_bytes(plan.gradient_dtype)
    held = sum(shard_numel(size, shards) for shards, of_shards in sizes.items() for size in of_shards)
    updated = sum((Fraction(sum(of_shards), shards) for shards, of_shards in sizes.items()), Fraction(0))
    return StateBytes(
        numel * item,
        numel * gradient_item,
        ceil(held * Fraction(optimizer_bytes(plan))),
        updated * (2 * item + gradient_item),
    )


def moved_by_update(state: StateBytes) -> Fraction:
    """Bytes that an optimizer step reads and writes: it reads gradients, and reads and writes weights and its state.

    If the optimizer is sharded, each rank updates its shard of the weights.
    """
    return state.updated + 2 * state.optimizer


def state_shards(plan: PlanSpec, weight: Parameter) -> int:
    """The number of ranks that share the optimizer state of a weight, in memory and in time."""
    topology = plan.topology
    if plan.memory.shard_optimizer == "none" or plan.memory.optimizer_ranks == "dp":
        return num_shards(plan)
    return topology.dp * topology.cp * (1 if "ep" in weight.sharded_over else topology.ep)


def num_shards(plan: PlanSpec) -> int:
    """The number of optimizer shards of each weight in the graph and in a run, over dp; 1 without sharding."""
    return plan.topology.dp if plan.memory.shard_optimizer == "dp" else 1


def shard_numel(numel: int, shards: int) -> int:
    """Elements of the first shard, which is the padded size of all shards."""
    return -(-numel // shards)


def shard_range(numel: int, shards: int, shard: int) -> tuple[int, int]:
    """The half-open range of shard ``shard`` in the flattened weight; it may be empty."""
    size = shard_numel(numel, shards)
    return min(shard * size, numel), min((shard + 1) * size, numel)
