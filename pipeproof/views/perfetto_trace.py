"""A timeline as a native Perfetto trace (protobuf), which https://ui.perfetto.dev opens; extra ``trace``.

One process per rank (its id is the rank + 1, since 0 is the idle process of
an operating system), below it one track per queue, the compute queue first,
and one per counter. Where operations of a queue overlap without one lying
inside of the other, further tracks of the same queue take what does not fit.

A slice has its operation as name and the op id, step, stage, micro-batch,
split, bytes and peer as arguments. An arrow (a flow) leads from a send to a
mark of no length at the end of the receive: a viewer turns an arrow round
where its head is on a slice that begins before the tail's, and a receive is
posted early.

Times are whole nanoseconds since the first start. Packets are written one by
one in order of time; in addition to the timeline, memory holds an index of each track.
Names are interned, as the format allows.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from pipeproof.atomic_write import output_file
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, PART_KINDS, SEND_KINDS, Op
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.memory_curves import Curve, all_curves
from pipeproof.views.trace_slices import Queue, Slices

_SEQUENCE = 1
"""All packets are of one sequence, so that they share their interned names."""
_ARRIVED = "is there"
"""The name of the mark at which a message has arrived."""

_Step = tuple[int, Callable[[Any], None]]
"""A time in nanoseconds, and what fills the packet of that time."""


def write_perfetto(timeline: Timeline, path: Path, graph: OpGraph | None = None, curves: Sequence[Curve] = ()) -> None:
    """Write the trace file, overwriting what is there; the same bytes for the same timeline.

    ``graph`` adds the bytes of transfers and collectives, ``curves`` are counters in addition to the activations held.

    Raises:
        OSError: the file cannot be written.
        ModuleNotFoundError: the ``perfetto`` package is not installed.
    """
    with output_file(path) as new, new.open("wb") as stream:
        _Writer(Slices(timeline, graph), all_curves(timeline, curves), stream).write()


class _Writer:
    def __init__(self, slices: Slices, curves: Sequence[Curve], stream: IO[bytes]) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self._slices, self._curves, self._protos = slices, curves, protos
        self._builder = StreamingTraceProtoBuilder(stream)
        self._interned: dict[tuple[str, str], int] = {}
        self._sends = {(send.step, send.op_id): flow for flow, (send, _) in enumerate(slices.messages, 1)}
        self._receives = {(recv.step, recv.op_id): flow for flow, (_, recv) in enumerate(slices.messages, 1)}
        self._uuid = 0

    def write(self) -> None:
        first = self._packet()
        first.sequence_flags = self._protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        first.first_packet_on_sequence = True
        self._builder.write_packet(first)
        processes = [self._process(rank, name) for rank, name in enumerate(self._slices.rank_names)]
        steps = [*self._queue_tracks(processes), *self._counter_tracks(processes)]
        for time, fill in heapq.merge(*steps, key=lambda step: step[0]):
            packet = self._packet(time)
            fill(packet)
            self._builder.write_packet(packet)

    def _packet(self, time: int | None = None) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if time is not None:
            packet.timestamp = time
            packet.sequence_flags = self._protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def _process(self, rank: int, name: str) -> int:
        packet, uuid = self._track(name, None)
        descriptor = packet.track_descriptor
        descriptor.process.pid = rank + 1
        descriptor.process.process_name = name
        descriptor.child_ordering = self._protos.TrackDescriptor.EXPLICIT
        descriptor.sibling_order_rank = rank
        self._builder.write_packet(packet)
        return uuid

    def _track(self, name: str, parent: int | None) -> tuple[Any, int]:
        """The packet that describes a new track, and the track's id."""
        self._uuid += 1
        packet = self._packet()
        packet.track_descriptor.uuid = self._uuid
        packet.track_descriptor.name = name
        if parent is not None:
            packet.track_descriptor.parent_uuid = parent
        return packet, self._uuid

    def _queue_tracks(self, processes: Sequence[int]) -> list[Iterator[_Step]]:
        """The steps of each track of slices; tracks with sends come first, as a head must not precede its tail."""
        with_sends: list[Iterator[_Step]] = []
        others: list[Iterator[_Step]] = []
        for place, (queue, spans) in enumerate(_by_queue(self._slices)):
            for layer, nested in enumerate(_nesting(self._slices, spans)):
                name = queue[1] if layer == 0 else f"{queue[1]} (overlapped, {layer})"
                packet, uuid = self._track(name, processes[queue[0]])
                packet.track_descriptor.sibling_order_rank = place
                self._builder.write_packet(packet)
                has_sends = any(self._slices.ops[span.op].kind in SEND_KINDS for span in nested)
                (with_sends if has_sends else others).append(self._steps(nested, uuid))
        return with_sends + others

    def _steps(self, spans: Sequence[Span], track: int) -> Iterator[_Step]:
        """Begins and ends of slices that lie inside of each other or apart, in order of time."""
        at = self._slices.nanoseconds
        is_open: list[Span] = []
        for span in spans:
            while is_open and at(is_open[-1].end) <= at(span.start):
                yield from self._end(is_open.pop(), track)
            yield at(span.start), partial(self._begin, span, track)
            is_open.append(span)
        while is_open:
            yield from self._end(is_open.pop(), track)

    def _begin(self, span: Span, track: int, packet: Any) -> None:
        event = packet.track_event
        event.type = self._protos.TrackEvent.TYPE_SLICE_BEGIN
        event.track_uuid = track
        event.name_iid = self._iid(packet, "event_names", span.op)
        event.category_iids.append(self._iid(packet, "event_categories", self._slices.category(span)))
        flow = self._sends.get((span.step, span.op_id))
        if flow is not None:
            event.flow_ids.append(flow)
        for name, value in self._arguments(span).items():
            if value is not None:
                argument = event.debug_annotations.add()
                argument.name_iid = self._iid(packet, "debug_annotation_names", name)
                argument.int_value = value

    def _arguments(self, span: Span) -> Mapping[str, int | None]:
        op = self._slices.ops[span.op]
        about = op.target or op  # what a wait waits for, what a child collective belongs to
        return {
            "op_id": span.op_id,
            "step": span.step,
            "stage": op.stage,
            "micro_batch": about.micro_batch,
            "split": about.split,
            "bytes": self._slices.bytes_of(span),
            "peer": self._slices.peer_of.get((span.step, span.op_id)),
        }

    def _end(self, span: Span, track: int) -> Iterator[_Step]:
        end = self._slices.nanoseconds(span.end)
        flow = self._receives.get((span.step, span.op_id))
        if flow is not None:
            yield end, partial(self._arrived, flow, track)
            yield end, partial(self._ended, track)
        yield end, partial(self._ended, track)

    def _arrived(self, flow: int, track: int, packet: Any) -> None:
        event = packet.track_event
        event.type = self._protos.TrackEvent.TYPE_SLICE_BEGIN
        event.track_uuid = track
        event.name_iid = self._iid(packet, "event_names", _ARRIVED)
        event.category_iids.append(self._iid(packet, "event_categories", "arrival"))
        event.terminating_flow_ids.append(flow)

    def _ended(self, track: int, packet: Any) -> None:
        packet.track_event.type = self._protos.TrackEvent.TYPE_SLICE_END
        packet.track_event.track_uuid = track

    def _iid(self, packet: Any, table: str, name: str) -> int:
        """The number of an interned name, which the packet that needs it first brings along."""
        known = self._interned.get((table, name))
        if known is not None:
            return known
        number = self._interned[table, name] = len(self._interned) + 1
        entry = getattr(packet.interned_data, table).add()
        entry.iid, entry.name = number, name
        return number

    def _counter_tracks(self, processes: Sequence[int]) -> Iterator[Iterator[_Step]]:
        num_queues = len(self._slices.queues)
        for place, curve in enumerate(self._curves):
            for rank, process in enumerate(processes):
                packet, uuid = self._track(curve.name, process)
                packet.track_descriptor.sibling_order_rank = num_queues + place
                packet.track_descriptor.counter.unit_name = curve.unit
                self._builder.write_packet(packet)
                yield self._counts(curve, rank, uuid)

    def _counts(self, curve: Curve, rank: int, track: int) -> Iterator[_Step]:
        for time, value in curve.ranks[rank]:
            yield self._slices.nanoseconds(time), partial(self._count, value, track)

    def _count(self, value: int, track: int, packet: Any) -> None:
        packet.track_event.type = self._protos.TrackEvent.TYPE_COUNTER
        packet.track_event.track_uuid = track
        packet.track_event.counter_value = value


