"""The weights of the ordered reference, in the pieces that tensor-parallel ranks hold, and their gradients.

A weight that ranks do not cut has a copy for each piece of what it meets: one
for each piece of the sequence, and a router's for each tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.lanes import embeds_again, num_modules
from pipeproof.stages.reference.balance import without_biases
from pipeproof.stages.reference.pieces import Pieces, add, cut_dim, is_of_experts, leaf

Tensor: TypeAlias = paddle.Tensor


class OrderedWeights:
    """The weights of the plan's GPT in pieces; ``weights`` has them whole, and perhaps biases of routers beside them.

    ``of_units`` has the leaves that each split of a sequence and each
    expert-parallel rank computes with: ``of_units[split][rank]``, by name.
    What a context-parallel rank has of a sequence is a split, too.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        self.plan = plan
        self.num_pieces, self.num_ranks = plan.topology.tp, plan.topology.ep
        self.num_splits = plan.schedule.num_sequence_splits * plan.topology.cp
        self.sequence_pieces = self.num_pieces if plan.topology.sequence_parallel else 1
        self.weights: dict[str, Pieces] = {
            name: [paddle.to_tensor(array, stop_gradient=False) for array in self.cut(name, whole)]
            for name, whole in without_biases(weights).items()
        }
        self.of_units = [[self.weights] * self.num_ranks for _ in range(self.num_splits)]

    def cut(self, name: str, whole: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """An array of the named weight's shape as its pieces have it; of a number that goes with it a copy for each."""
        dim = cut_dim(name)
        if dim is not None and whole.ndim:
            return [np.ascontiguousarray(array) for array in np.split(whole, self.num_pieces, dim)]
        is_of_each = dim is not None or name.endswith("router.weight")
        return [whole] * (self.num_pieces if is_of_each else self.sequence_pieces)

    def zero_gradients(self) -> None:
        """Begin every gradient buffer as +0.0.

        Each split of sequences and each expert-parallel rank has buffers of its own, but for experts, which ranks
        share; every layer that computes with the embedding's weight has its own for it.
        """
        if self.num_splits * self.num_ranks > 1 or self._borrowers():
            self.of_units = []
            for _ in range(self.num_splits):
                first = self._leaves()
                experts = {name: pieces for name, pieces in first.items() if is_of_experts(name)}
                self.of_units.append([first, *(self._leaves() | experts for _ in range(1, self.num_ranks))])
        for weights in (weights for of_split in self.of_units for weights in of_split):
            for pieces in weights.values():
                for piece in pieces:
                    piece.grad = paddle.zeros_like(piece)

    def _leaves(self) -> dict[str, Pieces]:
        borrowed = {f"{layer}.weight": self.weights["embed.weight"] for layer in self._borrowers()}
        return {name: [leaf(piece) for piece in pieces] for name, pieces in (self.weights | borrowed).items()}

    def _borrowers(self) -> list[str]:
        """Layers that compute with the embedding's weight: a tied head, modules that look tokens up themselves."""
        model = self.plan.model
        modules = [f"mtp.{number}" for number in range(num_modules(model) if embeds_again(model) else 0)]
        return [*modules, "head"] if model.tied_embedding else modules

    def gradients(self, split: int = 0, rank: int = 0) -> dict[str, Pieces]:
        """The gradients from one split of one rank as they are, in pieces, each a tensor of its own.

        Those of experts, which come from all ranks, are with the first.
        """
        weights = self.of_units[split][rank].items()
        own = {name: pieces for name, pieces in weights if rank == 0 or not is_of_experts(name)}
        return {name: [piece.grad.clone() for piece in pieces] for name, pieces in own.items()}

    def summed(self, name: str, pieces: Pieces) -> Pieces:
        """A sum over micro-batches; copies of the weight of a norm or router all get the sum over copies."""
        return pieces if cut_dim(name) is not None else [add(pieces)] * len(pieces)

    def distinct(self, name: str, pieces: Pieces) -> list[Pieces]:
        """What different ranks hold of a gradient, without copies: by expert-parallel rank, its pieces."""
        pieces = pieces if cut_dim(name) is not None else pieces[:1]
        if not is_of_experts(name):
            return [pieces]
        return [list(of_rank) for of_rank in zip(*(piece.split(self.num_ranks) for piece in pieces), strict=True)]

    def joined(self, name: str, pieces: Pieces) -> npt.NDArray[Any]:
        """The named weight, or its gradient, from its pieces: an array of its own."""
        dim = cut_dim(name)
        arrays = [piece.numpy() for piece in pieces]
        return np.concatenate(arrays, dim) if dim is not None else arrays[0].copy()
