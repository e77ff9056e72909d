"""What the page of published trainings simulates: the two plans of ``examples/published``, and changes of them."""  # noqa: INP001 - a directory of scripts, not a package

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

from pipeproof.comm.analytic.resolve import AnalyticCosts, PhaseTime
from pipeproof.comm.links.shape import Shape
from pipeproof.comm.lower import lower
from pipeproof.comm.times import with_times
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.specs.load import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.times import rounded_up
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.operations import Phase

MICRO = 10**6
LONE = {OpKind.FORWARD: "1F", OpKind.BACKWARD: "1B", OpKind.BACKWARD_INPUT: "1B", OpKind.BACKWARD_WEIGHT: "1W"}
"""The part of a step that a computation belongs to which nothing runs beside."""
PARTS = ("1F", "1B", "1W", "1F1B", "optimizer", "idle")


@dataclass(frozen=True)
class Training:
    """A plan with its step as it is simulated; times in seconds."""

    spec: PlanSpec

    @classmethod
    def of(cls, name: str, change: Mapping[str, Any] | None = None) -> Training:
        """A plan of ``examples/published``, with the keys of ``change`` in place of its own."""
        data = yaml.safe_load((ROOT / "examples" / "published" / f"{name}.yaml").read_text(encoding="utf-8"))
        return cls(plan_from_dict(_changed(data, change or {})).spec)

    @cached_property
    def simulation(self) -> Simulation:
        """One step."""
        return simulate(lower(self.spec))

    @cached_property
    def costs(self) -> AnalyticCosts:
        """What each stage takes."""
        assert self.spec.cost.analytic is not None
        return AnalyticCosts(self.spec, self.spec.cost.analytic)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return float(self.simulation.makespan) / MICRO

    @property
    def idle(self) -> float:
        """Share of the step that a rank is idle or updates, the mean of all."""
        figures = self.simulation.figures
        return 1 - float(sum(rank.busy_us for rank in figures) / (len(figures) * self.simulation.makespan))

    @property
    def tokens(self) -> int:
        """Of a step."""
        topology, schedule = self.spec.topology, self.spec.schedule
        sequences = topology.dp * topology.ep * schedule.num_micro_batches * schedule.micro_batch_size
        return sequences * self.spec.model.seq_length

    @cached_property
    def num_weights(self) -> int:
        """All of them, embedding and experts included."""
        return sum(prod(weight.shape) for layer in describe_gpt(self.spec) for weight in layer.parameters)

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step: three times the forward's, attention over the causal half, nothing twice."""
        topology, num_micro_batches = self.spec.topology, self.spec.schedule.num_micro_batches
        with_attention = sum(stage[Phase.FORWARD].flops for stage in self.costs.stages)
        replicas = topology.num_ranks // topology.pp
        return float(3 * num_micro_batches * with_attention * replicas)

    def tflops(self, step: float, flops: float | None = None) -> float:
        """TFLOP/s of a rank, of a step that takes so many seconds."""
        return (flops or self.flops) / step / self.spec.topology.num_ranks / 10**12

    @property
    def peak_memory(self) -> int:
        """Bytes of the rank that needs most."""
        return max(curve.peak for curve in self.simulation.memory)

    def given(self, **changes: Any) -> Training:
        """With the same times as given ones, but for ``changes``: then reductions of gradients take no time."""
        spec = with_times(self.spec)
        return Training(spec.model_copy(update={"cost": spec.cost.model_copy(update=changes)}))

    def without_links(self) -> dict[str, tuple[Fraction, ...]]:
        """The times of stages without their collectives."""

        def own(time: PhaseTime) -> Fraction:
            return rounded_up(time.us - time.links_us)

        names = {Phase.FORWARD: "forward_us", Phase.INPUT: "backward_input_us", Phase.WEIGHT: "backward_weight_us"}
        return {key: tuple(own(stage[phase]) for stage in self.costs.stages) for phase, key in names.items()}

    def collective_s(self, kind: OpKind, axis: str, num_bytes: int) -> float:
        """Seconds of one collective over an axis, into which each rank puts this much."""
        shapes: frozenset[Shape] = self.costs.links.shapes(axis)
        network = self.costs.links.network
        return float(max(network.collective_us(kind, shape, Fraction(num_bytes)) for shape in shapes)) / MICRO

    def pieces(self, rank: int) -> Iterator[tuple[str, Fraction]]:
        """The computations of a rank, one or two at a time: which part of the step, and its microseconds."""
        spans = self.simulation.timeline.compute_spans(rank)
        for start, together in groupby(spans, key=lambda pair: pair[0].start):
            pair = list(together)
            yield "1F1B" if len(pair) > 1 else LONE[pair[0][1]], max(span.end for span, _ in pair) - start

    def parts(self, rank: int) -> dict[str, float]:
        """Seconds of a rank by what runs: a forward, backward or W alone, two side by side, the update, nothing."""
        sums = dict.fromkeys(PARTS, Fraction(0))
        for name, us in self.pieces(rank):
            sums[name] += us
        updates = [s for s in self.simulation.timeline.spans if s.rank == rank and _is_update(s.op)]
        sums["optimizer"] = sum((Fraction(span.end - span.start) for span in updates), Fraction(0))
        sums["idle"] = self.simulation.makespan - sum(sums.values(), Fraction(0))
        return {name: float(us) / MICRO for name, us in sums.items()}

    def counts(self) -> dict[str, float]:
        """How often a rank has a forward, a backward or W alone, or two side by side: the mean of all ranks."""
        ranks = range(self.spec.topology.pp)
        of_all = Counter(name for rank in ranks for name, _ in self.pieces(rank))
        return {name: count / len(ranks) for name, count in of_all.items()}


def _is_update(op: str) -> bool:
    """Whether it is the optimizer, a sum of gradients before it, or a gather of weights after it; not their parents."""
    return op.endswith("STEP") or ("/" in op and ("REDUCE_GRAD" in op or "GATHER_WEIGHT" in op))


def _changed(data: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    for key, value in change.items():
        mine = result.get(key)
        result[key] = _changed(mine, value) if isinstance(value, dict) and isinstance(mine, dict) else value
    return result
