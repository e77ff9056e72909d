"""Messages of a rehearsal: posted as those of a run, with elements that say where they come from; read on arrival.

Slices of the partial transport are cut, and put together, on the host, but where
the backend itself moves ranges of tensors; the gather that joins them is real.
Nothing is handed from what a stage receives to what it sends: each boundary
tensor is made anew by its sender, so that a message that went wrong is found
where it went wrong, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from pipeproof.exec.framework import Arrays, Channels, Collectives, Tensor
from pipeproof.exec.oplog import LogEntry
from pipeproof.exec.rehearse.arrivals import Piece, pieces_of
from pipeproof.exec.rehearse.faults import Checked, Fault
from pipeproof.exec.rehearse.identity import Bytes, Source
from pipeproof.exec.slices import Slice, SliceCollectives, whole_of
from pipeproof.exec.transfers import RankTransfers
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import NONE
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.verify.delivered import Layouts, places_of
from pipeproof.verify.provenance import DATA_SENDS, Delivery, Segment, events
from pipeproof.verify.subject import Subject

_Reader = tuple[int, int, bool]
"""What reads boundary tensors: a stage, a unit of work, and whether its forward."""


class RehearsedTransfers(RankTransfers):
    """The messages of one rank. ``step`` is the step that runs."""

    def __init__(self, subject: Subject, rank: int, channels: Channels, arrays: Arrays, checked: Checked) -> None:
        super().__init__(subject.plan, rank, channels, arrays)
        self._subject, self._graph, self._rank, self._checked = subject, subject.graph, rank, checked
        places = places_of(subject)
        self._layouts = Layouts(subject, places)
        self._deliveries: dict[_Reader, list[Delivery]] = {}
        self._gathered: set[int] = set()
        """Receives whose slices were joined."""
        found = events(self._graph, places)
        row = np.where(found.receive == NONE, found.gather, found.receive)
        event = np.repeat(np.arange(len(found.classes)), np.diff(found.offsets))
        for one in np.unique(event[self._graph.rank[row] == rank]).tolist():
            for delivery in found.deliveries(one):
                if self._graph.rank[delivery.receive] == rank:
                    self._deliveries.setdefault(self._reader(delivery.receive), []).append(delivery)
        self.step = -1
        self._buffers: dict[int, Tensor | Slice] = {}
        """Of transfers under way, and of receives that are read once more."""
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._received: dict[tuple[_Reader, int], list[int]] = {}
        """By what reads them and their tensor, the receives that are done."""

    def begin(self) -> None:
        """A step starts: nothing is held, and slots are taken from the first again."""
        super().begin()
        for held in (self._buffers, self._pieces, self._received, self._gathered):
            held.clear()

    def post(self, op_id: int) -> None:
        """Begin a transfer: of this rank's own elements, or into zeros."""
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
        """Block until a transfer is done, and read what a receive brought."""
        entry = super().wait(step, op_id)
        target = int(self._graph.waits_for[op_id])
        message = self._message(target)
        if message.is_send:
            del self._buffers[target]
            return entry
        self._pieces[target] = self._read(target)
        self._checked.messages += 1
        key = self._reader(target), int(self._graph.tensor[target])
        self._received.setdefault(key, []).append(target)
        if self._receive_slots is None and not message.is_slice:
            del self._buffers[target]
        return entry

    def gathered(self, op_id: int, collectives: Collectives) -> Tensor | Slice:
        """Join the slices that all TP ranks received, and read what came; this rank's slice."""
        message = self._message(op_id)
        of_tensor = [d for d in self._deliveries[self._reader(op_id)] if self._tensor(d) == self._graph.tensor[op_id]]
        (delivery,) = of_tensor
        own = self._buffers.pop(delivery.receive)
        if isinstance(own, Slice):
            assert isinstance(collectives, SliceCollectives)
            content = self._arrays.to_bytes(collectives.gather_slices(own))
        else:
            content = self._arrays.to_bytes(collectives.all_gather(own, 0))
        send = int(self._graph.match[delivery.receive])
        wanted = [
            Piece(one.start, one.stop, self._source(send, self.step, one.source_rank), one.source_start)
            for one in delivery.segments
        ]
        where = f"tp ranks {', '.join(map(str, collectives.ranks))}"
        found = self._compared(op_id, where, content, message.dtype, wanted)
        self._gathered.add(delivery.receive)
        self._pieces[delivery.receive] = found
        return own

    def consume(self, op_id: int) -> None:
        """A computation reads what it was sent: as this rank's layout promises, and, in a slot, still the same."""
        graph, kind = self._graph, self._graph.ops[op_id].kind
        here = int(graph.stage[op_id]), int(graph.unit[op_id])
        if self._receive_slots is not None:
            for forward in (True, False) if kind is not OpKind.FORWARD else (True,):
                self._read_again((*here, forward), str(graph.ops[op_id]))
        if kind is OpKind.BACKWARD_WEIGHT:
            return
        reader = (*here, kind is OpKind.FORWARD)
        for delivery in self._deliveries.get(reader, ()):
            receives = self._received.get((reader, self._tensor(delivery)), [])
            by = [int(graph.start[receive]) for receive in receives]
            if delivery.receive in self._gathered:
                receives, by = [delivery.receive], [0]
            pieces = [
                replace(piece, start=piece.start + start, stop=piece.stop + start)
                for start, receive in zip(by, receives, strict=True)
                for piece in self._pieces[receive]
            ]
            self._require_layout(delivery, pieces)

    def _read_again(self, reader: _Reader, op: str) -> None:
        """What lies in slots until its last reader is not to be another message's by then."""
        for delivery in self._deliveries.get(reader, ()):
            for receive in self._received.get((reader, self._tensor(delivery)), ()):
                if receive in self._buffers:
                    self._pieces[receive] = self._read(receive, f"when {op} reads it, ")

    def _put_in_place(self, message: object, buffer: Tensor | Slice) -> None:
        """Ranges stay where they came: what they make is put together by their identities alone."""

    def _read(self, receive: int, when: str = "") -> tuple[Piece, ...]:
        graph, message = self._graph, self._message(receive)
        send = int(graph.match[receive])
        wanted = Piece(0, message.stop - message.start, self._source(send, self.step), int(graph.start[send]))
        tensor, num_slices = whole_of(self._buffers[receive])
        content = self._arrays.to_bytes(tensor)
        if num_slices > 1:
            size = dtype_bytes(message.dtype)
            content = content[message.start * size : message.stop * size]
        return self._compared(
            receive, str(graph.channels[int(graph.channel[receive])]), content, message.dtype, [wanted], when
        )

    def _compared(
        self, op_id: int, where: str, content: Bytes, dtype: str, wanted: Sequence[Piece], when: str = ""
    ) -> tuple[Piece, ...]:
        assert wanted[0].source is not None
        nearest = wanted[0].source
        found = pieces_of(content, dtype, wanted, lambda: self._others(nearest))
        self._checked.elements += wanted[-1].stop
        if fact := difference(wanted, found):
            self._checked.blame(Fault(self._rank, self.step, str(self._graph.ops[op_id]), op_id, where, when + fact))
        return found

    def _require_layout(self, delivery: Delivery, pieces: Sequence[Piece]) -> None:
        """Hold the real elements against the receiver's layout, where they are of the right tensor at all."""
        graph, send = self._graph, int(self._graph.match[delivery.receive])
        tensor = self._source(send, self.step).key[:-1]
        segments = [
            Segment(piece.start, piece.stop, piece.source.rank, piece.source_start)
            for piece in pieces
            if piece.source is not None and piece.source.key[:-1] == tensor
        ]
        if len(segments) < len(pieces):
            return  # told on arrival
        ordered = tuple(sorted(segments, key=lambda one: one.start))
        loss = self._layouts.loss(replace(delivery, segments=ordered))
        if loss is None:
            return
        op = graph.ops[delivery.receive]
        direction = "forward" if op.is_forward else "backward"
        self._checked.blame(
            Fault(
                self._rank,
                self.step,
                str(op),
                delivery.receive,
                f"boundary {graph.ops[send].stage}->{op.stage}, {direction}",
                "",
                int(graph.unit[delivery.receive]),
                loss.num_elements,
                loss.lost,
                loss.foreign,
            )
        )

    def _reader(self, op_id: int) -> _Reader:
        return int(self._graph.stage[op_id]), int(self._graph.unit[op_id]), self._graph.ops[op_id].is_forward

    def _tensor(self, delivery: Delivery) -> int:
        return int(self._graph.tensor[delivery.receive])

    def _source(self, send: int, step: int, rank: int | None = None) -> Source:
        """The tensor that a send moves, or what another ``rank`` has in its place."""
        graph = self._graph
        tensor, holder = int(graph.tensor[send]), int(graph.rank[send]) if rank is None else rank
        key = step, int(graph.unit[send]), tensor, holder
        return Source(key, holder, graph.tensors[tensor].numel, f"{graph.ops[send]} of rank {holder}, step {step}")

    def _others(self, nearest: Source) -> Iterable[Source]:
        """Everything that is sent in this step or the one before, the like of ``nearest`` first."""
        sends = np.flatnonzero(self._graph.is_kind(DATA_SENDS)).tolist()
        steps = [step for step in (self.step, self.step - 1) if step >= 0]
        found = dict.fromkeys(self._source(send, step) for step in steps for send in sends)
        return sorted(found, key=lambda one: [a != b for a, b in zip(one.key[::-1], nearest.key[::-1], strict=True)])


def difference(wanted: Sequence[Piece], found: Sequence[Piece]) -> str | None:
    """The first range that is not what was wanted, in words; None where there is none."""
    for piece in found:
        promised = next(one for one in wanted if one.start <= piece.start < one.stop)
        by = piece.start - promised.start
        if piece.source != promised.source or piece.source_start != promised.source_start + by:
            right = replace(promised, start=piece.start, stop=piece.stop, source_start=promised.source_start + by)
            return f"elements {piece.start}..{piece.stop} are {piece.text}; promised are {right.text}"
    return None
