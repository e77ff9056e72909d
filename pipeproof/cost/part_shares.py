"""Shares of a stage's F, I and W that each part of it takes, for computations that take turns.

A part is what a computation does between two of its exchanges. With ``cost.analytic`` the share of a part is that of
its operations in the time of the stage; otherwise of their FLOPs in products and in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize, work_item_sizes
from pipeproof.stages.describe.exchanges import exchanges
from pipeproof.stages.describe.gpt import operation_collectives
from pipeproof.stages.describe.layer import Collective, layer_kind
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import ATTENTION_CORE, ComputeUnit, Phase, Work, operation_works

Shares = tuple[Fraction, ...]
"""One for each part, with the sum 1."""


@dataclass(frozen=True, slots=True)
class PartShares:
    """By global stage and phase, the share of each part; W has the parts of the backward that defers it."""

    stages: tuple[Mapping[Phase, Shares], ...]


class _Step(NamedTuple):
    """One operation in one direction: its work by phase, then its collectives."""

    work: Mapping[Phase, Fraction]
    calls: tuple[Collective, ...]


def part_shares(plan: PlanSpec) -> PartShares:
    """The shares of the stages of a plan whose computations take turns."""
    size = max(work_item_sizes(plan)[0], key=lambda size: (size.num_tokens, size.seq_length))
    weigh, item_bytes, flash = _weights(plan)
    described: dict[str, tuple[list[_Step], list[_Step]]] = {}
    stages = []
    for names in stage_layers(plan):
        forward: list[_Step] = []
        backward: list[_Step] = []
        for name in names:
            kind = layer_kind(plan.model, name)
            if kind not in described:
                described[kind] = _steps(plan, name, size, weigh, item_bytes, flash=flash)
            forward += described[kind][0]
            backward = described[kind][1] + backward
        stages.append(
            {
                Phase.FORWARD: _shares(forward, Phase.FORWARD),
                Phase.INPUT: _shares(backward, Phase.INPUT),
                Phase.WEIGHT: _shares(backward, Phase.WEIGHT),
            }
        )
    return PartShares(tuple(stages))


def _weights(plan: PlanSpec) -> tuple[Callable[[Work], Fraction], int, bool]:
    """(weight of an operation, bytes of an element, whether attention is flash)."""
    if plan.cost.analytic is None:
        return (lambda work: Fraction(0) if work.unit is ComputeUnit.VECTOR else work.flops), 1, True
    from pipeproof.cost.analytic_times import AnalyticCosts

    costs = AnalyticCosts(plan, plan.cost.analytic)
    return (lambda work: costs.work(work).device_us), dtype_bytes(costs.dtype), costs.analytic.attention == "flash"


def _steps(
    plan: PlanSpec, name: str, size: MicroBatchSize, weigh: Callable[[Work], Fraction], item_bytes: int, *, flash: bool
) -> tuple[list[_Step], list[_Step]]:
    """The operations of a layer in forward and in backward."""
    forward, backward = [], []
    works = operation_works(plan, name, size, item_bytes, flash=flash)
    for work, (calls, calls_back) in zip(works, operation_collectives(plan, name, size), strict=True):
        time = dict.fromkeys(Phase, Fraction(0))
        for one in work:
            time[one.phase] += weigh(one)
            if one.phase is Phase.FORWARD and one.name in ATTENTION_CORE and plan.memory.recompute == "selective":
                time[Phase.INPUT] += weigh(one)
        forward.append(_Step(time, calls))
        backward.append(_Step(time, calls_back))
    return forward, backward[::-1]


def _shares(steps: Sequence[_Step], phase: Phase) -> Shares:
    """The share of each part in one phase; all of it in the first part of a phase without work."""
    parts = [*_parts(steps, phase)]
    whole = sum(parts)
    return tuple(part / whole for part in parts) if whole else (Fraction(1), *parts[1:])


def _parts(steps: Sequence[_Step], phase: Phase) -> Iterator[Fraction]:
    calls = [call for step in steps for call in step.calls]
    cut = iter(exchanges(calls))
    work, left = Fraction(0), 0
    for step in steps:
        work += step.work[phase]
        for _ in step.calls:
            if not left:
                left = next(cut).num_collectives
                yield work
                work = Fraction(0)
            left -= 1
    yield work


def split_time(time: Fraction, shares: Iterable[Fraction], grid: Fraction) -> list[Fraction]:
    """The end of each part of a time, from its begin; all but the last are multiples of ``grid``."""
    ends, so_far = [], Fraction(0)
    for share in shares:
        so_far += share
        ends.append(min(time, round(time * so_far / grid) * grid))
    ends[-1] = time
    return ends
