"""A guard for the model that stages were cut from: after a step, a rank has trained weights of its own stages alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeproof.exec.train.torch.model_names import unwrapped
from pipeproof.exec.train.torch.model_stages import cut_model
from pipeproof.exec.train.train_errors import PipelineError


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
