"""Facts about a model's gradients that hold for every schedule: losses, and the layout of each parameter's gradient.

There is no framework and no op graph: a rule compares these facts with the additions, scales and reductions of a
program. ``gpt_gradients`` returns them for the plan's GPT; other models (experts, tied weights, auxiliary losses) are
written in Python.

Axes are axes of the device mesh. Ranks over ``dp`` and ``ep`` have different micro-batches, ranks over ``cp`` share
each sequence. Over all three a gradient is partial, unless the parameter is sharded over the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import prod
from typing import Literal

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import Layer, users_of_shared

BATCH_AXES = ("dp", "ep")
"""Axes whose ranks have different micro-batches."""

TOKEN_AXES = (*BATCH_AXES, "cp")
"""Axes whose ranks see different tokens."""

MAIN_LOSS = "main"
"""The name of the default loss."""

NORMALIZATIONS = {
    "global_tokens": "1/global_tokens",
    "mean_of_micro_batches": "1/micro_batch_tokens/num_micro_batches/data_ranks",
}
"""The factor of one token's loss for each ``loss.normalization``."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, the stage that computes it, and the factor of one token's loss in the step's loss.

    ``scale`` is a product of numbers and named sizes (``0.01/global_tokens``): axes, ``num_micro_batches``,
    ``data_ranks`` (ranks with different micro-batches), ``global_tokens``, ``step_tokens`` (of one such rank),
    ``micro_batch_tokens``, ``rank_tokens`` (of one micro-batch on one ``cp`` rank). None means only that all
    micro-batches have the same factor. A model may have losses of one name on several stages.
    """

    name: str
    stage: int
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class LossPath:
    """A loss that reaches a parameter, with the axes over which its addend of the gradient is partial."""

    loss: str
    partial_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """One parameter: its stages, and the axes over which a rank's gradient is a shard or an addend of the whole.

    ``stages`` has several entries if copies of the weight are used on several stages (tied embedding). Ranks over the
    axes of ``sharded_over`` have different elements; an expert sharded over ``ep`` sees the tokens of all ``ep`` ranks.
    ``partial_over`` are the axes over which ranks have addends, in addition to the token axes. ``losses`` is None for
    all losses on the parameter's stage or after it, and empty for a sum that no loss scales (a count of tokens).
    ``made_by`` is the operation that adds a micro-batch's addend; additions by forwards are scaled only by a SCALE_GRAD
    that names the parameter. ``numel`` counts the elements on a rank, if known; ``flat_start`` is the first in the
    flat buffer of the stage's gradients, by default behind the parameter before.
    """

    name: str
    stages: tuple[int, ...]
    sharded_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()
    numel: int | None = None
    losses: tuple[LossPath, ...] | None = None
    made_by: Literal["backward", "forward"] = "backward"
    flat_start: int | None = None

    def partial_axes(self, path: LossPath | None = None) -> frozenset[str]:
        """The axes over which a sum is needed: for one loss, or for any if ``path`` is None."""
        paths = (path,) if path is not None else self.losses or ()
        addends = {axis for loss_path in paths for axis in loss_path.partial_over}
        return frozenset({*TOKEN_AXES, *self.partial_over, *addends} - set(self.sharded_over))


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """Losses and parameters of a model, parameters in the order of their reductions.

    ``even_tokens`` is true if all micro-batches, and all ``cp`` ranks of one, count the same number of tokens.
    ``token_counts[d][m]`` are the tokens of micro-batch m of data rank d = dp * (number of ep ranks) + ep, if known.
    ``guessed`` marks facts that were inferred from the graph itself.
    """

    losses: tuple[Loss, ...]
    parameters: tuple[ParameterGradient, ...]
    even_tokens: bool = False
    token_counts: tuple[tuple[int, ...], ...] = ()
    guessed: bool = False


def gpt_gradients(stages: Sequence[Sequence[Layer]], normalization: str, num_ranks: Mapping[str, int]) -> GradientFacts:
    """The facts of the plan's GPT, from its layers by stage. The main loss is on the stage of the last ``head``.

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


def custom_gradients(facts: GradientFacts, normalization: str, *, last_stage: int) -> GradientFacts:
    """The facts of custom layers, from the facts of their parameters. The loss is after the last layer."""
    return replace(facts, losses=(Loss(MAIN_LOSS, last_stage, NORMALIZATIONS[normalization]),))


