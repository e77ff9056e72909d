"""Which layers a model has, by name and in the order in which they run.

The order is that of PaddleFleet's GPT, whose classes lend each layer the name
that ``stages: layer:REGEX`` looks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pipeproof.specs.model import ModelSpec

CLASS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "GPTEmbedding",
        "empty": "EmptyLayer",
        "layer": "TransformerLayer",
        "mtp": "MultiTokenPredictionLayer",
        "norm": "WrappedPaddleNormPipe",
        "head": "GPTLMHead",
    }
)
"""By the first word of a layer's name: the class that stands in its place in PaddleFleet."""


def layer_order(model: ModelSpec) -> tuple[str, ...]:
    """The names of all layers: ``embed``, empty layers, ``layer.0`` .., then norm and empty layers, and ``head``.

    Empty layers are numbered over head and tail. ``model.final_norm`` says
    whether the norm stands before those of the tail, or after. Modules of
    multi-token prediction (``mtp.0`` ..) follow the blocks, before either: they
    read what is not normed yet, and the norm is of what they make, too.
    """
    num_head, num_tail = model.num_empty
    empties = [f"empty.{i}" for i in range(num_head + num_tail)]
    head, tail = empties[:num_head], empties[num_head:]
    end = ["norm", *tail] if model.final_norm == "before_tail_empty" else [*tail, "norm"]
    modules = [f"mtp.{i}" for i in range(0 if model.mtp is None else model.mtp.num_modules)]
    return ("embed", *head, *(f"layer.{i}" for i in range(model.num_layers)), *modules, *end, "head")


def first_word(name: str) -> str:
    """``layer`` of ``layer.3``; of a layer without a number, its name."""
    return name.partition(".")[0]


def is_empty(name: str) -> bool:
    """Whether a layer hands on what it gets."""
    return first_word(name) == "empty"


def takes_a_place(name: str) -> bool:
    """Whether the even cut counts a layer: blocks, and empty layers, which stand where blocks would."""
    return first_word(name) in ("layer", "empty")
