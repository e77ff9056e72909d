"""Terms of the predicted time of a row, and their correlations with the errors of a group.

The terms of a step are times of its busiest pipeline rank, as shares of the whole: the computations of its stages by
what bounds them, then the time that this rank waits for others, then what follows the last computation of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from statistics import StatisticsError, correlation, fmean

from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.sim.simulate import Simulation
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Layer, layer_kind
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, operation_works


class Term(StrEnum):
    """A part of a step; ``LAUNCHES`` is the time of the host beyond the device's."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory"
    LAUNCHES = "launches"
    COLLECTIVES = "collectives"
    EXCHANGE = "exchange"
    PIPELINE = "pipeline"
    OPTIMIZER = "optimizer"


def terms_of(spec: PlanSpec, simulation: Simulation) -> Mapping[Term, float]:
    """Return the share of each term in the step of a plan with computed times; they add up to 1.

    What pairs of computations hide of each other counts as less of all their terms.
    """
    analytic = spec.cost.analytic
    assert analytic is not None, "only computed times have terms"
    costs = AnalyticCosts(spec, analytic)
    timeline = simulation.timeline
    spans = [[span for span, _ in timeline.compute_spans(rank)] for rank in range(spec.topology.pp)]
    computing = [sum((span.end - span.start for span in of_rank), Fraction(0)) for of_rank in spans]
    busiest = max(range(len(computing)), key=lambda rank: computing[rank])
    layers = stage_layers(spec)
    parts = dict.fromkeys(Term, 0.0)
    for stage in timeline.stages(busiest):
        for phase in Phase:
            _add(parts, costs.stages[stage][phase], *_shares(costs, spec, layers[stage], phase))
    whole, makespan = sum(parts.values()), float(simulation.makespan)
    scale = float(computing[busiest]) / whole if whole else 0.0
    found = {term: scale * part / makespan for term, part in parts.items()}
    last = float(max(span.end for of_rank in spans for span in of_rank))
    found[Term.PIPELINE] = (last - float(computing[busiest])) / makespan
    found[Term.OPTIMIZER] = 1 - last / makespan
    return found


def _add(parts: dict[Term, float], time: PhaseTime, attention: float, exchange: float) -> None:
    """Add the time of a phase; ``attention`` is a share of computing, ``exchange`` of collectives."""
    computing, links = float(time.compute_us), float(time.links_us)
    parts[Term.PRODUCTS] += (1 - attention) * computing
    parts[Term.ATTENTION] += attention * computing
    parts[Term.MEMORY] += float(time.memory_us)
    parts[Term.COLLECTIVES] += (1 - exchange) * links
    parts[Term.EXCHANGE] += exchange * links
    parts[Term.LAUNCHES] += float(time.us - time.device_us)


def _shares(costs: AnalyticCosts, spec: PlanSpec, names: Sequence[str], phase: Phase) -> tuple[float, float]:
    """Shares of attention in the products of a phase, and of exchanges of experts in its collectives."""
    described = {layer.name: layer for layer in describe_gpt(spec, costs.size)}
    computing, links = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    known: dict[str, tuple[list[tuple[bool, float]], list[tuple[bool, float]]]] = {}
    for name in names:
        kind = layer_kind(spec.model, name)
        if kind not in known:
            known[kind] = _of_layer(costs, spec, described[name], phase)
        for is_attention, us in known[kind][0]:
            computing[is_attention] += us
        for is_exchange, us in known[kind][1]:
            links[is_exchange] += us
    return computing[True] / (sum(computing.values()) or 1), links[True] / (sum(links.values()) or 1)


def _of_layer(
    costs: AnalyticCosts, spec: PlanSpec, layer: Layer, phase: Phase
) -> tuple[list[tuple[bool, float]], list[tuple[bool, float]]]:
    """Times of a layer's products, each with whether it is attention, and of collectives, whether over ep."""
    item_bytes, flash = dtype_bytes(costs.dtype), costs.analytic.attention == "flash"
    works = [work for one in operation_works(spec, layer.name, costs.size, item_bytes, flash=flash) for work in one]
    computing = [
        (work.unit is ComputeUnit.ATTENTION, float(costs.work(work).compute_us))
        for work in works
        if work.phase is phase
    ]
    calls = {Phase.FORWARD: layer.forward_collectives, Phase.INPUT: layer.backward_collectives}.get(phase, ())
    return computing, [(call.axis == "ep", float(costs.links.collective_us(call, item_bytes))) for call in calls]


def correlations(terms: Sequence[Mapping[Term, float]], errors: Sequence[float]) -> Mapping[Term, tuple[float, float]]:
    """Return by term its mean share and its correlation with the errors of time; 0 where one of them is constant."""
    found = {}
    for term in Term:
        shares = [of[term] for of in terms]
        try:
            found[term] = fmean(shares), correlation(shares, errors)
        except StatisticsError:
            found[term] = fmean(shares), 0.0
    return found
