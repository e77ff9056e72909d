"""All stages of a model that was cut, of which every rank keeps those that the schedule places on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.tied_weights import Tie
from pipeproof.exec.train.torch.model_names import unwrapped

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


class StaleModel:
    """Refuses the state dict of the model that ``stages`` were cut from, if other stages are trained on other ranks.

    From the first step on (``is_stale``), until a state dict is loaded into the model.
    """

    def __init__(self, stages: Mapping[int, nn.Module], num_stages: int) -> None:
        self.is_stale, self._message = False, ""
        own = {id(weight) for stage in stages.values() for weight in stage.parameters()}
        model = next(filter(None, (cut_model(unwrapped(stage)) for stage in stages.values())), None)
        if model is None or len(stages) == num_stages:
            return
        save = (
            "`save_pretrained(pipe, directory)`"
            if hasattr(model, "save_pretrained")
            else "`save_dcp(directory, pipe.stages)`; `pipeproof state reshard directory -o model.safetensors` then "
            "makes one file"
        )
        self._message = (
            f"this {type(model).__name__} has old weights: the Pipeline trains stages {sorted(stages)} on this rank, "
            f"and stages {[n for n in range(num_stages) if n not in stages]} on other ranks. Call on every rank {save}"
        )
        for part in model.modules():
            if not all(id(weight) in own for weight in part.parameters()):
                part.register_state_dict_pre_hook(self)
        model.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, *_: Any) -> None:
        self.is_stale = False

    def __call__(self, *_: Any) -> None:
        """Refuse a state dict, as its hook.

        Raises:
            PipelineError: a step has run.
        """
        if self.is_stale:
            raise PipelineError(self._message)

    def __deepcopy__(self, _: Any) -> StaleModel:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle a model that has this hook, as a state dict of it."""
        self()
        return self.__dict__
