"""Load balance of experts: router losses, and router biases that follow the load.

Losses. Each router has them for each work item and each rank with its own tokens, over all positions (positions that do
not count in the main loss are also sent to experts):

- ``aux``: sum_e (E f_e) P_e (arXiv:2101.03961, equation 4). f_e is the fraction of all choices that go to expert e, by
  the k largest scores without the bias. P_e is the mean over tokens of its score divided by the sum of the token's
  scores (a softmax sums to one; for sigmoids as in arXiv:2412.19437, equations 17 to 20). It is 1 for even loads.
- ``z``: the mean over tokens of logsumexp(outputs)^2 (arXiv:2202.08906, equation 5).

Each loss is multiplied by its factor in the plan and by ``work_item_weight``. So a step adds factor x (mean over work
items), for any topology, partition and number of micro-batches. Every TP rank routes all tokens, and their gradients
are summed over TP: the first TP rank adds the whole loss, the others nothing.

Biases (arXiv:2408.15664). Each router has a number for each expert, initially zero, that is added to the scores for the
choice only. At the end of a step it moves by ``expert_bias_rate`` towards the mean load: up for an expert with fewer
visits than the mean, down for one with more. Loads count all micro-batches of all data ranks, each token once.

This file imports no framework: the stages, the references and the rules share its names and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, ParameterGradient
from pipeproof.stages.describe.layer import Layer

_ROUTER = ".router.weight"

ROUTER_LOSSES = ("aux", "z")
"""The names of router losses."""


def routers(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The experts in some layers, in order, by the common prefix of their weights: ``layer.3.mlp``."""
    names = (weight.name for layer in layers for weight in layer.parameters)
    return tuple(name.removesuffix(_ROUTER) for name in names if name.endswith(_ROUTER))


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
