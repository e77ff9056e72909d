"""From ``cost.analytic`` to times of stages: a roofline of every operation, summed.

An operation takes the longer of its FLOPs at the peak and its bytes at the
memory's bandwidth, each with the efficiency that the plan assumes (Williams et
al., Roofline: an insightful visual performance model, 2009). Operations follow
one another, and so do the collectives inside layers: nothing overlaps. W has
no collectives: what it needs was gathered for F.

The arithmetic is exact; each time is rounded once, to ``GRID_US``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from pipeproof.comm.analytic.devices import DEVICES, Device
from pipeproof.comm.analytic.links import Links, exact
from pipeproof.specs.analytic import AnalyticSpec
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import CostSpec, PlanSpec
from pipeproof.specs.times import MAX_TIME_US
from pipeproof.stages.describe.boundary import MicroBatchSize, describe_boundaries, unit_sizes
from pipeproof.stages.describe.layers import Layer, describe_gpt
from pipeproof.stages.describe.partition import stage_layers
from pipeproof.stages.describe.work import Phase, Unit, Work, layer_work

GRID_US = Fraction(1, 1000)
"""Times are multiples of a nanosecond."""

_ZERO = Fraction(0)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a stage or layer, for one micro-batch: its work, and where its time goes, in microseconds.

    ``compute_us`` is of the operations that their FLOPs bound, ``memory_us``
    of those that their bytes bound, ``links_us`` of collectives.
    """

    flops: Fraction = _ZERO
    num_bytes: Fraction = _ZERO
    link_bytes: Fraction = _ZERO
    compute_us: Fraction = _ZERO
    memory_us: Fraction = _ZERO
    links_us: Fraction = _ZERO

    @property
    def us(self) -> Fraction:
        """The whole time."""
        return self.compute_us + self.memory_us + self.links_us

    def __add__(self, other: PhaseTime) -> PhaseTime:
        return PhaseTime(
            self.flops + other.flops,
            self.num_bytes + other.num_bytes,
            self.link_bytes + other.link_bytes,
            self.compute_us + other.compute_us,
            self.memory_us + other.memory_us,
            self.links_us + other.links_us,
        )

    def times(self, number: int) -> PhaseTime:
        """As often as that."""
        return PhaseTime(
            number * self.flops,
            number * self.num_bytes,
            number * self.link_bytes,
            number * self.compute_us,
            number * self.memory_us,
            number * self.links_us,
        )


