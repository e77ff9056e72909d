"""The memory of a simulated step, rank by rank.

- Weights, their gradients, optimizer states, the user's overhead and the slots
  of messages are there all along.
- Activations come with F's start and go as ``stages.describe.memory`` says.
- An input that is received takes room from its post on. At F's start it
  becomes what the first layer keeps, and is counted there. Other tensors of
  the same boundary stay until I has run, and so do gradients that are received.
- An output that is sent takes room from F's end until it is given back: with
  the backward, or at the FREE that the plan has. The gradient of an input goes
  when it has arrived. Both are counted once, whoever they are sent to; slices
  are counted besides, until they have arrived.
- Receive slots hold the inputs that the layers keep. What goes through send
  slots has left the tensor as soon as it is posted.

A step without backwards keeps no activations; in another one, a unit of work
that lacks its backward keeps them to the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from math import ceil

import numpy as np

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.ops import KIND_CODE, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.sim.memory.curve import GIB, MemoryCurve, Part
from pipeproof.sim.memory.holdings import Clock, Holdings, curves_of
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.stages.describe.layers import layer_kind
from pipeproof.stages.describe.memory import Held, Life, activations_of, keeps_input
from pipeproof.stages.describe.own_layers import own_activations
from pipeproof.stages.describe.state import memory_dtype, state_of_weights

_FORWARD = (OpKind.FORWARD,)
_INPUT = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
_WEIGHT = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)


def memory_of(
    lowered: LoweredPlan, starts: Sequence[int | None] | IntColumn, ends: Sequence[int | None] | IntColumn, ticks: int
) -> tuple[MemoryCurve, ...]:
    """The curve of each rank of the plan's graph; ``ticks`` are those of a microsecond.

    ``starts`` and ``ends`` are those of each operation of a step that has come
    to its end. Linear in operations, but for sorting.
    """
    step = _Step(lowered, Clock(lowered.graph, *(np.array(times, dtype=np.int64) for times in (starts, ends))))
    holdings = [*step.activations(), *step.received(), *step.gathered(), *step.sent(), *step.slices()]
    return curves_of(step.lasting(), holdings, ticks)


def stage_holdings(lowered: LoweredPlan, stage: int, variant: int = 0) -> tuple[Held, ...]:
    """What one unit of work of a stage keeps, by operation."""
    if lowered.spec.own_layers is not None:
        return own_activations(lowered.spec, lowered.stages[stage])
    return activations_of(lowered.spec, lowered.layers_of(stage), lowered.sizes[variant])


class _Step:
    def __init__(self, lowered: LoweredPlan, clock: Clock) -> None:
        self._lowered, self._clock, self._graph = lowered, clock, lowered.graph
        self._buffers = lowered.spec.buffers
        graph, item = self._graph, dtype_bytes(memory_dtype(lowered.spec))
        self._item = np.array(  # the model's own tensors are of the type that memory is counted in
            [item if t.dtype == lowered.spec.run.dtype else dtype_bytes(t.dtype) for t in graph.tensors] or [0]
        )
        self._numel = np.array([tensor.numel for tensor in graph.tensors] or [0])
        self._moved = (graph.stop - graph.start) * self._item[graph.tensor]

    def lasting(self) -> list[dict[Part, int]]:
        """What each rank has all along."""
        lowered, graph = self._lowered, self._graph
        overhead = int(lowered.spec.memory.overhead_gib * GIB)
        states = {
            (stage, pp): state_of_weights(lowered.spec, lowered.weights_of(stage, pp))
            for stage, holders in enumerate(lowered.holders)
            for pp in holders
        }
        slots = self._slots()
        found = []
        for rank, global_rank in enumerate(graph.global_rank):
            pp = lowered.mesh.coords(global_rank)["pp"]
            mine = [state for (_, holder), state in states.items() if holder == pp]
            found.append(
                {
                    Part.PARAMETERS: sum(state.parameters for state in mine),
                    Part.GRADIENTS: sum(state.gradients for state in mine),
                    Part.OPTIMIZER: sum(state.optimizer for state in mine),
                    Part.MESSAGES: slots[rank],
                    Part.OVERHEAD: overhead,
                }
            )
        return found

    def _slots(self) -> dict[int, int]:
        """Bytes of each rank's slots: on each channel as many as the plan says, of its largest message."""
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

    def activations(self) -> list[Holdings]:
        """What each unit of work of each stage keeps; nothing where there is no backward."""
        if self._forward_only:
            return []
        clock, graph = self._clock, self._graph
        rows = clock.rows(*_FORWARD)
        input_row, weight_row = clock.beside(rows, *_INPUT), clock.beside(rows, *_WEIGHT)
        begins, i_begins, i_ends = clock.starts[rows], clock.start_of(input_row), clock.end_of(input_row)
        w_ends = np.maximum(clock.end_of(weight_row), i_ends)
        extent = {
            Life.TO_INPUT: (begins, i_ends),
            Life.TO_WEIGHT: (begins, w_ends),
            Life.IN_INPUT: (i_begins, i_ends),
            Life.BETWEEN: (i_ends, w_ends),
        }
        place = graph.stage[rows] * len(self._lowered.sizes) + self._variant(graph.unit[rows])
        tables = self._tables()
        found = []
        for part in (Part.ACTIVATIONS, Part.LOGITS):
            for life, (begin, end) in extent.items():
                num_bytes = tables[part, life][place]
                if (part, life) == (Part.ACTIVATIONS, Life.TO_WEIGHT):
                    num_bytes = num_bytes - self._in_slots(rows)
                found.append(Holdings(part, graph.rank[rows], begin, end, num_bytes))
        return found

    def received(self) -> list[Holdings]:
        """What receives write to, where that are no slots."""
        if self._buffers.receive_slots is not None:
            return []
        clock = self._clock
        inputs, gradients = self._of_tensors(OpKind.RECV_FORWARD), self._of_tensors(OpKind.RECV_BACKWARD)
        return [
            self._message(inputs, clock.posted_at(inputs), self._input_leaves(inputs), self._moved[inputs]),
            self._message(gradients, clock.posted_at(gradients), self._used(gradients), self._moved[gradients]),
        ]

    def gathered(self) -> list[Holdings]:
        """What gathers make of received slices, beside these."""
        clock = self._clock
        inputs, gradients = self._of_tensors(OpKind.GATHER_FORWARD), self._of_tensors(OpKind.GATHER_BACKWARD)
        return [
            self._message(rows, clock.starts[rows], end, self._whole(rows) - self._moved[rows])
            for rows, end in (
                (inputs, self._input_leaves(inputs)),
                (gradients, self._used(gradients)),
            )
        ]

    def sent(self) -> list[Holdings]:
        """Outputs and gradients of inputs that are sent on, each once."""
        clock, found = self._clock, []
        for kind, makers in ((OpKind.SEND_FORWARD, _FORWARD), (OpKind.SEND_BACKWARD, _INPUT)):
            sends = self._of_tensors(kind)
            rows, arrived = self._last_arrivals(sends)
            made = clock.end_of(clock.beside(rows, *makers))
            if kind is OpKind.SEND_FORWARD:
                leaves = self._output_leaves(rows, arrived)
            else:
                leaves = made if self._buffers.send_slots is not None else arrived
            found.append(self._message(rows, made, leaves, self._whole(rows)))
        return found

    def slices(self) -> list[Holdings]:
        """Parts of tensors that are cut out to be sent."""
        clock, found = self._clock, []
        for kind, send in (
            (OpKind.SLICE_FORWARD, OpKind.SEND_FORWARD),
            (OpKind.SLICE_BACKWARD, OpKind.SEND_BACKWARD),
        ):
            rows = self._of_tensors(kind)
            in_slots = self._buffers.send_slots is not None
            leaves = clock.ends[rows] if in_slots else self._arrival(clock.beside(rows, send))
            found.append(self._message(rows, clock.starts[rows], leaves, self._moved[rows]))
        return found

    def _message(self, rows: IntColumn, begin: IntColumn, end: IntColumn, num_bytes: IntColumn) -> Holdings:
        return Holdings(Part.MESSAGES, self._graph.rank[rows], begin, np.maximum(begin, end), num_bytes)

    @cached_property
    def _forward_only(self) -> bool:
        return not len(self._clock.rows(*_INPUT, OpKind.BACKWARD_WEIGHT))

    def _of_tensors(self, kind: OpKind) -> IntColumn:
        """The operations of a kind that are about a tensor."""
        rows = self._clock.rows(kind)
        return np.asarray(rows[self._graph.tensor[rows] != NONE])

    def _whole(self, rows: IntColumn) -> IntColumn:
        """Bytes of the whole tensors that these operations are about."""
        tensor = self._graph.tensor[rows]
        return np.asarray(self._numel[tensor] * self._item[tensor])

    def _is_kept(self, rows: IntColumn) -> BoolColumn:
        """Which inputs are what the first layer keeps: the first tensor of the boundary."""
        lowered, tensor = self._lowered, self._graph.tensor[rows]
        first = ["", *(edge.variants[0][0].member if edge.variants[0] else "" for edge in lowered.edges)]
        names = sorted({tensor.member for tensor in self._graph.tensors} | set(first))
        kept = [
            names.index(member) if keeps_input(lowered.spec, lowered.layers_of(stage)) else NONE
            for stage, member in enumerate(first)
        ]
        member_of = np.array([names.index(t.member) for t in self._graph.tensors] or [NONE])
        return np.asarray(np.array(kept)[self._graph.stage[rows]] == member_of[tensor])

    def _input_leaves(self, rows: IntColumn) -> IntColumn:
        """Until when a received input is counted among messages."""
        clock = self._clock
        forward = clock.beside(rows, *_FORWARD)
        if self._forward_only:
            return clock.end_of(forward)
        return np.where(self._is_kept(rows), clock.start_of(forward), self._used(rows))

    def _used(self, rows: IntColumn) -> IntColumn:
        """When the I, or whole backward, of each operation's unit of work is done."""
        return self._clock.end_of(self._clock.beside(rows, *_INPUT))

    def _in_slots(self, forwards: IntColumn) -> IntColumn:
        """Bytes of what each forward's first layer keeps in a slot."""
        found = np.zeros(len(forwards), dtype=np.int64)
        if self._buffers.receive_slots is None:
            return found
        receives = self._of_tensors(OpKind.RECV_FORWARD)
        forward = self._clock.beside(receives, *_FORWARD)
        mine = self._is_kept(receives) & (forward != NONE)
        np.add.at(found, np.searchsorted(forwards, forward[mine]), self._moved[receives[mine]])
        return found

    def _output_leaves(self, rows: IntColumn, arrived: IntColumn) -> IntColumn:
        """When the output of a stage is given back."""
        clock, graph = self._clock, self._graph
        if self._forward_only:
            return arrived
        frees = clock.rows(OpKind.FREE)
        mine = [KIND_CODE[OpKind.SEND_FORWARD], KIND_CODE[OpKind.SLICE_FORWARD]]
        freed = clock.found(rows, frees[np.isin(graph.target_kind[frees], mine)])
        return np.where(freed == NONE, clock.end_of(clock.beside(rows, *_INPUT)), clock.starts[freed])

    def _arrival(self, sends: IntColumn) -> IntColumn:
        """When what is sent has arrived; the end of the step where it never does."""
        match = np.where(sends == NONE, NONE, self._graph.match[sends])
        return self._clock.end_of(match)

    def _last_arrivals(self, sends: IntColumn) -> tuple[IntColumn, IntColumn]:
        """One of the sends of each tensor of a unit of work, and when the last of them has arrived."""
        if not len(sends):
            return sends, sends
        graph = self._graph
        key = packed(*(column[sends] for column in (graph.rank, graph.stage, graph.unit, graph.tensor)))
        order = np.argsort(key, kind="stable")
        begins = np.flatnonzero(np.diff(key[order], prepend=NONE - 1))
        return sends[order[begins]], np.maximum.reduceat(self._arrival(sends)[order], begins)

    def _variant(self, unit: IntColumn) -> IntColumn:
        """Which size each unit of work has."""
        by_unit = self._lowered.size_of_unit
        return np.array(by_unit, dtype=np.int64)[unit] if by_unit else np.zeros_like(unit)

    def _tables(self) -> dict[tuple[Part, Life], IntColumn]:
        """Bytes by stage and size of unit, one number after the other."""
        lowered = self._lowered
        known: dict[tuple[tuple[str, ...], int], tuple[Held, ...]] = {}
        units = []
        for stage, names in enumerate(lowered.stages):
            kinds = tuple(layer_kind(lowered.spec.model, name) for name in names)
            for size in range(len(lowered.sizes)):
                if (kinds, size) not in known:  # stages of equal layers hold the same
                    known[kinds, size] = stage_holdings(lowered, stage, size)
                units.append(known[kinds, size])
        tables = {}
        for part in (Part.ACTIVATIONS, Part.LOGITS):
            for life in Life:
                mine = [
                    ceil(sum(h.num_bytes for h in unit if h.life is life and h.is_logits is (part is Part.LOGITS)))
                    for unit in units
                ]
                tables[part, life] = np.array(mine, dtype=np.int64)
        return tables
