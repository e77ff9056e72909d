"""Duration of each operation, in integer ticks.

All times of a plan are fractions of microseconds. They are scaled by their common denominator: the simulation adds and
compares integers and rounds nothing. Times of messages and collectives that come from a formula were rounded up to
nanoseconds before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, lcm
from types import MappingProxyType

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.device_tables import exact
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.units import time_text
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, COPY_KINDS, KIND_CODE, KINDS, PART_KINDS, Op, OpKind
from pipeproof.sim.link_costs import LinkDurations, link_durations
from pipeproof.sim.outcome import NO_ROOM
from pipeproof.specs.cost import CostSpec
from pipeproof.specs.exact_times import GRID_US, rounded_up
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.op_work import Phase
from pipeproof.stages.describe.stage_memory import Lifetime


def alternates(graph: OpGraph) -> BoolColumn:
    """Mask of the computations that have parts."""
    mask = np.zeros(graph.num_ops, dtype=bool)
    parents = graph.parent[graph.is_kind(PART_KINDS)]
    mask[parents[parents != NONE]] = True
    return mask


def part_ticks(
    lowered: LoweredPlan, own_us: Callable[[int], Fraction], ticks_per_us: int
) -> tuple[IntColumn, Sequence[int]]:
    """(parts, their ticks); ``own_us`` is the time of a computation without its collectives.

    WEIGHTS take the time of the weight gradients of the PARTs since the last WEIGHTS.
    """
    graph = lowered.graph
    rows = np.flatnonzero(graph.is_kind(PART_KINDS) & (graph.parent != NONE))
    rows = rows[np.argsort(graph.parent[rows], kind="stable")]
    parent, is_part = graph.parent[rows], graph.kind[rows] == KIND_CODE[OpKind.PART]
    begins = np.flatnonzero(np.diff(parent, prepend=NONE))
    first = np.repeat(begins, np.diff(np.append(begins, len(rows))))
    counted = np.concatenate([[0], np.cumsum(is_part)])
    end = counted[1:] - counted[first]
    last_weights = np.maximum.accumulate(np.where(is_part, NONE, np.arange(len(rows))))
    last_weights = np.concatenate([[NONE], last_weights[:-1]])
    begin = np.where(is_part, end - 1, np.where(last_weights >= first, end[last_weights], 0))
    ticks = np.zeros(len(rows), dtype=object)
    _, examples, number = np.unique(
        packed(graph.kind[parent], graph.stage[parent]), return_index=True, return_inverse=True
    )
    for index, example in enumerate(parent[examples].tolist()):
        selected = number == index
        for ends, chosen in zip(_ends(lowered, example, own_us(example)), (is_part, ~is_part), strict=True):
            of_kind = np.flatnonzero(selected & chosen)
            at = np.array([int(time * ticks_per_us) for time in (_ZERO, *ends)], dtype=object)
            stop, start = (np.minimum(column[of_kind], len(ends)) for column in (end, begin))
            ticks[of_kind] = at[stop] - at[start]
    return rows, [int(tick) for tick in ticks]


def _ends(lowered: LoweredPlan, op_id: int, own_us: Fraction) -> tuple[list[Fraction], list[Fraction]]:
    """The end of each part, counted from the begin of its whole computation, of its PARTs and of its WEIGHTS."""
    graph, cost = lowered.graph, lowered.spec.cost
    kind, stage = KINDS[graph.kind[op_id]], int(graph.stage[op_id])
    assert lowered.part_shares is not None, "a plan with parts has their shares"
    parts, weights_us = lowered.part_shares.stages[stage], _ZERO
    if kind is OpKind.BACKWARD:
        weights_us = min(own_us, cost.backward_weight_of(stage) / max(1, graph.num_splits))
    phase = Phase.FORWARD if kind is OpKind.FORWARD else Phase.INPUT
    return (parts[phase].ends(own_us - weights_us, GRID_US), parts[Phase.WEIGHT].ends(weights_us, GRID_US))


_WORK_KINDS = COMPUTE_KINDS | {OpKind.STEP}
_ZERO = Fraction(0)
_KEYS = MappingProxyType(
    {
        OpKind.FORWARD: "forward_us",
        OpKind.BACKWARD: "backward_us",
        OpKind.BACKWARD_INPUT: "backward_input_us",
        OpKind.BACKWARD_WEIGHT: "backward_weight_us",
    }
)
"""The key of a computation's time."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of the operations of a graph, ``ticks[op_id]`` at least 0, and of the messages between ranks.

    The duration of a computation excludes its collectives; a collective's duration begins when its last member has
    arrived. ``overlapped`` maps the first of two overlapped computations to the second: both take the ``ticks`` of the
    first.
    ``message_ticks`` holds the time of each message at the op id of its send, where they differ; without it, each takes
    ``latency_ticks``. ``recv_slowdown`` is the fraction by which a computation gets longer while a receive of its rank
    is pending, ``collective_slowdown`` while an exchange of an overlapped pair with parts is under way.
    """

    ticks: tuple[int, ...]
    latency_ticks: int
    ticks_per_us: int
    overlapped: Mapping[int, int] = field(default_factory=dict)
    message_ticks: tuple[int, ...] | None = None
    recv_slowdown: Fraction = Fraction(0)
    collective_slowdown: Fraction = Fraction(0)

    def message(self, send: int) -> int:
        """Ticks from the start of a message to its arrival."""
        return self.latency_ticks if self.message_ticks is None else self.message_ticks[send]


def durations_of(lowered: LoweredPlan) -> Durations:
    """Durations of the operations of a plan's graph.

    F, B, I and W take the plan's time for their stage, a sequence split its share of it, and STEP the time of the
    optimizer. A computation with parts takes no time itself; its parts share the time. Copies to and from host memory
    take the time of their bytes. Messages and collectives take the times of ``lowered.links``. The time of a stage
    includes its collectives: their time on the slowest rank, for the largest micro-batch, is subtracted.

    Raises:
        BadPlanAtError: PP154, a stage's time is shorter than its collectives; PP161, a profile lacks some time.
    """
    graph, cost, links = lowered.graph, lowered.spec.cost, lowered.links
    timed = None if links is None else link_durations(lowered, links)
    overlapped = _overlapped(graph)
    works = _Works(lowered, timed, overlapped)
    copies = copy_times(lowered)
    slowdown, of_collectives = cost.recv_slowdown or _ZERO, cost.collective_slowdown or _ZERO
    times = (cost.p2p_latency_us, *works.own_us, *works.pairs_us.values(), *(() if links is None else (GRID_US,)))
    # slowed computations and parts end on a tick, so ticks are at most this long
    grid = (GRID_US,) if slowdown or of_collectives or copies or works.have_parts else ()
    ticks_per_us = lcm(*(time.denominator for time in (*times, *grid)))
    ticks = works.ticks(ticks_per_us)
    for op_id, copy_us in copies.items():
        ticks[op_id] = int(copy_us * ticks_per_us)
    messages = None
    if timed is not None:
        per_ns = int(ticks_per_us * GRID_US)
        calls = np.flatnonzero(timed.collectives)
        for op_id, time in zip(calls.tolist(), timed.collectives[calls].tolist(), strict=True):
            ticks[op_id] = time * per_ns
        messages = tuple(time * per_ns for time in timed.messages.tolist())
    return Durations(
        tuple(ticks),
        int(cost.p2p_latency_us * ticks_per_us),
        ticks_per_us,
        overlapped,
        messages,
        slowdown,
        of_collectives,
    )


class _Works:
    """Times of computations and optimizers without their collectives, one for each (kind, stage).

    ``own_us`` holds one time for each (kind, stage), ``pairs_us`` one for the first of each overlapped pair.
    """

    def __init__(self, lowered: LoweredPlan, timed: LinkDurations | None, overlapped: Mapping[int, int]) -> None:
        self._lowered, graph = lowered, lowered.graph
        cost, share = lowered.spec.cost, max(1, graph.num_splits)
        self._rows = np.flatnonzero(graph.is_kind(_WORK_KINDS))
        self._alternating = alternates(graph)
        self.have_parts = bool(self._alternating.any())
        _, examples, sort = np.unique(
            packed(graph.kind[self._rows], graph.stage[self._rows]), return_index=True, return_inverse=True
        )
        self._place = np.zeros(graph.num_ops, dtype=np.int64)
        self._place[self._rows] = sort + 1
        inside = np.zeros(len(examples), dtype=np.int64)
        if timed is not None:
            np.maximum.at(inside, sort, timed.inside[self._rows])
        inside_us = [time * GRID_US for time in inside.tolist()]
        ops = [graph.ops[op_id] for op_id in self._rows[examples].tolist()]
        frozen = lowered.spec.frozen_stages
        timed_as = [
            op._replace(kind=OpKind.BACKWARD_INPUT) if op.stage in frozen and op.kind is OpKind.BACKWARD else op
            for op in ops
        ]
        whole = [work_us(op, cost) / (share if op.kind in COMPUTE_KINDS else 1) for op in timed_as]
        in_pairs = np.isin(self._rows, [*overlapped, *overlapped.values()])
        for index in np.unique(sort[~in_pairs]).tolist():
            self._require_room(str(ops[index].kind), ops[index], whole[index], inside_us[index])
        self.own_us = [max(_ZERO, time - part) for time, part in zip(whole, inside_us, strict=True)]
        self.pairs_us: dict[int, Fraction] = {}
        for first, second in overlapped.items():
            part = inside_us[self._place[first] - 1] + inside_us[self._place[second] - 1]
            first_op, second_op = graph.ops[first], graph.ops[second]
            pair = _pair_us(first_op, second_op, cost) / share
            self._require_room(f"{first_op.kind} overlapped with {second_op.kind}", first_op, pair, part)
            self.pairs_us[first] = pair - part

    def ticks(self, ticks_per_us: int) -> list[int]:
        """Ticks by op id, 0 for operations of other kinds."""
        table = [0, *(int(time * ticks_per_us) for time in self.own_us)]
        ticks = [table[index] for index in self._place.tolist()]
        if self.have_parts:
            for container in np.flatnonzero(self._alternating).tolist():
                ticks[container] = 0
            rows, of_parts = part_ticks(self._lowered, lambda op_id: self.own_us[self._place[op_id] - 1], ticks_per_us)
            for op_id, num_ticks in zip(rows.tolist(), of_parts, strict=True):
                ticks[op_id] = num_ticks
        for first, time in self.pairs_us.items():
            ticks[first] = int(time * ticks_per_us)
        return ticks

    def _require_room(self, name: str, op: Op, whole: Fraction, inside: Fraction) -> None:
        if inside <= whole:
            return
        message = (
            f"{name} of stage {op.stage} takes {time_text(whole)}, and the collectives inside it {time_text(inside)}"
        )
        fix = "a stage's time includes its collectives: give it a longer time, or the network faster links"
        raise BadPlanAtError(NO_ROOM.finding(message, help=fix), ("cost", _KEYS[op.kind]))


def _overlapped(graph: OpGraph) -> dict[int, int]:
    """The overlapped pairs that run as wholes: the second of two computations of a batch, by the first."""
    first, second = graph.pairs[~alternates(graph)[graph.pairs].any(axis=1)].T
    return dict(zip(first.tolist(), second.tolist(), strict=True))


def _pair_us(first: Op, second: Op, cost: CostSpec) -> Fraction:
    """Time of two overlapped computations; a forward with I or W alone takes the sum of both."""
    forward, backward = (first, second) if first.kind is OpKind.FORWARD else (second, first)
    if backward.kind is OpKind.BACKWARD:
        return cost.overlapped_of(forward.stage, backward.stage)
    return work_us(first, cost) + work_us(second, cost)


def work_us(op: Op, cost: CostSpec) -> Fraction:
    """Time of an optimizer's step, or of one F, B, I or W, collectives included.

    I and W take half of B each if the plan only gives B.
    """
    of_stage = {
        OpKind.FORWARD: cost.forward_of,
        OpKind.BACKWARD: cost.backward_of,
        OpKind.BACKWARD_INPUT: cost.backward_input_of,
        OpKind.BACKWARD_WEIGHT: cost.backward_weight_of,
        OpKind.STEP: cost.optimizer_of,
    }
    return of_stage[op.kind](op.stage)


COPIED = (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
"""Lifetimes of the activations that are copied: a forward stores them for its backward."""

_NO_TIMES: Mapping[int, Fraction] = MappingProxyType({})


def copied_bytes(lowered: LoweredPlan, copies: IntColumn) -> IntColumn:
    """Bytes of each of these copies: all that its stage stores of its work item from forward to backward."""
    by_key: dict[tuple[int, int], int] = {}
    graph, sizes = lowered.graph, lowered.size_of_work_item
    keys = [
        (stage, sizes[item] if sizes else 0)
        for stage, item in zip(graph.stage[copies].tolist(), graph.work_item[copies].tolist(), strict=True)
    ]
    for stage, size in set(keys):
        stored = stored_activations(lowered.spec, lowered.layers_of(stage), lowered.sizes[size])
        by_key[stage, size] = ceil(sum(part.num_bytes for part in stored if part.lifetime in COPIED))
    return np.array([by_key[key] for key in keys], dtype=np.int64)


def copy_times(lowered: LoweredPlan) -> Mapping[int, Fraction]:
    """Microseconds of each copy by op id, rounded up to nanoseconds; empty if the plan has no ``host_bandwidth``."""
    bandwidth = lowered.spec.cost.host_bandwidth
    copies = np.flatnonzero(lowered.graph.is_kind(COPY_KINDS))
    if bandwidth is None or not len(copies):
        return _NO_TIMES
    bytes_per_us = exact(bandwidth) * 1000
    num_bytes = copied_bytes(lowered, copies).tolist()
    return {op_id: rounded_up(size / bytes_per_us) for op_id, size in zip(copies.tolist(), num_bytes, strict=True)}