# Load balance of experts: router losses, and router biases that follow the load.
#
# Losses. Each router has them for each work item and each rank with its own tokens, over all positions (positions that
# do not count in the main loss are also sent to experts):
#
# - ``aux``: sum_e (E f_e) P_e (arXiv:2101.03961, equation 4). f_e is the fraction of all choices that go to expert e,
# by the k largest scores without the bias. P_e is the mean over tokens of its score divided by the sum of the token's
# scores (a softmax sums to one; for sigmoids as in arXiv:2412.19437, equations 17 to 20). It is 1 for even loads. -
# ``z``: the mean over tokens of logsumexp(outputs)^2 (arXiv:2202.08906, equation 5).
#
# Each loss is multiplied by its factor in the plan and by ``work_item_weight``. So a step adds factor x (mean over work
# items), for any topology, partition and number of micro-batches. Every TP rank routes all tokens, and their gradients
# are summed over TP: the first TP rank adds the whole loss, the others nothing.
#
# Biases (arXiv:2408.15664). Each router has a number for each expert, initially zero, that is added to the scores for
# the choice only. At the end of a step it moves by ``expert_bias_rate`` towards the mean load: up for an expert with
# fewer visits than the mean, down for one with more. Loads count all micro-batches of all data ranks, each token once.
#
# This file imports no framework: the stages, the references and the rules share its names and numbers.


_ROUTER, _HASH_ROUTER = ".router.weight", ".hash_router.weight"

ROUTER_LOSSES = ("aux", "z")
"""The names of router losses."""


def routers(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The experts in some layers, in order, by the common prefix of their weights: ``layer.3.mlp``.

    Experts that a table chooses are not included: their routers have neither losses nor biases.
    """
    return _experts_with(_ROUTER, layers)


def hash_routers(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The experts in some layers that a table chooses by token id."""
    return _experts_with(_HASH_ROUTER, layers)


def _experts_with(router: str, layers: Iterable[Layer]) -> tuple[str, ...]:
    names = (weight.name for layer in layers for weight in layer.parameters)
    return tuple(name.removesuffix(router) for name in names if name.endswith(router))


def router_losses(moe: MoeSpec | None) -> dict[str, float]:
    """Router losses with a non-zero factor: factors by name."""
    factors = {} if moe is None else {"aux": moe.aux_loss, "z": moe.z_loss}
    return {name: factor for name, factor in factors.items() if factor}


def moves_biases(plan: PlanSpec) -> bool:
    """True if routers have biases that move at the end of each step."""
    return plan.model.moe is not None and plan.model.moe.expert_bias_rate is not None


def work_item_weight(plan: PlanSpec) -> float:
    """Weight of each work item of each data rank in the mean over all. It does not depend on their sizes."""
    topology, schedule = plan.topology, plan.schedule
    return 1.0 / (topology.dp * topology.ep * schedule.num_micro_batches * schedule.num_sequence_splits)


def router_loss_scales(plan: PlanSpec) -> dict[str, str]:
    """Scale of one micro-batch of one router in the step's loss, by loss name, in the notation of ``Loss.scale``.

    Sequence splits, and ``cp`` ranks, divide the weight of their micro-batch.
    """
    splits = f"/{plan.schedule.num_sequence_splits}" if plan.schedule.num_sequence_splits > 1 else ""
    share = f"{splits}/cp" if plan.topology.cp > 1 else splits
    return {
        name: f"{Decimal(repr(factor)):f}/num_micro_batches/data_ranks{share}"
        for name, factor in router_losses(plan.model.moe).items()
    }


def loss_weights(plan: PlanSpec) -> dict[str, float]:
    """Weights of the losses of one router and work item, by loss name."""
    return {name: factor * work_item_weight(plan) for name, factor in router_losses(plan.model.moe).items()}


def loss_key(loss: str, experts: str, micro_batch: int, split: int) -> str:
    """The name of one router's loss of one work item; ``micro_batch`` counts over all data ranks."""
    return f"{loss}/{experts}/{micro_batch}/{split}"


def bias_name(experts: str) -> str:
    """The name of a router's bias among parameters."""
    return f"{experts}.router.bias"


def with_router_losses(facts: GradientFacts, plan: PlanSpec, stages: Sequence[Sequence[Layer]]) -> GradientFacts:
    """Add the losses of routers, on their stages, and the sums of visits, made by forwards, to a model's facts."""
    scales = router_loss_scales(plan)
    losses, visits = list[Loss](), list[ParameterGradient]()
    moe = plan.model.moe
    for stage, layers in enumerate(stages):
        names = routers(layers)
        losses += [Loss(name, stage, scale) for name, scale in scales.items() if names]
        if moe is not None and moves_biases(plan):
            visits += [
                ParameterGradient(bias_name(name), (stage,), numel=moe.num_experts, losses=(), made_by="forward")
                for name in names
            ]
    return replace(facts, losses=(*facts.losses, *losses), parameters=(*facts.parameters, *visits))


def bias_key(experts: str) -> str:
    """The name of a router's bias after a step."""
    return f"bias/{experts}"
