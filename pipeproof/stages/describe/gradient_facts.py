"""What is true of a model's gradients, whatever the schedule: losses, and how each parameter's gradient lies.

No framework and no op graph: a rule compares this with what a program really
adds, scales and reduces. ``gpt_gradients`` fills it in for the plan's GPT;
other models (experts, tied weights, auxiliary losses) are written in Python.

Axes are those of the device mesh. Over ``dp`` and ``ep`` ranks have
micro-batches of their own, over ``cp`` they share each sequence: over all
three a gradient is partial, unless the parameter is cut there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from pipeproof.stages.describe.layers import Layer, users_of_shared

BATCH_AXES = ("dp", "ep")
"""Axes whose ranks have micro-batches of their own."""

TOKEN_AXES = (*BATCH_AXES, "cp")
"""Axes whose ranks see different tokens."""

MAIN_LOSS = "main"
"""The name of the loss that is meant where none is named."""

NORMALIZATIONS = {
    "global_tokens": "1/global_tokens",
    "mean_of_micro_batches": "1/micro_batch_tokens/num_micro_batches/data_ranks",
}
"""What ``loss.normalization`` says one token's loss is multiplied by."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, the stage that computes it, and what one token's loss is multiplied by in the step's loss.

    ``scale`` is a product of numbers and named sizes (``0.01/global_tokens``):
    axes, ``num_micro_batches``, ``data_ranks`` (ranks with micro-batches of
    their own), ``global_tokens``, ``step_tokens`` (of one such rank),
    ``micro_batch_tokens``, ``rank_tokens`` (of one micro-batch on one ``cp``
    rank). None says nothing but that all micro-batches count alike. A model
    may have losses of one name on several stages.
    """

    name: str
    stage: int
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class LossPath:
    """A loss that reaches a parameter, with the axes over which its share of the gradient is partial."""

    loss: str
    partial_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """One parameter: where it stands, and over which axes a rank's gradient is a part or an addend of the whole.

    ``stages`` has more than one entry where copies of the weight are used on
    several stages (tied embedding). Over the axes of ``sharded_over`` ranks
    hold different elements; cut over ``ep``, an expert sees the tokens of all
    ``ep`` ranks. ``partial_over`` are axes over which ranks hold addends,
    beside the token axes. ``losses`` None stands for all losses on the
    parameter's stage or after it; empty for a sum that no loss scales (a count
    of tokens). ``made_by`` says what adds a micro-batch's share; what forwards
    add is scaled only by a SCALE_GRAD that names it. ``numel`` counts the
    elements that a rank holds, where it is known.
    """

    name: str
    stages: tuple[int, ...]
    sharded_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()
    numel: int | None = None
    losses: tuple[LossPath, ...] | None = None
    made_by: Literal["backward", "forward"] = "backward"

    def partial_axes(self, path: LossPath | None = None) -> frozenset[str]:
        """The axes over which a sum is owed: for one loss, or for any where ``path`` is None."""
        ways = (path,) if path is not None else self.losses or ()
        addends = {axis for way in ways for axis in way.partial_over}
        return frozenset({*TOKEN_AXES, *self.partial_over, *addends} - set(self.sharded_over))


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """Losses and parameters of a model, parameters in the order in which reductions take them.

    ``even_tokens`` says that all micro-batches, and all ``cp`` ranks within
    one, count equally many tokens. ``token_counts[d][m]`` are the tokens of
    micro-batch m of data rank d = dp * (number of ep ranks) + ep, where they
    are known. ``guessed`` marks facts that were read off the graph itself.
    """

    losses: tuple[Loss, ...]
    parameters: tuple[ParameterGradient, ...]
    even_tokens: bool = False
    token_counts: tuple[tuple[int, ...], ...] = ()
    guessed: bool = False


def gpt_gradients(stages: Sequence[Sequence[Layer]], normalization: str, num_ranks: Mapping[str, int]) -> GradientFacts:
    """The facts of the plan's GPT, its layers by stage: the main loss stands on the stage of the last ``head``.

    ``num_ranks`` has the sizes of the axes ``tp`` and ``ep``.
    """
    losses = [
        Loss(MAIN_LOSS, stage, NORMALIZATIONS[normalization])
        for stage, layers in enumerate(stages)
        if any(layer.name == "head" for layer in layers)
    ]
    users = users_of_shared(stages)
    parameters = tuple(
        ParameterGradient(
            parameter.name,
            users.get(parameter.name, (stage,)),
            sharded_over=parameter.sharded_over,
            partial_over=parameter.partial_over,
            numel=prod(parameter.local_shape(num_ranks)),
        )
        for stage, layers in enumerate(stages)
        for layer in layers
        for parameter in layer.parameters
    )
    return GradientFacts(tuple(losses[-1:]), parameters)


def own_gradients(facts: GradientFacts, normalization: str, *, last_stage: int) -> GradientFacts:
    """The facts of own layers, from those of their parameters: the loss stands behind the last layer."""
    return replace(facts, losses=(Loss(MAIN_LOSS, last_stage, NORMALIZATIONS[normalization]),))
