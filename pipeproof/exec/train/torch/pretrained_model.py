"""Stages of one ``PreTrainedModel``, and the whole model on the meta device, which knows all names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.cut_transformers import TransformersStage
from pipeproof.exec.train.torch.dcp_files import Ranks
from pipeproof.exec.train.torch.model_names import HeldTensor, held_tensors, unwrapped
from pipeproof.exec.train.torch.model_stages import ModelStages

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the files of a directory, as the library has them."""


def models_of(stages: Mapping[int, nn.Module], ranks: Ranks) -> list[Any]:
    """The ``PreTrainedModel`` of each stage of this rank.

    Raises:
        PipelineError: a stage is of another kind, or of a model that such a directory does not hold.
    """
    if isinstance(stages, ModelStages) and ranks.size > 1:
        raise PipelineError(
            "`stages` has the whole model, and a rank reads its own stages: pass {number: stages[number] for number in "
            "stages_of_rank(schedule, num_ranks, num_stages, rank)}"
        )
    models = []
    for number, stage in stages.items():
        inner = unwrapped(stage)
        if not isinstance(inner, TransformersStage):
            raise PipelineError(
                f"stage {number} is a {type(inner).__name__}: only stages of `stages_of_transformers` are read from "
                "and written to directories of Hugging Face; use load_dcp and save_dcp for others"
            )
        model = inner.pretrained
        if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
            raise PipelineError(
                f"the {type(model).__name__} of stage {number} is quantized or has adapters: use load_dcp and save_dcp"
            )
        models.append(model)
    if not models:
        raise PipelineError("give this rank at least one stage: {number: module}")
    return models


def whole_model(models: Sequence[Any]) -> Any:
    """The whole model of some stages on the meta device, with the names, ties and conversions of the library."""
    model = models[0]
    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(model.config))
    whole._weight_conversions = getattr(model, "_weight_conversions", None)  # noqa: SLF001 - of the directory it is from
    if getattr(model, "generation_config", None) is not None:
        whole.generation_config = model.generation_config
    return whole


def known_tensors(whole: Any, stages: Mapping[int, nn.Module]) -> list[HeldTensor]:
    """The parameters and buffers of stages.

    Raises:
        PipelineError: the whole model does not have one of them.
    """
    names, held = set(whole.state_dict()), held_tensors(stages)
    for entry in held:
        if entry.name not in names:
            raise PipelineError(
                f"stage {entry.stage} has {entry.name}, which {type(whole).__name__} does not have: use load_dcp and "
                "save_dcp for a model that was changed"
            )
    return held
