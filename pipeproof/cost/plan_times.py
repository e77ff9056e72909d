"""Times of a plan as given times. The modules that compute them are loaded only for plans that need them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from pipeproof.specs.cost import CostSpec, NetworkSpec
from pipeproof.specs.exact_times import rounded_up
from pipeproof.specs.plan import PlanSpec

if TYPE_CHECKING:
    from pipeproof.cost.part_shares import PartShares
    from pipeproof.cost.transfer_times import LinkTimes


def with_times(plan: PlanSpec) -> PlanSpec:
    """The plan with given times of stages in place of computed or measured ones, or of layers; unchanged if given.

    Raises:
        BadPlanAtError: the layers cannot be put onto the stages, a time is too long, or the profile is of another plan.
        ProfileError: the profile cannot be read.
    """
    cost = resolved_cost(plan)
    if cost is plan.cost:
        return plan
    from pipeproof.stages.describe.stage_memory import is_flash, memory_dtype, product_inputs

    memory = plan.memory.model_copy(
        update={
            "dtype": memory_dtype(plan),
            "attention": "flash" if is_flash(plan) else "unfused",
            "product_inputs": product_inputs(plan),
        }
    )  # the keys of ``analytic`` on memory are dropped with it
    return plan.model_copy(update={"cost": cost, "memory": memory})


def resolved_cost(plan: PlanSpec) -> CostSpec:
    """The plan's times, as in ``with_times``."""
    if plan.cost.profile is not None:
        from pipeproof.cost.measured_profile import ProfileTimes

        profile = _slowed_down(ProfileTimes.of_plan(plan).resolved(plan), plan, plan.cost.recv_slowdown)
        return _with_host(profile, plan.cost.host_bandwidth)
    analytic = plan.cost.analytic
    if analytic is None:
        cost = _by_layers(plan) if plan.has_layer_times else plan.cost
        return cost if cost.network is None else _by_network(plan, cost, cost.network)
    from pipeproof.cost.analytic_times import AnalyticCosts

    costs, slowdown = AnalyticCosts(plan, analytic), plan.cost.recv_slowdown
    times = _slowed_down(
        costs.resolved(plan.cost.p2p), plan, costs.device.recv_slowdown if slowdown is None else slowdown
    )
    buckets = {"bucket_size": plan.cost.bucket_size, "gather_weights": plan.cost.gather_weights}
    return _with_host(times, costs.host_bandwidth).model_copy(update=buckets)


def shares_of_parts(plan: PlanSpec) -> PartShares | None:
    """The shares of the parts of each stage; None for plans without alternating computations."""
    if plan.alternation is None:
        return None
    from pipeproof.cost.part_shares import PartShares

    return PartShares(plan)


def link_times(plan: PlanSpec) -> LinkTimes | None:
    """The times of a plan's messages and collectives; None if messages take ``p2p_latency_us`` and collectives nothing.

    Raises:
        BadPlanAtError: the profile is of another plan.
        ProfileError: the profile cannot be read.
    """
    cost, run = plan.cost, plan.run
    if cost.profile is not None:
        from pipeproof.cost.measured_profile import ProfileTimes
        from pipeproof.cost.transfer_times import MeasuredLinks

        return MeasuredLinks(ProfileTimes.of_plan(plan), run.dtype, run.weight_dtype)
    if cost.analytic is None and cost.network is None:
        return None
    from pipeproof.cost.network_times import Network
    from pipeproof.cost.transfer_times import NetworkTimes

    gradients = "float64" if run.dtype == "float64" else plan.gradient_dtype
    if cost.analytic is None:
        assert cost.network is not None
        return NetworkTimes(Network.of_spec(cost.network).routed(plan.model.moe), run.dtype, gradients)
    from pipeproof.cost.analytic_times import AnalyticCosts

    costs = AnalyticCosts(plan, cost.analytic)
    return NetworkTimes(costs.links.network, costs.dtype, gradients)


def _by_layers(plan: PlanSpec) -> CostSpec:
    """The times of stages as the sums over their custom layers."""
    from pipeproof.stages.describe.partition import custom_stages

    of_layers = {layer.name: layer.times for layer in plan.custom.layers}
    stages, keys = custom_stages(plan), next(iter(of_layers.values()))
    times = {key: tuple(sum((of_layers[n][key] for n in names), Fraction(0)) for names in stages) for key in keys}
    return plan.cost.model_copy(update=times)


def _by_network(plan: PlanSpec, cost: CostSpec, network: NetworkSpec) -> CostSpec:
    """Given times with the latency of the slowest edge, for which schedules are made."""
    from pipeproof.cost.analytic_links import Links
    from pipeproof.cost.network_times import Network

    slowest = max(Links(plan, Network.of_spec(network)).messages(), default=Fraction(0))
    return cost.model_copy(update={"p2p_latency_us": rounded_up(slowest), "network": None})


def _with_host(cost: CostSpec, bandwidth: float | None) -> CostSpec:
    """The costs with the bandwidth of copies to and from host memory, in GB/s."""
    return cost if bandwidth is None else cost.model_copy(update={"host_bandwidth": bandwidth})


def _slowed_down(cost: CostSpec, plan: PlanSpec, recv_slowdown: Fraction | None) -> CostSpec:
    """The costs with the slowdown of a rank's computations by a receive, or an all-to-all, that is under way."""
    shares = {"recv_slowdown": recv_slowdown, "collective_slowdown": plan.cost.collective_slowdown}
    return cost.model_copy(update={key: share for key, share in shares.items() if share is not None})
