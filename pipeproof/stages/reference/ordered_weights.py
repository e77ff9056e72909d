"""The weights of the ordered reference, sharded as on tensor-parallel ranks, and their gradients.

Names, sharded dims and copies are those of the description. A weight that is not sharded has a copy for each shard of
its input, if there are several: a copy has an addend of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.mtp_streams import embeds_again, num_modules
from pipeproof.stages.reference.balance import without_biases
from pipeproof.stages.reference.sharded_tensors import Shards, add, is_expert_weight, leaf

Tensor: TypeAlias = paddle.Tensor


class OrderedWeights:
    """The sharded weights of the plan's GPT. The argument ``weights`` has them whole, and may have router biases.

    ``leaves[split][rank]`` has, by name, the leaves that a sequence split and an expert-parallel rank compute with. The
    part of a sequence on a context-parallel rank is also a split.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        self.plan = plan
        self.num_shards, self.num_ranks = plan.topology.tp, plan.topology.ep
        self.num_splits = plan.schedule.num_sequence_splits * plan.topology.cp
        self.sequence_shards = self.num_shards if plan.topology.sequence_parallel else 1
        parameters = [parameter for layer in describe_gpt(plan) for parameter in layer.parameters]
        self._shard_dims = {parameter.name: parameter.tp.dim for parameter in parameters}
        self._copied = {parameter.name for parameter in parameters if "tp" in parameter.partial_over}
        self.weights: dict[str, Shards] = {
            name: [paddle.to_tensor(array, stop_gradient=False) for array in self.shard_array(name, whole)]
            for name, whole in without_biases(weights).items()
        }
        self.leaves = [[self.weights] * self.num_ranks for _ in range(self.num_splits)]

    def shard_array(self, name: str, whole: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Shard an array of the named weight's shape. A scalar that belongs to the weight is copied for each shard."""
        dim = self._shard_dims[name]
        if dim is not None and whole.ndim:
            return [np.ascontiguousarray(array) for array in np.split(whole, self.num_shards, dim)]
        return [whole] * (self.num_shards if dim is not None or name in self._copied else 1)

    def zero_gradients(self) -> None:
        """Set every gradient buffer to +0.0.

        Each sequence split and each expert-parallel rank has its own buffers; ranks share those of experts. Each layer
        that uses the embedding's weight has its own buffer for it.
        """
        if self.num_splits * self.num_ranks > 1 or self._borrowers():
            self.leaves = []
            for _ in range(self.num_splits):
                first = self._new_leaves()
                experts = {name: shards for name, shards in first.items() if is_expert_weight(name)}
                self.leaves.append([first, *(self._new_leaves() | experts for _ in range(1, self.num_ranks))])
        for weights in (weights for of_split in self.leaves for weights in of_split):
            for shards in weights.values():
                for shard in shards:
                    shard.grad = paddle.zeros_like(shard)

    def _new_leaves(self) -> dict[str, Shards]:
        borrowed = {f"{layer}.weight": self.weights["embed.weight"] for layer in self._borrowers()}
        return {name: [leaf(shard) for shard in shards] for name, shards in (self.weights | borrowed).items()}

    def _borrowers(self) -> list[str]:
        """Layers that use the embedding's weight: a tied head, and modules that look up tokens themselves."""
        model = self.plan.gpt
        modules = [f"mtp.{number}" for number in range(num_modules(model) if embeds_again(model) else 0)]
        return [*modules, "head"] if model.tied_embedding else modules

    def gradients(self, split: int = 0, rank: int = 0) -> dict[str, Shards]:
        """Copies of the sharded gradients of one split and rank. The gradients of experts are rank 0's."""
        weights = self.leaves[split][rank].items()
        own = {name: shards for name, shards in weights if rank == 0 or not is_expert_weight(name)}
        return {name: [shard.grad.clone() for shard in shards] for name, shards in own.items()}

    def summed(self, name: str, shards: Shards) -> Shards:
        """Complete a sum over micro-batches: the copies of a norm's or router's weight all get the sum over copies."""
        return shards if self._shard_dims[name] is not None else [add(shards)] * len(shards)

    def distinct(self, name: str, shards: Shards) -> list[Shards]:
        """The parts of a gradient on different ranks, without copies: shards by expert-parallel rank."""
        shards = shards if self._shard_dims[name] is not None else shards[:1]
        if not is_expert_weight(name):
            return [shards]
        return [list(of_rank) for of_rank in zip(*(shard.split(self.num_ranks) for shard in shards), strict=True)]

    def joined(self, name: str, shards: Shards) -> npt.NDArray[Any]:
        """Join the shards of the named weight, or of its gradient, into a new array."""
        dim = self._shard_dims[name]
        arrays = [shard.numpy() for shard in shards]
        return np.concatenate(arrays, dim) if dim is not None else arrays[0].copy()
