"""Weights that several layers use: their ranks, and the stage with which a rank reduces and updates them.

A tied head multiplies by the embedding's weight, and modules of multi-token
prediction may look tokens up in it. Pipeline ranks that hold one of their
stages hold the weight, each once. What a rank's stages add to its
gradient is added up on the rank, first of the first stage; then over the
ranks that hold it, in their order (a ``pp`` group, as Megatron-LM's embedding
group, arXiv:1909.08053); then over the data axes, as of any other weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.stages.describe.layer import Layer, Parameter, users_of_shared


@dataclass(frozen=True)
class SharedWeights:
    """``users`` has the stages that compute with a weight, for those that any layer borrows.

    ``holders`` are the pipeline ranks of each stage.
    """

    users: Mapping[str, tuple[int, ...]]
    holders: Sequence[tuple[int, ...]]

    def of_stage(self, stage: int, layers: Sequence[Layer], pp: int) -> tuple[Parameter, ...]:
        """The weights that a pipeline rank reduces and updates with a stage, in the model's order.

        Not those that the stage borrows from one that the rank holds: they belong to that one.
        """
        borrowed = dict.fromkeys(weight for layer in layers for weight in layer.borrowed)
        own = [weight for layer in layers for weight in layer.parameters]
        return (*(weight for weight in borrowed if self.home(weight.name, pp) == stage and weight not in own), *own)

    def home(self, name: str, pp: int) -> int:
        """The stage with which a pipeline rank that holds a borrowed weight reduces and updates it."""
        return next(stage for stage in self.users[name] if pp in self.holders[stage])

    def borrowers(self, pp: int) -> Mapping[int, tuple[int, ...]]:
        """By stage of a pipeline rank, the stages there that compute with borrowed weights which belong to it."""
        stages_of: dict[int, set[int]] = {}
        for users in self.users.values():
            local = [stage for stage in users if pp in self.holders[stage]]
            if local:
                stages_of.setdefault(local[0], set()).update(local)
        return {home: tuple(sorted(stages)) for home, stages in stages_of.items()}

    def places(self, stage: int, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a weight of a stage, in order."""
        users = self.users.get(name, (stage,))
        return tuple(sorted({pp for user in users for pp in self.holders[user]}))

    def groups(self) -> Iterator[tuple[int, ...]]:
        """The pipeline ranks that sum gradients with each other, for each sum that there is."""
        for holders in (*self.holders, *(self.places(stages[0], name) for name, stages in self.users.items())):
            if len(holders) > 1:
                yield holders


def shared_weights(stages: Sequence[Sequence[Layer]], holders: Sequence[tuple[int, ...]]) -> SharedWeights:
    """Of a model whose layers are given by stage."""
    return SharedWeights(users_of_shared(stages), holders)
