"""Shares of a stage's F, I and W that each part of it takes, for computations that alternate.

A part is the work of a computation between two of its exchanges. With ``cost.analytic`` the share of a part is the
share of its operations in the time of the stage; otherwise in the FLOPs of products and attention.

The host launches the operations of both halves of a pair one after the other, and their exchanges too. Its time is
therefore not hidden by alternating, and ``cost.analytic`` gives it for each part. A computation without parts takes the
time of the device or of the host, whichever is longer, because the host runs ahead of the device inside it. The same
holds for the parts of a computation together: a part ends when the device has done all work up to its end, and the host
has launched all of it. A limit of each part by itself would make a computation longer by being cut: in a long part the
host launches the short ones after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.exact_times import rounded_up
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import work_item_sizes
from pipeproof.stages.describe.gpt import operation_collectives
from pipeproof.stages.describe.layer import (
    Collective,
    Exchange,
    exchanges,
    is_block,
    is_in_modules,
    layer_kind,
    modules_of_block,
)
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, Work, operation_works

if TYPE_CHECKING:  # given times need none of it
    from pipeproof.cost.analytic_times import AnalyticCosts

_ZERO = Fraction(0)


class PhaseParts(NamedTuple):
    """The parts of a phase of a stage, for one work item: a micro-batch or a split of one.

    ``shares`` are shares of the device's time without collectives, with the sum 1. ``host_us`` are the microseconds in
    which the host launches a part and the next exchange, less the time of a collective before it that blocks the
    compute queue, because the host launches more meanwhile; 0 if not known. ``exchanges`` are between the
    parts of a forward and of I.
    """

    shares: tuple[Fraction, ...]
    host_us: tuple[Fraction, ...]
    exchanges: tuple[tuple[Exchange, tuple[Collective, ...]], ...] = ()

    def ends(self, device_us: Fraction, grid_us: Fraction) -> list[Fraction]:
        """The end of each part, from the begin of a phase that keeps the device busy for ``device_us``.

        All are multiples of ``grid_us``, except ``device_us`` at the end.
        """
        ends, share, launched = [_ZERO], _ZERO, _ZERO
        for number, host_us in enumerate(self.host_us):
            share += self.shares[number]
            launched += host_us
            done = min(device_us, round(device_us * share / grid_us) * grid_us)
            ends.append(max(ends[-1], done, round(launched / grid_us) * grid_us))
        return [*ends[1:-1], max(device_us, ends[-1])]


class _Step(NamedTuple):
    """One operation in one direction: by phase its work and host microseconds, then its collectives."""

    work: Mapping[Phase, Fraction]
    host_us: Mapping[Phase, Fraction]
    calls: tuple[Collective, ...]


@dataclass(frozen=True)
class PartShares:
    """The parts of the stages of a plan with alternating computations; described at their first use.

    Their work is microseconds of the device with ``cost.analytic``, otherwise FLOPs.
    """

    plan: PlanSpec

    @cached_property
    def stages(self) -> tuple[Mapping[Phase, PhaseParts], ...]:
        """By global stage and phase; W has the parts of the backward that defers it."""
        described: dict[str, tuple[list[_Step], list[_Step]]] = {}
        return tuple(self._stage(number, names, described) for number, names in enumerate(stage_layers(self.plan)))

    @cached_property
    def _costs(self) -> AnalyticCosts | None:
        if self.plan.cost.analytic is None:
            return None
        from pipeproof.cost.analytic_times import AnalyticCosts

        return AnalyticCosts(self.plan, self.plan.cost.analytic)

    def _stage(
        self, number: int, names: Sequence[str], described: dict[str, tuple[list[_Step], list[_Step]]]
    ) -> Mapping[Phase, PhaseParts]:
        """The parts of a stage with these layers; ``described`` has the steps of layers by kind."""
        forward: list[_Step] = []
        backward: list[_Step] = []
        for name in names:
            kind = layer_kind(self.plan.model, name)
            if kind not in described:
                described[kind] = self._steps(name)
            forward += described[kind][0]
            backward = described[kind][1] + backward
        steps = {Phase.FORWARD: forward, Phase.INPUT: backward, Phase.WEIGHT: backward}
        around = dict.fromkeys(Phase, _ZERO)
        if self._costs is not None:
            around = {phase: self._costs.host_around_us(phase, names, is_first=number == 0) for phase in Phase}
        return {phase: self._parts(phase, steps[phase], around[phase]) for phase in Phase}

    def _steps(self, name: str) -> tuple[list[_Step], list[_Step]]:
        plan, forward, backward = self.plan, list[_Step](), list[_Step]()
        item_bytes, flash = 1, True
        if self._costs is not None:
            item_bytes, flash = dtype_bytes(self._costs.dtype), self._costs.analytic.attention == "flash"
        is_selective = plan.memory.recompute == "selective" and is_block(name)
        modules = modules_of_block(plan, name) if is_selective else ()
        operations = layer_operations(plan.gpt, name)
        size = max(work_item_sizes(plan)[0], key=lambda size: (size.num_tokens, size.seq_length))
        works = operation_works(plan, name, size, item_bytes, flash=flash)
        collectives = operation_collectives(plan, name, size)
        for operation, work, (calls, calls_back) in zip(operations, works, collectives, strict=True):
            is_again = is_in_modules(modules, operation.name)
            time, host = dict.fromkeys(Phase, _ZERO), dict.fromkeys(Phase, _ZERO)
            for one in work:
                phases = [one.phase]
                if one.phase is Phase.FORWARD and is_again:
                    phases.append(Phase.INPUT)
                device_us, host_us = self._weigh(one)
                for phase in phases:
                    time[phase] += device_us
                    host[phase] += host_us
            forward.append(_Step(time, host, calls))
            backward.append(_Step(time, host, calls_back))
        return forward, backward[::-1]

    def _weigh(self, work: Work) -> tuple[Fraction, Fraction]:
        """(work of the device, microseconds of the host) of one operation."""
        if self._costs is None:
            return _ZERO if work.unit is ComputeUnit.VECTOR else work.flops, _ZERO
        time = self._costs.work(work)
        return time.device_us, time.host_us

    def _parts(self, phase: Phase, steps: Sequence[_Step], around_us: Fraction) -> PhaseParts:
        calls = [call for step in steps for call in step.calls]
        cut = exchanges(calls)
        exchange_of = [number for number, one in enumerate(cut) for _ in range(one.num_collectives)]
        work = [_ZERO] * (2 + max(exchange_of, default=-1))
        host_us = [around_us, *work[1:]]
        numbers, part = iter(exchange_of), 0
        for step in steps:
            work[part] += step.work[phase]
            host_us[part] += step.host_us[phase]
            for call in step.calls:
                before = next(numbers)
                part = before + 1
                if self._costs is not None and phase is not Phase.WEIGHT:  # which has no collectives
                    host_us[before] += self._costs.collective_host_us
                    host_us[part] -= self._blocked_us(self._costs, call)
        whole = sum(work)
        shares = [one / whole for one in work] if whole else [Fraction(1), *work[1:]]
        each = iter(calls)
        between = tuple((one, tuple(islice(each, one.num_collectives))) for one in cut)
        return PhaseParts(tuple(shares), tuple(host_us), between)

    def _blocked_us(self, costs: AnalyticCosts, call: Collective) -> Fraction:
        """Time for which a collective blocks the compute queue: collectives of experts have a queue of their own."""
        return _ZERO if call.axis == "ep" else rounded_up(costs.links.collective_us(call, dtype_bytes(costs.dtype)))
