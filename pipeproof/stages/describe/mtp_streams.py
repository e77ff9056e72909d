"""Multi-token prediction (MTP): streams, shifted micro-batches and losses.

The main model and each module predict from their own activations of a token: an MTP stream each. Streams between stages
are one tensor, joined along the rows of the micro-batch (b): the rows of the main stream first, then the rows of module
0, and so on. So sequence parallelism splits all streams at the same tokens, in either order of dims.

Blocks process the main stream. Module j reads stream j and writes stream j + 1. Embedding, final norm and head process
all existing streams. The final norm processes the main stream if modules have norms of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal

import numpy as np

from pipeproof.specs.model import ModelSpec, MtpSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import MAIN_LOSS, GradientFacts, Loss, LossPath
from pipeproof.stages.describe.layer import Layer, ends_normed, layer_order, layer_prefix
from pipeproof.stages.describe.synthetic import IGNORED, Batch

MTP = "mtp"
"""The prefix of a module's name; module j is ``mtp.j``."""
MAIN_STREAMS = "main_streams"
"""The weights of a module with which it contracts the streams for the main model, if it reads all streams."""


def is_mtp(name: str) -> bool:
    """True for an MTP module."""
    return layer_prefix(name) == MTP


def module_of(name: str) -> int:
    """The number of a module, from its layer's name."""
    return int(name.removeprefix(f"{MTP}."))


def num_modules(model: ModelSpec) -> int:
    """The number of MTP modules."""
    return 0 if model.mtp is None else model.mtp.num_modules


def embeds_again(model: ModelSpec) -> bool:
    """True if modules look up tokens themselves, in a copy of the embedding or in one of their own."""
    return model.mtp is not None and model.mtp.embeds_again


def has_own_embedding(model: ModelSpec) -> bool:
    """True if each module has an embedding of its own."""
    return model.mtp is not None and model.mtp.embedding == "own"


def mtp_streams_after(model: ModelSpec, names: Iterable[str]) -> int:
    """The number of MTP streams after the layers ``names``, the model's first layers in any order.

    If the first stage embeds for all modules, all streams exist from the start: a module's stream is first the
    embedding that it will read.
    """
    if not embeds_again(model):
        return 1 + num_modules(model)
    return 1 + sum(map(is_mtp, names))


def mtp_streams_into(model: ModelSpec, name: str) -> int:
    """The number of MTP streams before a layer; there is none before the embedding."""
    if name == "embed" or model.mtp is None:
        return 0 if name == "embed" else 1
    order = layer_order(model)
    return mtp_streams_after(model, order[: order.index(name)])


def mtp_streams_at(model: ModelSpec, name: str) -> int:
    """The number of MTP streams that a layer processes."""
    if name == "head" or (name == "norm" and not ends_normed(model)):
        return mtp_streams_into(model, name)
    return mtp_streams_after(model, [name]) if name == "embed" else 1


def mtp_stream_read(name: str) -> int:
    """The index of the (first) MTP stream that a layer reads."""
    return module_of(name) if is_mtp(name) else 0


def mtp_stream_made(name: str) -> int:
    """The index of the (first) MTP stream that a layer writes."""
    return module_of(name) + 1 if is_mtp(name) else 0


def shifted_batch(batch: Batch, distance: int) -> Batch:
    """The micro-batch of MTP stream ``distance``: tokens and labels shifted by that many positions.

    After the end of the sequence, tokens are 0 and labels do not count. Positions that count never read them, because
    positions only look back.
    """
    if distance == 0:
        return batch
    tokens, labels = np.zeros_like(batch.tokens), np.full_like(batch.labels, IGNORED)
    tokens[:, :-distance] = batch.tokens[:, distance:]
    labels[:, :-distance] = batch.labels[:, distance:]
    return Batch(tokens, labels)


def module_weight(mtp: MtpSpec) -> float:
    """The factor of each module's loss: the weight of their mean (arXiv:2412.19437, equation 25)."""
    return mtp.loss_weight / mtp.num_modules


def mtp_loss_name(number: int) -> str:
    """The name of a module's loss."""
    return f"mtp.{number}"


def with_mtp_losses(facts: GradientFacts, plan: PlanSpec, stages: Sequence[Sequence[Layer]]) -> GradientFacts:
    """Add the losses of MTP modules, on the stage of the main loss, to a model's facts.

    A token counts as in the main loss, times the weight of a module. The weights of module j are reached by the losses
    of modules j and later, but not by the main loss or the losses of earlier modules; the weights of the main
    contraction (``MAIN_STREAMS``) only by the main loss. All other weights are reached by all losses after them.
    """
    mtp = plan.gpt.mtp
    if mtp is None:
        return facts
    main = [loss for loss in facts.losses if loss.name == MAIN_LOSS]
    mtp_losses = [
        Loss(mtp_loss_name(number), loss.stage, _scale(mtp, loss.scale))
        for loss in main
        for number in range(mtp.num_modules)
    ]
    others = dict.fromkeys(loss.name for loss in facts.losses if loss.name != MAIN_LOSS)
    reached_by = {
        weight.name: tuple(
            LossPath(name)
            for name in (
                *([MAIN_LOSS] if MAIN_STREAMS in weight.name else map(mtp_loss_name, range(number, mtp.num_modules))),
                *others,
            )
        )
        for layers in stages
        for layer in layers
        if is_mtp(layer.name)
        for number in (module_of(layer.name),)
        for weight in layer.parameters
    }
    parameters = tuple(
        replace(parameter, losses=reached_by[parameter.name])
        if parameter.losses is None and parameter.name in reached_by
        else parameter
        for parameter in facts.parameters
    )
    return replace(
        facts, losses=(*main, *mtp_losses, *(x for x in facts.losses if x.name in others)), parameters=parameters
    )


def _scale(mtp: MtpSpec, main: str | None) -> str | None:
    """A module's part of the weight, times the scale of a token in the main loss (``1/..``)."""
    if main is None:
        return None
    return f"{Decimal(repr(mtp.loss_weight)):f}/{mtp.num_modules}{main.removeprefix('1')}"
