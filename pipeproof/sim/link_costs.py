"""Times of the messages and collectives of a graph, in nanoseconds: one look-up for each distinct case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil, prod

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.comm.step_end_rows import GRADIENTS_QUEUE, is_reduced
from pipeproof.cost.analytic_links import groups_of
from pipeproof.cost.transfer_times import LinkTimes
from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_parts import TensorPart, part_starts
from pipeproof.schedule.op_table import NONE, Group, TensorSpec
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KIND_CODE, KINDS, META_KINDS, SEND_KINDS, UPDATE_KINDS, OpKind
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.exact_times import GRID_US, rounded_up
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.op_work import Phase, product_flops
from pipeproof.stages.describe.stage_memory import num_shards

_USUAL_DIMS = 3
"""Dims of an activation, for META messages that name no tensor."""


@dataclass(frozen=True, eq=False)
class LinkDurations:
    """Nanoseconds by op id: ``collectives`` from the arrival of the last member, ``messages`` at their sends, else 0.

    ``inside`` is the total time of the collectives inside a computation.
    """

    collectives: IntColumn
    messages: IntColumn
    inside: IntColumn


def link_durations(lowered: LoweredPlan, links: LinkTimes) -> LinkDurations:
    """Times of all messages and collectives between ranks. Linear in operations, except sorting.

    Raises:
        BadPlanAtError: PP161, a profile lacks a time.
    """
    graph, ranks = lowered.graph, GlobalRanks(lowered)
    num_bytes = bytes_of(lowered, links)
    collectives, messages, inside = (np.zeros(graph.num_ops, dtype=np.int64) for _ in range(3))
    calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
    for rows, example in _distinct(calls, graph.kind, graph.group, num_bytes):
        kind, groups = KINDS[graph.kind[example]], ranks.of_group(int(graph.group[example]))
        collectives[rows] = rounded_up(links.collective_us(kind, groups, int(num_bytes[example]))) / GRID_US
    if lowered.spec.cost.bucket_size is not None:
        for op_id, us in bucket_times(lowered, links, num_bytes).items():
            collectives[op_id] = rounded_up(us) / GRID_US
    sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
    for rows, example in _distinct(sends, graph.channel, num_bytes):
        pairs = ranks.of_channel(int(graph.channel[example]))
        messages[rows] = rounded_up(links.message_us(pairs, int(num_bytes[example]))) / GRID_US
    children = calls[graph.parent[calls] != NONE]
    np.add.at(inside, graph.parent[children], collectives[children])
    return LinkDurations(collectives, messages, inside)


def bytes_of(lowered: LoweredPlan, links: LinkTimes) -> IntColumn:
    """Bytes by op id: the bytes of a message at its send, and each member's bytes of a collective.

    A shape is an int64 for each dim.
    """
    graph = lowered.graph
    declared = {entry.name for entry in lowered.spec.boundaries if entry.dtype is not None}
    run_dtype = lowered.spec.run.dtype

    def item_bytes(tensor: TensorSpec | TensorPart) -> int:
        is_of_model = tensor.dtype == run_dtype and tensor.member not in declared
        return dtype_bytes(links.dtype if is_of_model else tensor.dtype)

    of_tensors = np.array([*map(item_bytes, graph.tensors), dtype_bytes(links.dtype)], dtype=np.int64)
    item = of_tensors[graph.tensor]  # the last entry where there is no tensor
    children = np.flatnonzero(graph.parent != NONE)
    reduced = children[graph.kind[graph.parent[children]] == KIND_CODE[OpKind.REDUCE_GRAD]]
    item[reduced] = dtype_bytes(links.gradient_dtype)
    result: IntColumn = (graph.stop - graph.start) * item
    for number, tensor in enumerate(graph.tensors):
        if tensor.parts:
            sizes = [prod(part.shape) * item_bytes(part) for part in tensor.parts]
            result[graph.tensor == number] = part_starts(sizes)[-1]
    shapes = np.flatnonzero(graph.is_kind(META_KINDS))
    num_dims = np.array([*(len(tensor.shape) for tensor in graph.tensors), _USUAL_DIMS], dtype=np.int64)
    result[shapes] = num_dims[graph.tensor[shapes]] * dtype_bytes("int64")
    return result


def _distinct(rows: IntColumn, *columns: IntColumn) -> list[tuple[IntColumn, int]]:
    """Sets of rows that are equal in these columns, each with one example row."""
    if not len(rows):
        return []
    _, number = np.unique(packed(*(column[rows] for column in columns)), return_inverse=True)
    order = np.argsort(number, kind="stable")
    sets = np.split(rows[order], np.cumsum(np.bincount(number))[:-1])
    return [(members, int(members[0])) for members in sets]


class GlobalRanks:
    """Global ranks of the groups and channels of a graph, one row for each replica of a folded graph."""

    def __init__(self, lowered: LoweredPlan) -> None:
        self._graph, mesh = lowered.graph, lowered.mesh
        self._global = np.array(lowered.graph.global_rank, dtype=np.int64)
        self._strides = {axis: prod(mesh.sizes[:index]) for index, axis in enumerate(mesh.axes)}
        self._sizes = dict(zip(mesh.axes, mesh.sizes, strict=True))
        self._folded = [
            axis
            for axis in mesh.axes
            if lowered.folded and not (self._global // self._strides[axis] % self._sizes[axis]).any()
        ]

    def of_group(self, group: int) -> IntColumn:
        """Shape [replicas, members]."""
        members_of: Group = self._graph.groups[group]
        ranks = self._global[list(members_of.ranks)]
        if members_of.copies == 1:
            return self._replicas(ranks, self._folded)
        steps = np.arange(members_of.copies) * self._strides[members_of.axis]
        members = (ranks[:, None] + steps).ravel()
        return self._replicas(members, [axis for axis in self._folded if axis != members_of.axis])

    def of_channel(self, channel: int) -> IntColumn:
        """Shape [replicas, 2]: sender and receiver."""
        ends = self._graph.channels[channel]
        return self._replicas(self._global[[ends.src, ends.dst]], self._folded)

    def _replicas(self, ranks: IntColumn, axes: list[str]) -> IntColumn:
        offsets = np.zeros(1, dtype=np.int64)
        for axis in axes:
            offsets = (offsets[:, None] + np.arange(self._sizes[axis]) * self._strides[axis]).ravel()
        return ranks + offsets[:, None]


_ZERO = Fraction(0)
_DATA_AXES = ("cp", "ep", "dp")
"""Axes whose sums go as one collective, in the order of the graph."""
_LEAST, _FOR_EACH_RANK = 40_000_000, 1_000_000
"""Elements of a bucket of Megatron-LM: the minimum, and the number for each rank over which gradients are summed."""


def bucket_times(lowered: LoweredPlan, links: LinkTimes, num_bytes: IntColumn) -> Mapping[int, Fraction]:
    """Microseconds of the collectives below gradient sums and weight gathers, by op id. Linear in operations.

    ``num_bytes`` are the bytes that a member contributes to each operation, by op id.
    """
    times: dict[int, Fraction] = {}
    cached: dict[tuple[int, int, bool, bool], list[Fraction]] = {}
    for calls in _calls_by_stage(lowered):
        key = calls.stage, calls.pp, calls.is_gather, calls.is_concurrent
        rows = [row for of_axis in calls.rows.values() for row in of_axis]
        if key not in cached:
            by_row = _Buckets(lowered, links, num_bytes, calls).times()
            cached[key] = [by_row.get(row, _ZERO) for row in rows]
        times.update(zip(rows, cached[key], strict=True))
    return times


@dataclass(frozen=True, slots=True)
class _Calls:
    """The collectives of a rank for the weights of a stage: ``rows[axis]`` has one for each of ``weights[axis]``."""

    stage: int
    pp: int
    rows: Mapping[str, Sequence[int]]
    weights: Mapping[str, Sequence[Parameter]]
    is_gather: bool
    is_concurrent: bool


def _calls_by_stage(lowered: LoweredPlan) -> Iterator[_Calls]:
    graph = lowered.graph
    parents = np.flatnonzero(graph.is_kind(UPDATE_KINDS))
    children = np.flatnonzero(graph.parent != NONE)
    children = children[np.isin(graph.parent[children], parents)]
    below: dict[int, list[int]] = defaultdict(list)
    for row, parent in zip(children.tolist(), graph.parent[children].tolist(), strict=True):
        below[parent].append(row)
    gather = KIND_CODE[OpKind.GATHER_WEIGHT]
    updates: dict[tuple[int, int, bool, int], list[int]] = defaultdict(list)
    for parent in parents.tolist():
        rank, stage, work_item = (int(column[parent]) for column in (graph.rank, graph.stage, graph.work_item))
        is_gather = bool(graph.kind[parent] == gather)
        updates[rank, stage, is_gather, parent if is_gather else work_item].append(parent)
    queue = graph.queues.index(GRADIENTS_QUEUE) if GRADIENTS_QUEUE in graph.queues else None
    for (rank, stage, is_gather, _), operations in updates.items():
        pp = lowered.mesh.coords(graph.global_rank[rank])["pp"]
        held = lowered.weights_of(stage, pp)
        rows, weights = dict[str, Sequence[int]](), dict[str, Sequence[Parameter]]()
        for parent in operations:
            axis = graph.ops[parent].axis
            if axis is None or axis == "pp":  # copies of weights are summed one by one
                continue
            owed = held if is_gather else [weight for weight in held if is_reduced(weight, axis)]
            rows[axis], weights[axis] = below[parent][: len(owed)], owed  # sums of expert loads follow
        is_concurrent = not is_gather and {int(graph.queue[parent]) for parent in operations} == {queue}
        yield _Calls(stage, pp, rows, weights, is_gather, is_concurrent)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One collective: its row and its time, and the positions in the stage of the layers that have its weights."""

    row: int
    us: Fraction
    layers: frozenset[int]


