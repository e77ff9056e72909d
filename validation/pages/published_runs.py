"""Simulations of the page of published trainings: the two plans of ``examples/published`` and their variants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

import yaml
from pages import ROOT

from pipeproof.comm.lower import lower
from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.cost.network_times import Shape
from pipeproof.cost.plan_times import with_times
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.specs.exact_times import rounded_up
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.op_work import Phase

MICRO = 10**6
LONE = {OpKind.FORWARD: "1F", OpKind.BACKWARD: "1B", OpKind.BACKWARD_INPUT: "1B", OpKind.BACKWARD_WEIGHT: "1W"}
"""Part of a step to which a computation that runs alone belongs."""
PARTS = ("1F", "1B", "1W", "1F1B", "optimizer", "idle")


@dataclass(frozen=True)
class Training:
    """A plan and its simulated step; times in seconds."""

    spec: PlanSpec

    @classmethod
    def of(cls, name: str, change: Mapping[str, Any] | None = None) -> Training:
        """Load a plan of ``examples/published``; keys of ``change`` replace its keys."""
        data = yaml.safe_load((ROOT / "examples" / "published" / f"{name}.yaml").read_text(encoding="utf-8"))
        return cls(plan_from_dict(_changed(data, change or {})).spec)

    @cached_property
    def simulation(self) -> Simulation:
        """Simulation of one step."""
        return simulate(lower(self.spec))

    @cached_property
    def costs(self) -> AnalyticCosts:
        """Costs of each stage."""
        assert self.spec.cost.analytic is not None
        return AnalyticCosts(self.spec, self.spec.cost.analytic)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return float(self.simulation.makespan) / MICRO

    @property
    def idle(self) -> float:
        """Mean share of the step in which a rank is idle or updates."""
        figures = self.simulation.figures
        return 1 - float(sum(rank.busy_us for rank in figures) / (len(figures) * self.simulation.makespan))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        topology, schedule = self.spec.topology, self.spec.schedule
        sequences = topology.dp * topology.ep * schedule.num_micro_batches * schedule.micro_batch_size
        return sequences * self.spec.model.seq_length

    @cached_property
    def num_weights(self) -> int:
        """Number of all weights, embedding and experts included."""
        return sum(prod(weight.shape) for layer in describe_gpt(self.spec) for weight in layer.parameters)

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step: three times the forward's, with causal attention and without recomputation."""
        topology, num_micro_batches = self.spec.topology, self.spec.schedule.num_micro_batches
        with_attention = sum(stage[Phase.FORWARD].flops for stage in self.costs.stages)
        replicas = topology.num_ranks // topology.pp
        return float(3 * num_micro_batches * with_attention * replicas)

    def tflops(self, step: float, flops: float | None = None) -> float:
        """Return the TFLOP/s of a rank for a step of ``step`` seconds."""
        return (flops or self.flops) / step / self.spec.topology.num_ranks / 10**12

    @property
    def peak_memory(self) -> int:
        """Bytes of the rank with the highest peak."""
        return max(curve.peak for curve in self.simulation.memory)

    def given(self, **changes: Any) -> Training:
        """Return the plan with its computed times as given ones, except for ``changes``; reductions take no time."""
        spec = with_times(self.spec)
        return Training(spec.model_copy(update={"cost": spec.cost.model_copy(update=changes)}))

    def without_links(self) -> dict[str, tuple[Fraction, ...]]:
        """Return the times of stages without their collectives."""

        def own(time: PhaseTime) -> Fraction:
            return rounded_up(time.us - time.links_us)

        names = {Phase.FORWARD: "forward_us", Phase.INPUT: "backward_input_us", Phase.WEIGHT: "backward_weight_us"}
        return {key: tuple(own(stage[phase]) for stage in self.costs.stages) for phase, key in names.items()}

    def collective_s(self, kind: OpKind, axis: str, num_bytes: int) -> float:
        """Return the seconds of one collective over an axis, to which each rank contributes ``num_bytes``."""
        shapes: frozenset[Shape] = self.costs.links.shapes(axis)
        network = self.costs.links.network
        return float(max(network.collective_us(kind, shape, Fraction(num_bytes)) for shape in shapes)) / MICRO

    def phases(self, rank: int) -> Iterator[tuple[str, Fraction]]:
        """Yield the part of the step and the microseconds of each computation or overlapped pair of a rank."""
        spans = self.simulation.timeline.compute_spans(rank)
        for start, together in groupby(spans, key=lambda pair: pair[0].start):
            pair = list(together)
            yield "1F1B" if len(pair) > 1 else LONE[pair[0][1]], max(span.end for span, _ in pair) - start

    def parts(self, rank: int) -> dict[str, float]:
        """Return the seconds of a rank by activity: forward, backward or W alone, a pair, the update, nothing."""
        sums = dict.fromkeys(PARTS, Fraction(0))
        for name, us in self.phases(rank):
            sums[name] += us
        updates = [s for s in self.simulation.timeline.spans if s.rank == rank and _is_update(s.op)]
        sums["optimizer"] = sum((Fraction(span.end - span.start) for span in updates), Fraction(0))
        sums["idle"] = self.simulation.makespan - sum(sums.values(), Fraction(0))
        return {name: float(us) / MICRO for name, us in sums.items()}

    def counts(self) -> dict[str, float]:
        """Return the mean number per rank of forwards, backwards or W alone, and of pairs."""
        ranks = range(self.spec.topology.pp)
        of_all = Counter(name for rank in ranks for name, _ in self.phases(rank))
        return {name: count / len(ranks) for name, count in of_all.items()}


def _is_update(op: str) -> bool:
    """True for the optimizer, a gradient reduction before it or a weight gather after it; false for their parents."""
    return op.endswith("STEP") or ("/" in op and ("REDUCE_GRAD" in op or "GATHER_WEIGHT" in op))


def _changed(data: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    for key, value in change.items():
        old = result.get(key)
        result[key] = _changed(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return result
