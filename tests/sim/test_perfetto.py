"""The Perfetto trace, parsed with the format's own messages and read by the rules of its importer."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from pipeproof.schedule.ops import COMPUTE_KINDS, parse_op
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.memory_curves import Curve, activations_held
from pipeproof.views.perfetto_trace import write_perfetto
from tests.sim.test_trace import MEASURED
from tests.work import num_calls

BEGIN, END, COUNTER = (getattr(protos.TrackEvent, f"TYPE_{name}") for name in ("SLICE_BEGIN", "SLICE_END", "COUNTER"))


@dataclass
class Slice:
    name: str
    category: str
    track: int
    start: int
    arguments: dict
    depth: int
    end: int = -1
    flows_out: list = field(default_factory=list)
    flows_in: list = field(default_factory=list)


class Read:
    """A trace as its importer reads it: names by their numbers, slices as a stack for each track."""

    def __init__(self, path):
        self.trace = protos.Trace.FromString(path.read_bytes())
        self.tracks, self.slices, self.counts = {}, [], defaultdict(list)
        names, stacks, last = {}, defaultdict(list), 0
        for packet in self.trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            for table in ("event_names", "event_categories", "debug_annotation_names"):
                for entry in getattr(packet.interned_data, table):
                    assert (table, entry.iid) not in names
                    names[table, entry.iid] = entry.name
            if packet.HasField("track_descriptor"):
                assert packet.track_descriptor.uuid not in self.tracks
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if not packet.HasField("track_event"):
                continue
            event, now = packet.track_event, packet.timestamp
            assert packet.sequence_flags == protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            assert event.track_uuid in self.tracks, "described before its events"
            assert now >= last
            last, stack = now, stacks[event.track_uuid]
            if event.type == BEGIN:
                arguments = {names["debug_annotation_names", a.name_iid]: a.int_value for a in event.debug_annotations}
                (category,) = event.category_iids
                found = Slice(
                    names["event_names", event.name_iid], names["event_categories", category], event.track_uuid, now,
                    arguments, len(stack), flows_out=[*event.flow_ids], flows_in=[*event.terminating_flow_ids],
                )  # fmt: skip
                stack.append(found)
                self.slices.append(found)
            elif event.type == END:
                stack.pop().end = now
            else:
                assert event.type == COUNTER
                self.counts[event.track_uuid].append((now, event.counter_value))
        assert not any(stacks.values()), "every slice ends"

    def place(self, track):
        """(rank, queue) of a track."""
        descriptor = self.tracks[track]
        parent = self.tracks[descriptor.parent_uuid]
        return parent.process.pid - 1, descriptor.name.partition(" (overlapped")[0]

    @property
    def ops(self):
        return [found for found in self.slices if found.category != "arrival"]


@pytest.fixture(
    params=[
        {"p": 4, "m": 8, "c": 1},
        {"p": 4, "m": 8},
        {"kind": "gpipe", "p": 3, "m": 4, "c": 2, "p2p": "rendezvous", "tp": 2, "transport": "partial"},
        {"p": 3, "m": 5, "tf": Fraction(1, 7), "tb": Fraction(1, 3), "c": Fraction(1, 6000)},
        {"kind": "dualpipe", "p": 4, "m": 8, "tf": Fraction(2, 3), "c": 1},
        "measured",
    ],
    ids=str,
)
def case(request, run, make_plan, tmp_path):
    """(timeline, graph, what is read of its file)."""
    path = tmp_path / "t.pftrace"
    if request.param == "measured":
        write_perfetto(MEASURED, path)
        return MEASURED, None, Read(path)
    timeline, graph = run(**request.param).timeline, make_plan(**request.param).graph
    write_perfetto(timeline, path, graph)
    return timeline, graph, Read(path)


def ns(timeline, value):
    return round(timeline.us(value - timeline.first_start) * 1000)


def test_a_process_for_each_rank_and_a_track_for_each_queue(case):
    timeline, _, read = case
    processes = [track for track in read.tracks.values() if track.HasField("process")]
    assert [track.process.pid for track in processes] == [rank + 1 for rank in range(len(timeline.ranks))]
    assert all(track.process.process_name.startswith(f"rank {track.process.pid - 1}") for track in processes)
    assert all(track.HasField("process") for track in processes)
    parents = {track.uuid for track in processes}
    children = [track for track in read.tracks.values() if not track.HasField("process")]
    assert all(track.parent_uuid in parents for track in children)
    queues = {read.place(track.uuid) for track in children if not track.HasField("counter")}
    assert queues == {(span.rank, span.queue) for span in timeline.spans}
    for uuid in parents:
        order = [t.sibling_order_rank for t in children if t.parent_uuid == uuid and "overlapped" not in t.name]
        assert order == sorted(order)
        assert min((t for t in children if t.parent_uuid == uuid), key=lambda t: t.sibling_order_rank).name == "compute"


def test_slices_are_the_operations_with_their_times(case):
    timeline, _, read = case

    def said(span):
        return span.start != span.end or span.queue != "compute" or parse_op(span.op).kind in COMPUTE_KINDS

    wanted = Counter(
        (span.rank, span.queue, span.op, ns(timeline, span.start), ns(timeline, span.end), span.step, span.op_id)
        for span in timeline.spans
        if said(span)
    )
    assert wanted == Counter(
        (*read.place(s.track), s.name, s.start, s.end, s.arguments["step"], s.arguments["op_id"]) for s in read.ops
    )
    durations = Counter()
    for found in read.ops:
        durations[read.place(found.track)] += found.end - found.start
    for (rank, queue), total in durations.items():
        spans = [s for s in timeline.spans if (s.rank, s.queue) == (rank, queue)]
        exact = sum(timeline.us(s.end) - timeline.us(s.start) for s in spans) * 1000
        assert abs(total - exact) <= len(spans)


def test_arguments_say_what_the_graph_says(case):
    _, graph, read = case
    for found in read.ops:
        op = parse_op(found.name)
        assert found.arguments["stage"] == op.stage
        assert found.arguments.get("micro_batch") == (op.target or op).micro_batch
        if graph is not None and found.category == "transfer":
            op_id = found.arguments["op_id"]
            assert found.arguments["peer"] == graph.peer[op_id]
            assert found.arguments["bytes"] == 4 * (graph.stop[op_id] - graph.start[op_id]) > 0
        if found.category == "compute":
            assert not {"bytes", "peer"} & set(found.arguments)


def test_arrows_lead_from_sends_to_the_ends_of_their_receives(case):
    timeline, _, read = case
    tails = {flow: found for found in read.slices for flow in found.flows_out}
    heads = {flow: found for found in read.slices for flow in found.flows_in}
    num_steps = len({span.step for span in timeline.spans})
    assert set(tails) == set(heads)
    assert len(tails) == num_steps * len(timeline.matches) > 0
    order = {id(found): place for place, found in enumerate(read.slices)}
    receives = defaultdict(list)
    for found in read.ops:
        if found.category == "transfer" and "RECV" in found.name:
            receives[found.track].append(found)
    for flow, tail in tails.items():
        head = heads[flow]
        assert head.category == "arrival"
        assert head.start == head.end
        # the importer knows a flow only after its tail, and points it at the slice that begins later
        assert order[id(tail)] < order[id(head)]
        assert tail.start <= head.start
        matched = [
            found
            for found in receives[head.track]
            if found.end == head.start
            and (tail.arguments["op_id"], found.arguments["op_id"]) in timeline.matches
            and found.arguments["step"] == tail.arguments["step"]
        ]
        assert len(matched) == 1


def test_counters_are_the_curves(run, tmp_path):
    simulation = run(p=3, m=4, c=1)
    timeline = simulation.timeline
    more = Curve("memory held", "bytes", tuple(((0, 7), (5, 10**12 + rank)) for rank in range(3)))
    write_perfetto(timeline, tmp_path / "t.pftrace", None, [more])
    read = Read(tmp_path / "t.pftrace")
    for curve in (activations_held(timeline), more):
        for rank, steps in enumerate(curve.ranks):
            (track,) = [u for u in read.tracks if read.tracks[u].name == curve.name and read.place(u)[0] == rank]
            assert read.tracks[track].counter.unit_name == curve.unit
            assert read.counts[track] == [(ns(timeline, at), value) for at, value in steps]
            assert curve.name != "activations held" or max(v for _, v in steps) == timeline.peak_activations(rank)


def test_what_overlaps_without_nesting_has_a_track_of_its_own(tmp_path):
    ops = [("0F0", 0, 10), ("0F0/0.ALL_REDUCE:tp", 2, 10), ("0B0", 5, 15), ("0F1", 12, 20), ("0B1", 20, 30)]
    spans = tuple(Span(0, "compute", i, op, start, end) for i, (op, start, end) in enumerate(ops))
    write_perfetto(Timeline(spans, ({"pp": 0},)), tmp_path / "t.pftrace")
    read = Read(tmp_path / "t.pftrace")
    by_track = defaultdict(dict)
    for found in read.ops:
        by_track[read.tracks[found.track].name][found.name] = found.depth
    assert by_track == {
        "compute": {"0F0": 0, "0F0/0.ALL_REDUCE:tp": 1, "0F1": 0, "0B1": 0},
        "compute (overlapped, 1)": {"0B0": 0},
    }


def test_two_runs_write_the_same_bytes_and_nothing_is_written_twice(run, make_plan, tmp_path):
    options = {"p": 3, "m": 4, "tf": Fraction(1, 3), "c": Fraction(1, 7), "tp": 2}
    for name in "ab":
        write_perfetto(run(**options).timeline, tmp_path / name, make_plan(**options).graph)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_empty_timeline_is_no_accident(tmp_path):
    write_perfetto(Timeline((), ({"pp": 0},)), tmp_path / "t")
    read = Read(tmp_path / "t")
    assert read.slices == []
    assert [track.name for track in read.tracks.values()] == ["rank 0", "activations held"]


def test_twice_the_operations_are_twice_the_work(tmp_path):
    def work(num_operations):
        spans = tuple(
            Span(rank, "compute", i * 8 + rank, f"{rank}F{i}", i, i + 1)
            for i in range(num_operations)
            for rank in range(8)
        )
        timeline = Timeline(spans, tuple({"pp": rank} for rank in range(8)))
        return num_calls(write_perfetto, timeline, tmp_path / "t")

    assert work(200) < 2.2 * work(100)
