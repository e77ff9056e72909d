"""The memory of a simulated step, rank by rank.

- Weights, their gradients, optimizer states, the user's overhead and the slots
  of messages are held for the whole step.
- If a rank keeps shards, whole gradients are held from the start of a B or W to the end of the sums behind it,
  whole weights from the start of their gathers to the end of the RESHARD.
- Activations are held from the start of F for the lifetimes of
  ``stages.describe.stage_memory``.
- The allocator's fragmentation is a share of the tensors at the peak, and held for the whole step.
- An offloaded tensor is held until its FREE, and again from the start of its reload. Host memory is not counted.
- A received input is held from its post. From the start of F it is the tensor
  that the first layer keeps, and is counted there. Other tensors of the same
  boundary, and received gradients, are held until I ends.
- A sent output is held from the end of F until it is freed: with the backward,
  at the FREE of the plan, or of a frozen stage at the wait for its send. The gradient of an input is held until it has
  arrived. Both are counted once for any number of receivers; slices are counted
  in addition, until they have arrived.
- The tensor of a direct edge is held by its producer as an output, even if it stays on the rank, and by a rank that
  receives it until the backward of its first consumer; without backwards until the forward of its last consumer there.
- Receive slots hold the inputs that the layers keep. A tensor sent through send
  slots is free as soon as its send is posted.

A step without backwards keeps no activations; otherwise a work item without a
backward keeps them to the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.comm.plan_context import message_name
from pipeproof.comm.step_end_rows import ADDS
from pipeproof.cost.device_tables import exact
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_parts import TensorPart, TensorSpec, part_starts
from pipeproof.schedule.ops import KIND_CODE, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.sim.memory_curve import GIB, Clock, Holdings, MemoryCurve, Part, curves_of
from pipeproof.sim.op_durations import COPIED
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.stages.describe.model_family import frozen_bytes, input_lifetime, stored_activations
from pipeproof.stages.describe.stage_memory import (
    Lifetime,
    StateBytes,
    StoredActivation,
    memory_dtype,
    shards_gradients,
    shards_weights,
    state_of_weights,
)

_FORWARD = (OpKind.FORWARD,)
_INPUT = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
_WEIGHT = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)


def memory_of(
    lowered: LoweredPlan, starts: Sequence[int | None] | IntColumn, ends: Sequence[int | None] | IntColumn, ticks: int
) -> tuple[MemoryCurve, ...]:
    """Memory curve of each rank of the plan's graph; ``ticks`` is the number of ticks in a microsecond.

    ``starts`` and ``ends`` are the times of each operation of a finished step. Linear in operations, except sorting.
    """
    step = _Step(lowered, Clock(lowered.graph, *(np.array(times, dtype=np.int64) for times in (starts, ends))))
    holdings = [
        *step.activations(), *step.received(), *step.gathered(), *step.sent(), *step.slices(), *step.local(),
        *step.whole_gradients(), *step.whole_weights(),
    ]  # fmt: skip
    persistent, fragmentation = [*step.persistent()], exact(lowered.spec.memory.fragmentation)
    curves = curves_of(persistent, holdings, ticks)
    if not fragmentation:
        return curves
    for held, curve in zip(persistent, curves, strict=True):  # an allocator keeps its reserved memory
        held[Part.OVERHEAD] += ceil(fragmentation * (curve.peak - held[Part.OVERHEAD]))
    return curves_of(persistent, holdings, ticks)


def stage_holdings(lowered: LoweredPlan, stage: int, variant: int = 0) -> tuple[StoredActivation, ...]:
    """Activations that a stage stores for one work item, by operation; none for a stage without a backward."""
    if stage < lowered.spec.first_trained:
        return ()
    return stored_activations(lowered.spec, lowered.layers_of(stage), lowered.sizes[variant])


def state_of_stage(lowered: LoweredPlan, stage: int, pp: int) -> StateBytes:
    """Bytes of the state of a stage on a pipeline rank; a frozen stage has its weights alone."""
    state = state_of_weights(lowered.spec, lowered.weights_of(stage, pp))
    if stage not in lowered.spec.frozen_stages:
        return state
    return replace(state, parameters=frozen_bytes(lowered.spec, lowered.stages[stage]))


class _Step:
    def __init__(self, lowered: LoweredPlan, clock: Clock) -> None:
        self._lowered, self._clock, self._graph = lowered, clock, lowered.graph
        self._buffers = lowered.spec.buffers
        graph, item = self._graph, dtype_bytes(memory_dtype(lowered.spec))

        def item_bytes(tensor: TensorSpec | TensorPart | Boundary) -> int:
            """Bytes of an element; tensors of the model have the type of the section memory."""
            return item if tensor.dtype == lowered.spec.run.dtype else dtype_bytes(tensor.dtype)

        def num_bytes(tensor: TensorSpec) -> int:
            sizes = [prod(part.shape) * item_bytes(part) for part in tensor.parts]
            return part_starts(sizes)[-1] if sizes else tensor.numel * item_bytes(tensor)

        self._item_bytes = item_bytes
        self._bytes = np.array([*map(num_bytes, graph.tensors)] or [0])
        items = np.array([*map(item_bytes, graph.tensors)] or [0])
        is_packed = np.array([bool(tensor.parts) for tensor in graph.tensors] or [False])
        moved = (graph.stop - graph.start) * items[graph.tensor]
        self._moved = np.where(is_packed[graph.tensor], self._bytes[graph.tensor], moved)

    def persistent(self) -> Iterator[dict[Part, int]]:
        """Bytes that each rank holds for the whole step."""
        lowered, graph, states = self._lowered, self._graph, self._states
        overhead = int(lowered.spec.memory.overhead_gib * GIB)
        slots = self._slots()
        for rank, global_rank in enumerate(graph.global_rank):
            pp = lowered.mesh.coords(global_rank)["pp"]
            held = [state for (_, holder), state in states.items() if holder == pp]
            yield {
                Part.PARAMETERS: sum(state.parameters for state in held),
                Part.GRADIENTS: sum(state.gradients for state in held),
                Part.OPTIMIZER: sum(state.optimizer for state in held),
                Part.MESSAGES: slots[rank],
                Part.OVERHEAD: overhead,
            }

    def whole_gradients(self) -> list[Holdings]:
        """Gradients of a stage to which a computation adds, where the rank keeps shards of their sums."""
        if not shards_gradients(self._lowered.spec):
            return []
        clock, graph = self._clock, self._graph
        rows = clock.rows(*ADDS)
        sums = np.flatnonzero(graph.target_kind == KIND_CODE[OpKind.REDUCE_GRAD])
        ends = clock.end_of(clock.look_up(rows, sums[::-1]))  # the last of each computation comes first
        held = self._state_bytes(rows, lambda state: state.whole_gradients)
        return [Holdings(Part.GRADIENTS, graph.rank[rows], clock.starts[rows], ends, held)]

    def whole_weights(self) -> list[Holdings]:
        """Weights that are gathered for computations, where the rank keeps shards."""
        if not shards_weights(self._lowered.spec):
            return []
        clock, graph = self._clock, self._graph
        rows, releases = clock.rows(OpKind.GATHER_WEIGHT), clock.rows(OpKind.RESHARD)
        of_stage = packed(graph.rank, graph.stage)
        ends = np.full(len(rows), clock.last)
        for key in np.unique(of_stage[rows]).tolist():
            own, after = np.flatnonzero(of_stage[rows] == key), releases[of_stage[releases] == key]
            at = np.searchsorted(after, rows[own])
            ends[own[at < len(after)]] = clock.ends[after[at[at < len(after)]]]
        held = self._state_bytes(rows, lambda state: state.whole_parameters)
        return [Holdings(Part.PARAMETERS, graph.rank[rows], clock.starts[rows], ends, held)]

    def _state_bytes(self, rows: IntColumn, num_bytes: Callable[[StateBytes], int]) -> IntColumn:
        """Bytes of the states of the stage of each row on its rank."""
        graph = self._graph
        pp_of = [self._lowered.mesh.coords(rank)["pp"] for rank in graph.global_rank]
        held = {key: num_bytes(state) for key, state in self._states.items()}
        keys = zip(graph.stage[rows].tolist(), graph.rank[rows].tolist(), strict=True)
        return np.array([held[stage, pp_of[rank]] for stage, rank in keys], dtype=np.int64)

    @cached_property
    def _states(self) -> dict[tuple[int, int], StateBytes]:
        """The states by stage and pipeline rank."""
        lowered = self._lowered
        return {
            (stage, pp): state_of_stage(lowered, stage, pp)
            for stage, holders in enumerate(lowered.holders)
            for pp in holders
        }

    def _slots(self) -> dict[int, int]:
        """Bytes of each rank's slots: on each channel the plan's number of slots, sized for its largest message."""
        total: dict[int, int] = defaultdict(int)
        both = ((RECV_KINDS, self._buffers.receive_slots), (SEND_KINDS, self._buffers.send_slots))
        for kinds, num_slots in both:
            largest: dict[tuple[int, int], int] = {}
            if num_slots is None:
                continue
            rows = np.flatnonzero(self._graph.is_kind(kinds) & (self._graph.tensor != NONE))
            columns = (column[rows].tolist() for column in (self._graph.rank, self._graph.channel, self._moved))
            for rank, channel, moved in zip(*columns, strict=True):
                largest[rank, channel] = max(largest.get((rank, channel), 0), moved)
            for (rank, _), moved in largest.items():
                total[rank] += num_slots * moved
        return total

    def activations(self) -> Iterator[Holdings]:
        """Activations of each work item of each stage; none without backwards."""
        if self._forward_only:
            return
        clock, graph = self._clock, self._graph
        rows = clock.rows(*_FORWARD)
        input_row, weight_row = clock.partner(rows, *_INPUT), clock.partner(rows, *_WEIGHT)
        begins, i_begins, i_ends = clock.starts[rows], clock.start_of(input_row), clock.end_of(input_row)
        w_ends = np.maximum(clock.end_of(weight_row), i_ends)
        extent = {
            Lifetime.TO_INPUT: (begins, i_ends),
            Lifetime.TO_WEIGHT: (begins, w_ends),
            Lifetime.IN_FORWARD: (begins, clock.ends[rows]),
            Lifetime.IN_INPUT: (i_begins, i_ends),
            Lifetime.BETWEEN: (i_ends, w_ends),
        }
        entry = graph.stage[rows] * len(self._lowered.sizes) + self._variant(graph.work_item[rows])
        tables = self._tables()
        for part in (Part.ACTIVATIONS, Part.LOGITS):
            for life, (begin, end) in extent.items():
                num_bytes = tables[part, life][entry]
                if part is Part.ACTIVATIONS:
                    in_slots = np.where(self._input_lifetimes[graph.stage[rows]] == life, self._in_slots(rows), 0)
                    num_bytes = np.maximum(num_bytes - in_slots, 0)  # custom layers may keep less than their input
                freed = end
                if life in COPIED:
                    freed, reloaded = self._offloaded(rows, end)
                    yield Holdings(part, graph.rank[rows], np.minimum(reloaded, end), end, num_bytes)
                yield Holdings(part, graph.rank[rows], begin, freed, num_bytes)

    def _offloaded(self, forwards: IntColumn, end: IntColumn) -> tuple[IntColumn, IntColumn]:
        """Times at which activations leave the device and at which they are allocated again; ``end`` if they do not."""
        clock, graph = self._clock, self._graph
        frees = clock.rows(OpKind.FREE)
        freed = clock.look_up(forwards, frees[graph.target_kind[frees] == KIND_CODE[OpKind.OFFLOAD]])
        reload = clock.partner(forwards, OpKind.RELOAD)
        freed_at, reloaded_at = (np.where(rows == NONE, end, clock.starts[rows]) for rows in (freed, reload))
        return freed_at, reloaded_at

    def received(self) -> Iterator[Holdings]:
        """Buffers of receives; none with receive slots."""
        if self._buffers.receive_slots is not None:
            return
        clock = self._clock
        inputs, gradients = self._of_tensors(OpKind.RECV_FORWARD), self._of_tensors(OpKind.RECV_BACKWARD)
        yield self._message(inputs, clock.posted_at(inputs), self._input_leaves(inputs), self._moved[inputs])
        yield self._message(gradients, clock.posted_at(gradients), self._used(gradients), self._moved[gradients])

    def gathered(self) -> Iterator[Holdings]:
        """Gathered tensors, without the received slices themselves."""
        clock = self._clock
        inputs, gradients = self._of_tensors(OpKind.GATHER_FORWARD), self._of_tensors(OpKind.GATHER_BACKWARD)
        for rows, end in ((inputs, self._input_leaves(inputs)), (gradients, self._used(gradients))):
            yield self._message(rows, clock.starts[rows], end, self._whole(rows) - self._moved[rows])

    def sent(self) -> Iterator[Holdings]:
        """Sent outputs and input gradients, each counted once."""
        clock = self._clock
        for kind, makers in ((OpKind.SEND_FORWARD, _FORWARD), (OpKind.SEND_BACKWARD, _INPUT)):
            sends = self._of_tensors(kind)
            rows, arrived = self._last_arrivals(sends)
            made = clock.end_of(clock.partner(rows, *makers))
            if kind is OpKind.SEND_FORWARD:
                leaves = self._output_leaves(rows, arrived)
            else:
                leaves = made if self._buffers.send_slots is not None else arrived
            yield self._message(rows, made, leaves, self._whole(rows))

    def local(self) -> Iterator[Holdings]:
        """Tensors of direct edges, and their gradients, between stages of one rank."""
        lowered, clock = self._lowered, self._clock
        for edge in lowered.direct:
            sizes = np.array([prod(tensor.shape) * self._item_bytes(tensor) for tensor in edge.variants])
            users = [user for user in edge.consumers if lowered.holders[user] == lowered.holders[edge.producer]]
            held: list[tuple[IntColumn, IntColumn]] = []
            if users and not lowered.receivers(edge):  # otherwise it is counted as sent
                made = self._at_stage(edge.producer, *_FORWARD)
                held.append((made, np.where(self._lacks_backward(made), self._read_by(made, users), self._used(made))))
            for user in users if edge.has_gradient else ():
                back = self._at_stage(user, *_INPUT)
                held.append((back, clock.end_of(clock.look_up(back, clock.rows(*_INPUT), edge.producer))))
            for rows, leaves in held:
                num_bytes = sizes[self._variant(self._graph.work_item[rows])]
                yield self._message(rows, clock.ends[rows], leaves, num_bytes)

    def _at_stage(self, stage: int, *kinds: OpKind) -> IntColumn:
        rows = self._clock.rows(*kinds)
        return np.asarray(rows[self._graph.stage[rows] == stage])

    def _read_by(self, rows: IntColumn, stages: Sequence[int]) -> IntColumn:
        """End of the last forward of some stages on the rank and of the work item of each row; 0 without any."""
        clock = self._clock
        readers = np.stack([clock.look_up(rows, clock.rows(*_FORWARD), stage) for stage in stages])
        return np.asarray(np.where(readers == NONE, 0, clock.ends[readers]).max(axis=0))

    def _direct_reads(self, rows: IntColumn) -> IntColumn:
        """``_read_by`` of the consumers of the direct edge that each transfer moves; 0 for any other transfer."""
        ends = np.zeros(len(rows), dtype=np.int64)
        for edge in self._lowered.direct:
            is_named = np.array([tensor.member == edge.name for tensor in self._graph.tensors])
            selected = np.flatnonzero(is_named[self._graph.tensor[rows]])
            ends[selected] = self._read_by(rows[selected], edge.consumers)
        return ends

    def slices(self) -> Iterator[Holdings]:
        """Slices of tensors made for sends."""
        clock = self._clock
        for kind, send in (
            (OpKind.SLICE_FORWARD, OpKind.SEND_FORWARD),
            (OpKind.SLICE_BACKWARD, OpKind.SEND_BACKWARD),
        ):
            rows = self._of_tensors(kind)
            in_slots = self._buffers.send_slots is not None
            leaves = clock.ends[rows] if in_slots else self._arrival(clock.partner(rows, send))
            yield self._message(rows, clock.starts[rows], leaves, self._moved[rows])

    def _message(self, rows: IntColumn, begin: IntColumn, end: IntColumn, num_bytes: IntColumn) -> Holdings:
        return Holdings(Part.MESSAGES, self._graph.rank[rows], begin, np.maximum(begin, end), num_bytes)

    @cached_property
    def _forward_only(self) -> bool:
        return not len(self._clock.rows(*_INPUT, OpKind.BACKWARD_WEIGHT))

    def _lacks_backward(self, rows: IntColumn) -> BoolColumn:
        """Mask of the operations of stages without a backward: of all in an evaluation, else of frozen ones."""
        return np.asarray(self._forward_only | (self._graph.stage[rows] < self._lowered.spec.first_trained))

    def _of_tensors(self, kind: OpKind) -> IntColumn:
        rows = self._clock.rows(kind)
        return np.asarray(rows[self._graph.tensor[rows] != NONE])

    def _whole(self, rows: IntColumn) -> IntColumn:
        """Bytes of the whole tensors that these operations name."""
        return np.asarray(self._bytes[self._graph.tensor[rows]])

    def _is_kept(self, rows: IntColumn) -> BoolColumn:
        """Mask of the inputs that the first layer keeps: the first tensor of the boundary."""
        lowered, tensor = self._lowered, self._graph.tensor[rows]
        transport = lowered.spec.transport
        firsts = (edge.variants[0] for edge in lowered.edges)
        first = ["", *(message_name(members, transport) if members else "" for members in firsts)]
        names = sorted({tensor.member for tensor in self._graph.tensors} | set(first))
        kept = [
            NONE if lifetime is None else names.index(member)
            for member, lifetime in zip(first, self._input_lifetimes.tolist(), strict=True)
        ]
        member_of = np.array([names.index(t.member) for t in self._graph.tensors] or [NONE])
        return np.asarray(np.array(kept)[self._graph.stage[rows]] == member_of[tensor])

    @cached_property
    def _input_lifetimes(self) -> NDArray[np.object_]:
        """Lifetime by stage of the inputs that the first layers keep, or None."""
        lowered = self._lowered
        lifetimes = [input_lifetime(lowered.spec, lowered.layers_of(stage)) for stage in range(len(lowered.stages))]
        return np.array(lifetimes, dtype=object)

    def _input_leaves(self, rows: IntColumn) -> IntColumn:
        """Time until which a received input is counted as a message."""
        clock = self._clock
        forward = clock.partner(rows, *_FORWARD)
        used = np.where(self._is_kept(rows), clock.start_of(forward), self._used(rows))
        return np.where(self._lacks_backward(rows), np.maximum(clock.end_of(forward), self._direct_reads(rows)), used)

    def _used(self, rows: IntColumn) -> IntColumn:
        """End of the I or B of each operation's work item."""
        return self._clock.end_of(self._clock.partner(rows, *_INPUT))

    def _in_slots(self, forwards: IntColumn) -> IntColumn:
        """Bytes that the first layer of each forward keeps in a receive slot."""
        num_bytes = np.zeros(len(forwards), dtype=np.int64)
        if self._buffers.receive_slots is None:
            return num_bytes
        receives = self._of_tensors(OpKind.RECV_FORWARD)
        forward = self._clock.partner(receives, *_FORWARD)
        kept = self._is_kept(receives) & (forward != NONE)
        np.add.at(num_bytes, np.searchsorted(forwards, forward[kept]), self._moved[receives[kept]])
        return num_bytes

    def _output_leaves(self, rows: IntColumn, arrived: IntColumn) -> IntColumn:
        """Time at which the output of a stage is freed."""
        if self._forward_only:
            return np.maximum(arrived, self._direct_reads(rows))
        clock, graph = self._clock, self._graph
        frees = clock.rows(OpKind.FREE)
        sent = [KIND_CODE[OpKind.SEND_FORWARD], KIND_CODE[OpKind.SLICE_FORWARD]]
        freed = clock.look_up(rows, frees[np.isin(graph.target_kind[frees], sent)])
        until = np.where(freed == NONE, clock.end_of(clock.partner(rows, *_INPUT)), clock.starts[freed])
        lacks_backward = self._lacks_backward(rows)
        if not lacks_backward.any():
            return until
        waits = np.flatnonzero(np.isin(graph.waits_for, rows))
        awaited = np.full(graph.num_ops, NONE, dtype=np.int64)
        awaited[graph.waits_for[waits]] = waits  # a frozen stage waits for its sends at the end of the step
        return np.where(lacks_backward, clock.end_of(awaited[rows]), until)

    def _arrival(self, sends: IntColumn) -> IntColumn:
        """Arrival of each sent tensor; the end of the step if it never arrives."""
        match = np.where(sends == NONE, NONE, self._graph.match[sends])
        return self._clock.end_of(match)

    def _last_arrivals(self, sends: IntColumn) -> tuple[IntColumn, IntColumn]:
        """One send of each tensor of a work item, and the arrival of the last send of that tensor."""
        if not len(sends):
            return sends, sends
        graph = self._graph
        key = packed(*(column[sends] for column in (graph.rank, graph.stage, graph.work_item, graph.tensor)))
        order = np.argsort(key, kind="stable")
        begins = np.flatnonzero(np.diff(key[order], prepend=NONE - 1))
        return sends[order[begins]], np.maximum.reduceat(self._arrival(sends)[order], begins)

    def _variant(self, work_item: IntColumn) -> IntColumn:
        """Index of the size of each work item."""
        by_work_item = self._lowered.size_of_work_item
        return np.array(by_work_item, dtype=np.int64)[work_item] if by_work_item else np.zeros_like(work_item)

    def _tables(self) -> dict[tuple[Part, Lifetime], IntColumn]:
        """Bytes by stage and size of the work item, flattened."""
        lowered = self._lowered
        cached: dict[tuple[tuple[str, ...], int], tuple[StoredActivation, ...]] = {}
        items = []
        for stage, names in enumerate(lowered.stages):
            kinds = tuple(layer_kind(lowered.spec.model, name) for name in names)
            for size in range(len(lowered.sizes)):
                if (kinds, size) not in cached:  # stages of equal layers hold the same activations
                    cached[kinds, size] = stage_holdings(lowered, stage, size)
                items.append(cached[kinds, size])
        tables = {}
        for part in (Part.ACTIVATIONS, Part.LOGITS):
            for lifetime in Lifetime:
                is_logits = part is Part.LOGITS
                num_bytes = [
                    ceil(sum(h.num_bytes for h in item if h.lifetime is lifetime and h.is_logits is is_logits))
                    for item in items
                ]
                tables[part, lifetime] = np.array(num_bytes, dtype=np.int64)
        return tables
