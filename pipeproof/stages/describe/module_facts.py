"""The losses of multi-token prediction, and which weights each of them reaches: facts for the rules on gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

from pipeproof.specs.mtp import MtpSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import MAIN_LOSS, GradientFacts, Loss, LossPath
from pipeproof.stages.describe.lanes import is_mtp, module_of
from pipeproof.stages.describe.layers import Layer


def module_loss(number: int) -> str:
    """The name of a module's loss."""
    return f"mtp.{number}"


def with_modules(facts: GradientFacts, plan: PlanSpec, stages: Sequence[Sequence[Layer]]) -> GradientFacts:
    """The facts of a model with what its modules add: a loss of each, where the main one is.

    A token's loss counts as in the main loss, times the weight of a module. The
    weights of module j are reached by the losses of module j and later ones, and
    by no other that has a token's name; all other weights by all losses behind
    them.
    """
    mtp = plan.model.mtp
    if mtp is None:
        return facts
    main = [loss for loss in facts.losses if loss.name == MAIN_LOSS]
    own = [
        Loss(module_loss(number), loss.stage, _scale(mtp, loss.scale))
        for loss in main
        for number in range(mtp.num_modules)
    ]
    others = dict.fromkeys(loss.name for loss in facts.losses if loss.name != MAIN_LOSS)
    reached_by = {
        weight.name: tuple(LossPath(name) for name in (*map(module_loss, range(number, mtp.num_modules)), *others))
        for layers in stages
        for layer in layers
        if is_mtp(layer.name)
        for number in (module_of(layer.name),)
        for weight in layer.parameters
    }
    parameters = tuple(
        replace(one, losses=reached_by[one.name]) if one.losses is None and one.name in reached_by else one
        for one in facts.parameters
    )
    return replace(facts, losses=(*main, *own, *(x for x in facts.losses if x.name in others)), parameters=parameters)


def _scale(mtp: MtpSpec, main: str | None) -> str | None:
    """A module's share of the weight, times what a token of the main loss counts (``1/..``)."""
    if main is None:
        return None
    return f"{Decimal(repr(mtp.loss_weight)):f}/{mtp.num_modules}{main.removeprefix('1')}"
