"""Messages of a rehearsal: posted like those of a run, with elements that identify their origin, and read on arrival.

Slices of the partial transport are copied and joined on the host, unless the backend moves slices itself; the gather
that joins them is real. A stage does not pass received tensors on: each sender makes its boundary tensor anew, so a
wrong message is found at its receiver and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from pipeproof.exec.rank.framework_protocol import Arrays, Channels, Collectives, Tensor
from pipeproof.exec.rank.message_buffers import Slice, SliceCollectives, whole_of
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.exec.rank.transfers import RankTransfers
from pipeproof.exec.rehearse.element_identity import Bytes, FoundRange, Source, found_ranges
from pipeproof.exec.rehearse.rehearsal_faults import ArrivalChecks, ArrivalFault
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.verify.delivered import Layouts, places_of
from pipeproof.verify.provenance import DATA_SENDS, Delivery, Segment, events
from pipeproof.verify.subject import Subject

_Reader = tuple[int, int, bool]
"""Reader of boundary tensors: a stage, a work item, and whether its forward."""


class RehearsalTransfers(RankTransfers):
    """Messages of one rank. ``step`` is the current step."""

    def __init__(self, subject: Subject, rank: int, channels: Channels, arrays: Arrays, checked: ArrivalChecks) -> None:
        super().__init__(subject.plan, rank, channels, arrays)
        self._subject, self._graph, self._rank, self._checked = subject, subject.graph, rank, checked
        places = places_of(subject)
        self._layouts = Layouts(subject, places)
        self._deliveries: dict[_Reader, list[Delivery]] = {}
        self._gathered: set[int] = set()
        """Receives whose slices have been joined."""
        delivered = events(self._graph, places)
        row = np.where(delivered.receive == NONE, delivered.gather, delivered.receive)
        event = np.repeat(np.arange(len(delivered.classes)), np.diff(delivered.offsets))
        for index in np.unique(event[self._graph.rank[row] == rank]).tolist():
            for delivery in delivered.deliveries(index):
                if self._graph.rank[delivery.receive] == rank:
                    self._deliveries.setdefault(self._reader(delivery.receive), []).append(delivery)
        self.step = -1
        self._buffers: dict[int, Tensor | Slice] = {}
        """Buffers of transfers under way, and of receives that are read again."""
        self._ranges: dict[int, tuple[FoundRange, ...]] = {}
        self._received: dict[tuple[_Reader, int], list[int]] = {}
        """Finished receives, by their reader and tensor."""

    def begin(self) -> None:
        """Begin a step: drop all buffers, and start with the first slots."""
        super().begin()
        for held in (self._buffers, self._ranges, self._received, self._gathered):
            held.clear()

    def post(self, op_id: int) -> None:
        """Start a transfer of this rank's elements, or into zeros."""
        message, order = self._message(op_id), self._order(op_id)
        by_backend = message.is_slice and self._slicing is not None
        start, stop = (0, prod(message.shape)) if by_backend else (message.start, message.stop)
        count, pool = stop - start, (order.channel, message.is_forward)
        slots = self._send_slots if message.is_send else self._receive_slots
        buffer: Tensor | Slice
        if message.is_send:
            content = self._source(op_id, self.step).content(start, stop, message.dtype)
        else:
            content = np.zeros(count * dtype_bytes(message.dtype), dtype=np.uint8)
        if by_backend:
            buffer = message.slice_of(self._arrays.from_bytes(content, [count], message.dtype))
        elif slots is None:
            buffer = self._arrays.from_bytes(content, [count], message.dtype)
        else:
            buffer = slots.take(pool, [count], message.dtype)
            if message.is_send:
                self._arrays.copy_into(buffer, self._arrays.from_bytes(content, [count], message.dtype))
        self._buffers[op_id] = buffer
        self._post(op_id, order, buffer)

    def wait(self, step: int, op_id: int) -> LogEntry:
        """Block until a transfer is done, and check the elements of a receive."""
        entry = super().wait(step, op_id)
        target = int(self._graph.waits_for[op_id])
        message = self._message(target)
        if message.is_send:
            del self._buffers[target]
            return entry
        self._ranges[target] = self._read(target)
        self._checked.messages += 1
        key = self._reader(target), int(self._graph.tensor[target])
        self._received.setdefault(key, []).append(target)
        if self._receive_slots is None and not message.is_slice:
            del self._buffers[target]
        return entry

    def gathered(self, op_id: int, collectives: Collectives) -> Tensor | Slice:
        """Join the slices that all TP ranks received, check the result, and return this rank's slice."""
        message = self._message(op_id)
        of_tensor = [d for d in self._deliveries[self._reader(op_id)] if self._tensor(d) == self._graph.tensor[op_id]]
        (delivery,) = of_tensor
        part = self._buffers.pop(delivery.receive)
        if isinstance(part, Slice):
            assert isinstance(collectives, SliceCollectives)
            content = self._arrays.to_bytes(collectives.gather_slices(part))
        else:
            content = self._arrays.to_bytes(collectives.all_gather(part, 0))
        send = int(self._graph.match[delivery.receive])
        expected = [
            FoundRange(
                segment.start, segment.stop, self._source(send, self.step, segment.source_rank), segment.source_start
            )
            for segment in delivery.segments
        ]
        where = f"tp ranks {', '.join(map(str, collectives.ranks))}"
        self._ranges[delivery.receive] = self._compared(op_id, where, content, message.dtype, expected)
        self._gathered.add(delivery.receive)
        return part

    def consume(self, op_id: int) -> None:
        """Check the input of a computation: its layout on this rank, and that slots still have the same elements."""
        graph, kind = self._graph, self._graph.ops[op_id].kind
        stage_and_item = int(graph.stage[op_id]), int(graph.work_item[op_id])
        if self._receive_slots is not None:
            for forward in (True, False) if kind is not OpKind.FORWARD else (True,):
                self._read_again((*stage_and_item, forward), str(graph.ops[op_id]))
        if kind is OpKind.BACKWARD_WEIGHT:
            return
        reader = (*stage_and_item, kind is OpKind.FORWARD)
        for delivery in self._deliveries.get(reader, ()):
            receives = self._received.get((reader, self._tensor(delivery)), [])
            offsets = [int(graph.start[receive]) for receive in receives]
            if delivery.receive in self._gathered:
                receives, offsets = [delivery.receive], [0]
            ranges = [
                replace(part, start=part.start + offset, stop=part.stop + offset)
                for offset, receive in zip(offsets, receives, strict=True)
                for part in self._ranges[receive]
            ]
            self._require_layout(delivery, ranges)

    def _read_again(self, reader: _Reader, op: str) -> None:
        """Check that slots still have the same message when its last reader reads it."""
        for delivery in self._deliveries.get(reader, ()):
            for receive in self._received.get((reader, self._tensor(delivery)), ()):
                if receive in self._buffers:
                    self._ranges[receive] = self._read(receive, f"when {op} reads it, ")

    def _copy_range(self, message: object, buffer: Tensor | Slice) -> None:
        """Do nothing: received ranges are joined by their identities only."""

    def _read(self, receive: int, when: str = "") -> tuple[FoundRange, ...]:
        graph, message = self._graph, self._message(receive)
        send = int(graph.match[receive])
        expected = FoundRange(0, message.stop - message.start, self._source(send, self.step), int(graph.start[send]))
        tensor, num_slices = whole_of(self._buffers[receive])
        content = self._arrays.to_bytes(tensor)
        if num_slices > 1:
            size = dtype_bytes(message.dtype)
            content = content[message.start * size : message.stop * size]
        return self._compared(
            receive, str(graph.channels[int(graph.channel[receive])]), content, message.dtype, [expected], when
        )

    def _compared(
        self, op_id: int, where: str, content: Bytes, dtype: str, expected: Sequence[FoundRange], when: str = ""
    ) -> tuple[FoundRange, ...]:
        assert expected[0].source is not None
        nearest = expected[0].source
        found = found_ranges(content, dtype, expected, lambda: self._others(nearest))
        self._checked.elements += expected[-1].stop
        if fact := difference(expected, found):
            self._checked.add_fault(
                ArrivalFault(self._rank, self.step, str(self._graph.ops[op_id]), op_id, where, when + fact)
            )
        return found

    def _require_layout(self, delivery: Delivery, ranges: Sequence[FoundRange]) -> None:
        """Check the arrived elements against the receiver's layout, if they are of the correct tensor."""
        graph, send = self._graph, int(self._graph.match[delivery.receive])
        tensor = self._source(send, self.step).key[:-1]
        segments = [
            Segment(part.start, part.stop, part.source.rank, part.source_start)
            for part in ranges
            if part.source is not None and part.source.key[:-1] == tensor
        ]
        if len(segments) < len(ranges):
            return  # reported on arrival
        ordered = tuple(sorted(segments, key=lambda segment: segment.start))
        loss = self._layouts.loss(replace(delivery, segments=ordered))
        if loss is None:
            return
        op = graph.ops[delivery.receive]
        direction = "forward" if op.is_forward else "backward"
        self._checked.add_fault(
            ArrivalFault(
                self._rank,
                self.step,
                str(op),
                delivery.receive,
                f"boundary {graph.ops[send].stage}->{op.stage}, {direction}",
                "",
                int(graph.work_item[delivery.receive]),
                loss.num_elements,
                loss.lost,
                loss.foreign,
            )
        )

    def _reader(self, op_id: int) -> _Reader:
        return int(self._graph.stage[op_id]), int(self._graph.work_item[op_id]), self._graph.ops[op_id].is_forward

    def _tensor(self, delivery: Delivery) -> int:
        return int(self._graph.tensor[delivery.receive])

    def _source(self, send: int, step: int, rank: int | None = None) -> Source:
        """Tensor that a send moves, or the tensor of another ``rank`` in its place."""
        graph = self._graph
        tensor, holder = int(graph.tensor[send]), int(graph.rank[send]) if rank is None else rank
        key = step, int(graph.work_item[send]), tensor, holder
        return Source(key, holder, graph.tensors[tensor].numel, f"{graph.ops[send]} of rank {holder}, step {step}")

    def _others(self, nearest: Source) -> Iterable[Source]:
        """All tensors sent in this step or the previous one, those most similar to ``nearest`` first."""
        sends = np.flatnonzero(self._graph.is_kind(DATA_SENDS)).tolist()
        steps = [step for step in (self.step, self.step - 1) if step >= 0]
        sources = dict.fromkeys(self._source(send, step) for step in steps for send in sends)
        return sorted(sources, key=lambda s: [a != b for a, b in zip(s.key[::-1], nearest.key[::-1], strict=True)])


def difference(expected: Sequence[FoundRange], found: Sequence[FoundRange]) -> str | None:
    """Text on the first range that is not the expected one; None if there is none."""
    for part in found:
        planned = next(e for e in expected if e.start <= part.start < e.stop)
        offset = part.start - planned.start
        if part.source != planned.source or part.source_start != planned.source_start + offset:
            right = replace(planned, start=part.start, stop=part.stop, source_start=planned.source_start + offset)
            return f"elements {part.start}..{part.stop} are {part.text}; expected are {right.text}"
    return None
