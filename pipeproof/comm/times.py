"""The times of a plan as given ones. What computes them is loaded for the plans that ask for it, and no others."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from pipeproof.specs.cost import CostSpec
from pipeproof.specs.network import NetworkSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.times import rounded_up

if TYPE_CHECKING:
    from pipeproof.comm.links.times import LinkTimes


def with_times(plan: PlanSpec) -> PlanSpec:
    """The plan with given times in place of ``cost.analytic`` or ``cost.profile``; itself where it has given times.

    Raises:
        BadPlanAtError: the layers cannot be put onto the stages, a time is too long, or the profile is of another plan.
        ProfileError: the profile cannot be read.
    """
    cost = resolved_cost(plan)
    if cost is plan.cost:
        return plan
    from pipeproof.stages.describe.memory import is_flash
    from pipeproof.stages.describe.state import memory_dtype

    memory = plan.memory.model_copy(
        update={"dtype": memory_dtype(plan), "attention": "flash" if is_flash(plan) else "unfused"}
    )  # what ``analytic`` says of them goes with it
    return plan.model_copy(update={"cost": cost, "memory": memory})


def resolved_cost(plan: PlanSpec) -> CostSpec:
    """The plan's times as ``with_times`` has them."""
    if plan.cost.profile is not None:
        from pipeproof.comm.profile.resolve import ProfileTimes

        return _slowed_down(ProfileTimes.of_plan(plan).resolved(plan), plan.cost.recv_slowdown)
    analytic = plan.cost.analytic
    if analytic is None:
        return plan.cost if plan.cost.network is None else _by_network(plan, plan.cost.network)
    from pipeproof.comm.analytic.resolve import AnalyticCosts

    costs, given = AnalyticCosts(plan, analytic), plan.cost.recv_slowdown
    return _slowed_down(costs.resolved(plan.cost.p2p), costs.device.recv_slowdown if given is None else given)


def link_times(plan: PlanSpec) -> LinkTimes | None:
    """Where a plan's messages and collectives have their times; None if all take ``p2p_latency_us`` and nothing.

    Raises:
        BadPlanAtError: the profile is of another plan.
        ProfileError: the profile cannot be read.
    """
    cost, run = plan.cost, plan.run
    if cost.profile is not None:
        from pipeproof.comm.links.times import MeasuredLinks
        from pipeproof.comm.profile.resolve import ProfileTimes

        return MeasuredLinks(ProfileTimes.of_plan(plan), run.dtype, run.weight_dtype)
    if cost.analytic is None and cost.network is None:
        return None
    from pipeproof.comm.links.network import Network
    from pipeproof.comm.links.times import NetworkTimes

    gradients = "float64" if run.dtype == "float64" else plan.gradient_dtype
    if cost.analytic is None:
        assert cost.network is not None
        return NetworkTimes(Network.of_spec(cost.network).routed(plan.model.moe), run.dtype, gradients)
    from pipeproof.comm.analytic.devices import DEVICES

    network = Network.of_device(cost.analytic, DEVICES[cost.analytic.device], cost.network)
    return NetworkTimes(network.routed(plan.model.moe), cost.analytic.dtype or run.dtype, gradients)


def _by_network(plan: PlanSpec, network: NetworkSpec) -> CostSpec:
    """Given times with the latency of the slowest edge, which is what schedules are made for."""
    from pipeproof.comm.analytic.links import Links
    from pipeproof.comm.links.network import Network

    slowest = max(Links(plan, Network.of_spec(network)).messages(), default=Fraction(0))
    return plan.cost.model_copy(update={"p2p_latency_us": rounded_up(slowest), "network": None})


def _slowed_down(cost: CostSpec, recv_slowdown: Fraction | None) -> CostSpec:
    """With what a receive that is under way costs the computations of its rank, which is none of the times."""
    return cost if recv_slowdown is None else cost.model_copy(update={"recv_slowdown": recv_slowdown})
