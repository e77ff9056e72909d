"""What keeps experts evenly loaded: losses of the routers, and biases that move with their loads.

Losses. For each router, unit of work and rank with tokens of its own, over all
positions (those that do not count in the main loss are sent to experts, too):

- ``aux``: sum_e (E f_e) P_e (arXiv:2101.03961, equation 4), f_e being the
  share of all choices that fall on expert e, of the k largest scores whatever
  the bias, and P_e the mean over tokens of its score over the sum of the
  token's scores (a softmax sums to one; for sigmoids as arXiv:2412.19437,
  equations 17 to 20). Even loads make it 1;
- ``z``: the mean over tokens of logsumexp(outputs)^2 (arXiv:2202.08906,
  equation 5).

Each is multiplied by its factor of the plan and by ``unit_weight``, so that a
step adds factor x (the mean over units of work), whatever the topology, the
cut into stages and the number of micro-batches. Every TP rank routes all
tokens and the gradients of what they route are summed over TP: the first TP
rank puts in all of the loss, and the others nothing.

Biases (arXiv:2408.15664). Each router has a number for each expert, zero at
first, that is added to scores for the choice alone. At the end of a step it
moves by ``expert_bias_rate`` towards the mean load: up for an expert with
fewer visits than the mean, down for one with more. Loads are of all
micro-batches of all data ranks, each token counted once.

No framework: names and numbers that the stages, the references and the rules share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, ParameterGradient
from pipeproof.stages.describe.layers import Layer

_ROUTER = ".router.weight"

ROUTER_LOSSES = ("aux", "z")
"""The names of the losses that a router may have."""


def routers(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The experts among some layers, in order, by the name that their weights begin with: ``layer.3.mlp``."""
    names = (weight.name for layer in layers for weight in layer.parameters)
    return tuple(name.removesuffix(_ROUTER) for name in names if name.endswith(_ROUTER))


def router_losses(moe: MoeSpec | None) -> dict[str, float]:
    """The losses of each router, by name, with their factors; without those of factor zero."""
    factors = {} if moe is None else {"aux": moe.aux_loss, "z": moe.z_loss}
    return {name: factor for name, factor in factors.items() if factor}


def moves_biases(plan: PlanSpec) -> bool:
    """Whether routers have biases that move at the end of each step."""
    return plan.model.moe is not None and plan.model.moe.expert_bias_rate is not None


def unit_weight(plan: PlanSpec) -> float:
    """What each unit of work of each data rank counts in the mean over all: they count alike, whatever their sizes."""
    topology, schedule = plan.topology, plan.schedule
    return 1.0 / (topology.dp * topology.ep * schedule.num_micro_batches * schedule.num_sequence_splits)


def router_loss_scales(plan: PlanSpec) -> dict[str, str]:
    """What one micro-batch of one router counts in the step, as rules on gradients read it, by the loss's name.

    Pieces of sequences share out what their micro-batch counts, and so do the ``cp`` ranks of one.
    """
    pieces = f"/{plan.schedule.num_sequence_splits}" if plan.schedule.num_sequence_splits > 1 else ""
    share = f"{pieces}/cp" if plan.topology.cp > 1 else pieces
    return {
        name: f"{Decimal(repr(factor)):f}/num_micro_batches/data_ranks{share}"
        for name, factor in router_losses(plan.model.moe).items()
    }


def loss_weights(plan: PlanSpec) -> dict[str, float]:
    """What the losses of one router and unit of work are multiplied by, by name."""
    return {name: factor * unit_weight(plan) for name, factor in router_losses(plan.model.moe).items()}


def loss_key(loss: str, experts: str, micro_batch: int, piece: int) -> str:
    """The name of one router's loss of one unit of work; ``micro_batch`` counts over all data ranks."""
    return f"{loss}/{experts}/{micro_batch}/{piece}"


def bias_name(experts: str) -> str:
    """The name under which a router's bias stands beside parameters."""
    return f"{experts}.router.bias"


def with_balance(facts: GradientFacts, plan: PlanSpec, stages: Sequence[Sequence[Layer]]) -> GradientFacts:
    """The facts of a model with what its routers add: losses on their stages, and sums of visits by forwards."""
    scales = router_loss_scales(plan)
    losses, visits = list[Loss](), list[ParameterGradient]()
    moe = plan.model.moe
    for stage, layers in enumerate(stages):
        here = routers(layers)
        losses += [Loss(name, stage, scale) for name, scale in scales.items() if here]
        if moe is not None and moves_biases(plan):
            visits += [
                ParameterGradient(bias_name(one), (stage,), numel=moe.num_experts, losses=(), made_by="forward")
                for one in here
            ]
    return replace(facts, losses=(*facts.losses, *losses), parameters=(*facts.parameters, *visits))


def bias_key(experts: str) -> str:
    """The name of a router's bias after a step."""
    return f"bias/{experts}"