_INSIDE = CHILD_KINDS | PART_KINDS
"""Kinds of what may be inside of another operation."""


def _by_queue(slices: Slices) -> Iterator[tuple[Queue, list[Span]]]:
    """The shown spans of each queue by time; what is longer comes first, and contains what begins with it."""
    found: dict[Queue, list[Span]] = defaultdict(list)
    for span in slices.shown:
        found[span.rank, span.queue].append(span)
    at = slices.nanoseconds
    for queue in slices.queues:
        spans = found.get(queue, [])
        spans.sort(key=lambda span: (at(span.start), -at(span.end), span.step, span.op_id))
        if spans:
            yield queue, spans


def _nesting(slices: Slices, spans: Sequence[Span]) -> list[list[Span]]:
    """Assign the spans, in order, to the fewest tracks in which the spans of a track nest or follow each other.

    A part of a computation goes to the track of that.
    """
    at = slices.nanoseconds
    tracks: list[list[Span]] = []
    track_of: dict[tuple[int, Op], int] = {}
    open_ends: list[list[int]] = []
    for span in spans:
        start, end = at(span.start), at(span.end)
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        op = slices.ops[span.op]
        own = track_of.get((span.step, op.target)) if op.target is not None and op.kind in _INSIDE else None
        fits = (k for k, ends in enumerate(open_ends) if own in (None, k) and (not ends or end <= ends[-1]))
        free = next(fits, len(tracks))
        track_of[span.step, op] = free
        if free == len(tracks):
            tracks.append([])
            open_ends.append([])
        tracks[free].append(span)
        open_ends[free].append(end)
    return tracks