class AnalyticCosts:
    """What a plan's stages take on the device that ``cost.analytic`` names.

    Of micro-batches and splits of several sizes, the one with most tokens
    counts. A split is the mean one: causal attention gives later ones more.
    """

    def __init__(self, plan: PlanSpec, analytic: AnalyticSpec) -> None:
        self.analytic = analytic
        self.device: Device = DEVICES[analytic.device]
        self.dtype: str = analytic.dtype or plan.run.dtype
        run = plan.run.model_copy(update={"dtype": self.dtype})
        self._plan = plan.model_copy(update={"run": run})
        self.links = Links(self._plan, analytic, self.device)
        self.size: MicroBatchSize = max(unit_sizes(plan)[0], key=lambda size: (size.num_tokens, size.seq_length))
        """The unit of work that counts: a micro-batch or a split of one."""
        self.num_splits = plan.schedule.num_sequence_splits

    @cached_property
    def stages(self) -> tuple[Mapping[Phase, PhaseTime], ...]:
        """By global stage, what each phase of a whole micro-batch comes to, all its splits together."""
        kinds = {layer: _kind(layer) for names in stage_layers(self._plan) for layer in names}
        described = {_kind(layer.name): layer for layer in describe_gpt(self._one_block(), self.size)}
        by_kind = {kind: self.layer(described[kind]) for kind in set(kinds.values())}
        stages = []
        for names in stage_layers(self._plan):
            counts = Counter(kinds[name] for name in names)
            stages.append(
                {
                    phase: sum((by_kind[kind][phase].times(n) for kind, n in counts.items()), PhaseTime())
                    for phase in Phase
                }
            )
        return tuple(stages)

    def layer(self, layer: Layer) -> Mapping[Phase, PhaseTime]:
        """What each phase of one layer comes to for a whole micro-batch."""
        item_bytes = dtype_bytes(self.dtype)
        flash = self.analytic.attention == "flash"
        works = layer_work(self._plan, layer.name, self.size, item_bytes, flash=flash)
        collectives = {Phase.FORWARD: layer.forward_collectives, Phase.INPUT: layer.backward_collectives}
        times = {}
        for phase in Phase:
            time = sum((self.work(work) for work in works if work.phase is phase), PhaseTime())
            for collective in collectives.get(phase, ()):
                link_bytes = self.links.collective_bytes(collective, item_bytes)
                time += PhaseTime(link_bytes=link_bytes, links_us=self.links.collective_us(collective, item_bytes))
            times[phase] = time.times(self.num_splits)
        return times

    def work(self, work: Work) -> PhaseTime:
        """One operation: bound by its FLOPs or by its bytes."""
        compute = work.flops / self._flops_per_us(work.unit)
        memory = work.num_bytes / (self.device.memory * 1000 * exact(self.analytic.memory_efficiency))
        if compute >= memory:
            return PhaseTime(work.flops, work.num_bytes, compute_us=compute)
        return PhaseTime(work.flops, work.num_bytes, memory_us=memory)

    @cached_property
    def messages(self) -> tuple[Fraction, ...]:
        """By edge, the microseconds of its slower direction and largest message, not rounded."""
        transport = self._plan.transport
        return tuple(
            max(
                self.links.message_us(members, name)
                for members in edge.variants
                for name in {transport.forward, transport.backward}
            )
            for edge in describe_boundaries(self._plan)
        )

    def resolved(self, p2p: str) -> CostSpec:
        """The same as given times; every edge has the latency of the slowest.

        Raises:
            BadPlanAtError: PP106, a time is longer than a plan may have.
        """
        phases = {phase: _rounded([stage[phase].us for stage in self.stages]) for phase in Phase}
        forward = [max(time, GRID_US) for time in phases[Phase.FORWARD]]  # what is there takes some time
        (latency,) = _rounded([max(self.messages, default=_ZERO)])
        if max([*forward, *phases[Phase.INPUT], *phases[Phase.WEIGHT], latency]) > MAX_TIME_US:
            message = f"`cost.analytic` comes to a time of more than {MAX_TIME_US} us"
            finding = Finding("PP106", Severity.ERROR, message, help="use smaller micro-batches, or more stages")
            raise BadPlanAtError(finding, ("cost", "analytic"))
        return CostSpec.model_validate(
            {
                "forward_us": forward,
                "backward_input_us": phases[Phase.INPUT],
                "backward_weight_us": phases[Phase.WEIGHT],
                "p2p_latency_us": latency,
                "p2p": p2p,
            }
        )

    def _flops_per_us(self, unit: Unit) -> Fraction:
        """What the device reaches: products at the peak of their type, all else at that of float32."""
        tera = 10**6  # in a microsecond
        if unit is Unit.VECTOR:
            return exact(self.device.float32) * tera
        peak = self.device.bfloat16 if self.dtype == "bfloat16" else self.device.float32
        spec = self.analytic
        return exact(peak) * tera * exact(spec.matmul_efficiency if unit is Unit.MATMUL else spec.attention_efficiency)

    def _one_block(self) -> PlanSpec:
        """The plan with one block: all are alike."""
        return self._plan.model_copy(update={"model": self._plan.model.model_copy(update={"num_layers": 1})})


def with_times(plan: PlanSpec) -> PlanSpec:
    """The plan with given times in place of ``cost.analytic``; itself where it has given times.

    Raises:
        BadPlanAtError: the layers cannot be put onto the stages, or a time is too long.
    """
    cost = resolved_cost(plan)
    return plan if cost is plan.cost else plan.model_copy(update={"cost": cost})


def resolved_cost(plan: PlanSpec) -> CostSpec:
    """The plan's times as ``with_times`` has them."""
    analytic = plan.cost.analytic
    return plan.cost if analytic is None else AnalyticCosts(plan, analytic).resolved(plan.cost.p2p)


def _kind(layer: str) -> str:
    """Blocks are all alike."""
    return "layer" if layer.startswith("layer.") else layer


def _rounded(times: Iterable[Fraction]) -> list[Fraction]:
    return [round(time / GRID_US) * GRID_US for time in times]
