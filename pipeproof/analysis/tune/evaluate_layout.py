"""Evaluation of layouts in worker processes: simulation, and for listed layouts also the check and the parts of a step.

A step has five parts that add up to it, as means over the pipeline ranks: the model's own computations,
recomputation, the optimizer, the *bubble*, in which a rank waits although communication takes no time, and *exposed
communication*, which the step would save if communication took no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from pipeproof.analysis.sweep.evaluate_point import PointResult, refused_point, simulated_point
from pipeproof.analysis.sweep.sweep_points import Point
from pipeproof.comm.lower import lower
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.cost.devices import model_flops_utilization, peak_tflops
from pipeproof.cost.step_error import step_error_of
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.specs.exact_times import GRID_US, rounded
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.op_work import Phase
from pipeproof.verify.check_plan import check
from pipeproof.verify.deadlock.deadlock_rules import models_text
from pipeproof.verify.deadlock.deadlock_verdict import conditions
from pipeproof.verify.memory_peak import simulation_of

PARTS = ("compute", "recompute", "optimizer", "bubble", "communication")
"""The parts of a step, in the order of their output."""


def simulate_layout(point: Point, plan_file: str) -> PointResult:
    """Simulate a layout, without its check; ``details`` has ``peak_bytes``, the most that a rank holds."""
    try:
        spec = plan_from_dict(point.plan).spec
        simulation = simulate(lower(spec))
    except PipeproofError as error:
        return refused_point(point, error.findings)
    return replace(simulated_point(point, spec, simulation, ()), details={"peak_bytes": peak_bytes_of(simulation)})


def check_layout(point: Point, plan_file: str) -> PointResult:
    """Check a layout by every rule and compute the parts of its step.

    ``details`` also has the parts in microseconds, and the channel models with which a conditional plan deadlocks;
    for computed times (``cost.analytic``) MFU, TFLOP/s of a device, and the errors of comparable measured steps.
    """
    try:
        spec = plan_from_dict(point.plan).spec
        report = check(LoadedPlan(spec))
        if report.errors:
            return refused_point(point, report.errors)
        lowered = report.subject.plan
        simulation = report.subject.once(simulation_of) or simulate(lowered)
        parts = parts_of_step(spec, lowered, simulation)
    except PipeproofError as error:
        return refused_point(point, error.findings)
    codes = tuple(sorted({finding.code for finding in report.findings}))
    failing, analytic = conditions(report.subject), spec.cost.analytic
    mfu = model_flops_utilization(spec, simulation.makespan)
    known = step_error_of(spec)
    peak_tflops_per_s = None if analytic is None else peak_tflops(analytic, spec.run.dtype)
    details = {
        "peak_bytes": peak_bytes_of(simulation),
        "digest": report.digest,
        "parts_us": {name: float(us) for name, us in parts.items()},
        "mfu": mfu,
        "tflops_per_gpu": None if mfu is None or peak_tflops_per_s is None else mfu * peak_tflops_per_s,
        "step_mean_error": None if known is None else known.mean,
        "step_within": None if known is None else known.within,
        "deadlocks_with": models_text(failing) if failing else None,
    }
    return replace(simulated_point(point, spec, simulation, codes), details=details)


def peak_bytes_of(simulation: Simulation) -> int:
    """The bytes of the rank that holds most."""
    return max(curve.peak for curve in simulation.memory)


def parts_of_step(spec: PlanSpec, lowered: LoweredPlan, simulation: Simulation) -> dict[str, Fraction]:
    """The parts of a step in microseconds, which add up to its makespan.

    Given times (all but ``cost.analytic``) include recomputation and the collectives of a stage: both are then part of
    its computations.
    """
    free = simulate(_without_communication(spec, lowered))
    num_ranks = len(free.figures)
    computing = sum((rank.busy_us for rank in free.figures), Fraction(0)) / num_ranks
    recomputing = _recomputation(spec)
    num_stages = spec.num_stages
    cost = lowered.spec.cost
    updating = sum((cost.optimizer_of(stage) for stage in range(num_stages)), Fraction(0)) / spec.topology.pp
    return {
        "compute": computing - recomputing,
        "recompute": recomputing,
        "optimizer": updating,
        "bubble": free.makespan - computing - updating,
        "communication": simulation.makespan - free.makespan,
    }


def _without_communication(spec: PlanSpec, lowered: LoweredPlan) -> LoweredPlan:
    """The lowered plan with messages and collectives that take no time."""
    if spec.cost.analytic is None:
        cost = lowered.spec.cost.model_copy(update={"p2p_latency_us": Fraction(0)})
        return replace(lowered, spec=lowered.spec.model_copy(update={"cost": cost}), links=None)
    stages = [
        {phase: replace(time, links_us=Fraction(0)).us for phase, time in stage.items()} for stage in _stages(spec)
    ]
    forward, backward_input, weight = ([rounded(stage[phase]) for stage in stages] for phase in Phase)
    update: dict[str, object] = {
        "forward_us": tuple(max(time, GRID_US) for time in forward),
        "backward_input_us": tuple(backward_input),
        "backward_weight_us": tuple(weight),
        "p2p_latency_us": Fraction(0),
    }
    if lowered.spec.cost.overlapped_us is not None:
        opposite = zip(forward, reversed(list(zip(backward_input, weight, strict=True))), strict=True)
        update["overlapped_us"] = tuple(first + sum(others) for first, others in opposite)
    cost = lowered.spec.cost.model_copy(update=update)
    return replace(lowered, spec=lowered.spec.model_copy(update={"cost": cost}), links=None)


def _recomputation(spec: PlanSpec) -> Fraction:
    """Time of recomputation in a step, without its collectives, as the mean over pipeline ranks."""
    if spec.memory.recompute == "none" or spec.cost.analytic is None:
        return Fraction(0)
    plain = spec.model_copy(update={"memory": spec.memory.model_copy(update={"recompute": "none"})})
    total = [
        sum((replace(stage[Phase.INPUT], links_us=Fraction(0)).us for stage in _stages(one)), Fraction(0))
        for one in (spec, plain)
    ]
    return (total[0] - total[1]) * spec.schedule.num_micro_batches / spec.topology.pp


def _stages(spec: PlanSpec) -> tuple[Mapping[Phase, PhaseTime], ...]:
    """The time of each phase of each stage for a micro-batch."""
    assert spec.cost.analytic is not None, "only computed times have phases"
    return AnalyticCosts(spec, spec.cost.analytic).stages