class _Buckets:
    def __init__(self, lowered: LoweredPlan, links: LinkTimes, num_bytes: IntColumn, calls: _Calls) -> None:
        self._lowered, self._links, self._num_bytes, self._calls = lowered, links, num_bytes, calls
        self._layers = lowered.layers_of(calls.stage)
        memory = lowered.spec.memory
        self._joins_axes = num_shards(lowered.spec) == 1 or memory.optimizer_ranks == "replicas"

    def times(self) -> dict[int, Fraction]:
        """Microseconds of the rows that take time, without the part that a computation hides."""
        times = dict[int, Fraction]()
        for_tp = self._calls.rows.get("tp", ())
        if for_tp:
            times[for_tp[0]] = self._collective_us(for_tp, ("tp",))
        buckets = list(self._in_order())
        hidden = self._hidden_us(buckets)
        for bucket in buckets:
            part = min(hidden, bucket.us)
            times[bucket.row], hidden = bucket.us - part, hidden - part
        return times

    def _in_order(self) -> Iterator[_Bucket]:
        """The buckets, in the order in which a backward completes them."""
        calls, sizes = self._calls, {axis: self._lowered.mesh.size(axis) for axis in ("tp", "ep")}
        rows = {
            (axis, weight.name): row
            for axis in _DATA_AXES
            for weight, row in zip(calls.weights.get(axis, ()), calls.rows.get(axis, ()), strict=True)
        }
        least = self._least_elements
        filling: dict[tuple[str, ...], list[Parameter]] = defaultdict(list)
        elements: dict[tuple[str, ...], int] = defaultdict(int)
        for weight in reversed(self._lowered.weights_of(calls.stage, calls.pp)):
            axes = tuple(axis for axis in _DATA_AXES if (axis, weight.name) in rows)
            if not axes:
                continue
            filling[axes].append(weight)
            elements[axes] += prod(weight.local_shape(sizes))
            if least is not None and elements[axes] >= least:
                yield self._bucket(axes, filling.pop(axes), rows)
                elements[axes] = 0
        for axes, weights in filling.items():
            yield self._bucket(axes, weights, rows)

    @property
    def _least_elements(self) -> int | None:
        """Elements at which a bucket is complete; None if the stage has one bucket."""
        size, topology = self._lowered.spec.cost.bucket_size, self._lowered.spec.topology
        if size == "stage" or self._calls.stage > 0:
            return None
        return max(_LEAST, _FOR_EACH_RANK * topology.dp * topology.cp * topology.ep) if size == "megatron" else size

    def _bucket(
        self, axes: tuple[str, ...], weights: Sequence[Parameter], rows: Mapping[tuple[str, str], int]
    ) -> _Bucket:
        by_axis = {axis: [rows[axis, weight.name] for weight in weights] for axis in axes}
        if self._joins_axes:
            us = self._collective_us(by_axis[axes[-1]], self._sharing_axes(axes, weights[0]))
        else:
            us = sum((self._collective_us(of_axis, (axis,)) for axis, of_axis in by_axis.items()), _ZERO)
        names = {weight.name for weight in weights}
        places = (index for index, layer in enumerate(self._layers) if names & {own.name for own in layer.parameters})
        return _Bucket(by_axis[axes[-1]][0], us, frozenset(places) or frozenset({0}))

    def _sharing_axes(self, axes: tuple[str, ...], weight: Parameter) -> tuple[str, ...]:
        """Axes of a bucket's collective; a gather only has rows for dp, and is over all ranks that share the weight."""
        if not self._calls.is_gather:
            return axes
        shared = (axis for axis in _DATA_AXES if self._lowered.mesh.size(axis) > 1)
        return tuple(axis for axis in shared if axis not in weight.sharded_over)

    def _collective_us(self, rows: Sequence[int], axes: tuple[str, ...]) -> Fraction:
        """Time of the collective of all ``rows`` together, over ``axes``."""
        kind, mesh = KINDS[self._lowered.graph.kind[rows[0]]], self._lowered.mesh
        num_bytes = Fraction(int(self._num_bytes[list(rows)].sum()))
        if kind is OpKind.ALL_GATHER:  # each of more ranks has a smaller share than the graph's
            num_bytes *= Fraction(mesh.size("dp"), prod(mesh.size(axis) for axis in axes))
        return self._links.collective_us(kind, groups_of(self._lowered.spec.topology, *axes), ceil(num_bytes))

    def _hidden_us(self, buckets: Sequence[_Bucket]) -> Fraction:
        """The part of the buckets' times during which the rank computes."""
        whole = sum((bucket.us for bucket in buckets), _ZERO)
        cost, stage = self._lowered.spec.cost, self._calls.stage
        if self._calls.is_gather and cost.gather_weights == "first_forward":
            if stage > 0:
                return min(whole, sum((cost.forward_of(before) for before in range(stage)), _ZERO) / self._num_splits)
            return whole - self._rest_of_forward(buckets)
        if self._calls.is_concurrent and stage == 0:
            return whole - self._rest_of_backward(buckets)
        return _ZERO

    @property
    def _num_splits(self) -> int:
        return max(1, self._lowered.num_splits)

    def _rest_of_backward(self, buckets: Sequence[_Bucket]) -> Fraction:
        """Time of the buckets' sums after the end of the last computation that adds to their gradients."""
        cost = self._lowered.spec.cost
        kinds = {op.kind for op in self._lowered.programs[self._calls.pp] if op.stage == 0}
        split = OpKind.BACKWARD_WEIGHT in kinds
        duration = (cost.backward_weight_of(0) if split else cost.backward_of(0)) / self._num_splits
        shares = self._shares((Phase.WEIGHT,) if split else (Phase.INPUT, Phase.WEIGHT))
        made = [duration * share for share in accumulate(reversed(shares))][::-1]  # by layer
        end = _ZERO
        for bucket in buckets:
            end = max(end, made[min(bucket.layers)]) + bucket.us
        return max(_ZERO, end - duration)

    def _rest_of_forward(self, buckets: Sequence[_Bucket]) -> Fraction:
        """Time by which a forward is longer because its layers wait for their weights."""
        duration = self._lowered.spec.cost.forward_of(0) / self._num_splits
        arrived, end = _ZERO, _ZERO
        arrivals = dict[int, Fraction]()
        for bucket in reversed(buckets):
            arrived += bucket.us
            arrivals |= dict.fromkeys(bucket.layers, arrived)
        for index, share in enumerate(self._shares((Phase.FORWARD,))):
            end = max(end, arrivals.get(index, _ZERO)) + duration * share
        return end - duration

    def _shares(self, phases: Sequence[Phase]) -> list[Fraction]:
        """Shares of a computation by layer, in proportion to FLOPs; equal shares for custom layers."""
        spec, names = self._lowered.spec, self._lowered.stages[self._calls.stage]
        if spec.model.kind != "gpt":
            return [Fraction(1, len(names))] * len(names)
        size = self._lowered.sizes[0]
        flops = [sum(product_flops(spec, [name], size)[phase] for phase in phases) for name in names]
        whole = sum(flops)
        return [Fraction(one) / whole if whole else Fraction(1, len(names)) for one in flops]
