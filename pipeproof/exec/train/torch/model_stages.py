"""All stages of a model that was cut, of which every rank keeps those that the schedule places on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary, ref

from torch import nn

from pipeproof.exec.train.tied_weights import Tie

_CUTS: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], tuple[dict[int, str], ...]]] = WeakKeyDictionary()
"""By stage the model that it was cut from, and the weights that stages of the cut share."""


class ModelStages(Mapping[int, nn.Module]):
    """The stages of a whole model by global stage number, and the weights that several of them use.

    Every rank makes the same ones, on the meta device if the model is large; ``Pipeline`` keeps those of its rank.
    ``model`` is what the stages were cut from.
    """

    def __init__(self, stages: Sequence[nn.Module], tied: Sequence[Tie] = (), model: nn.Module | None = None) -> None:
        self._stages = list(stages)
        self.tied = tuple(dict(names) for names in tied)
        if model is not None:
            _CUTS.update((stage, (ref(model), self.tied)) for stage in stages)

    def __getitem__(self, number: int) -> nn.Module:
        return self._stages[number]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._stages)))

    def __len__(self) -> int:
        return len(self._stages)


def cut_model(stage: nn.Module) -> nn.Module | None:
    """Return the model that a stage was cut from; None if it was made by hand, or the model is gone."""
    cut = _CUTS.get(stage)
    return None if cut is None else cut[0]()


def cut_ties(stage: nn.Module) -> tuple[dict[int, str], ...]:
    """Return the weights that the stages of the cut share; none for a stage that was made by hand."""
    cut = _CUTS.get(stage)
    return () if cut is None else cut[1]
