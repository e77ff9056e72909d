"""The Chrome trace: a valid file with arrows that a viewer can bind."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.chrome_trace import ARRIVAL, Slices, trace_json
from pipeproof.views.memory_curves import Curve, activations_held

_STEP_NS = (
    Span(0, "compute", 0, "0F0", 10, 5_010),
    Span(0, "compute", 1, "0F0/0.ALL_REDUCE:tp", 1_000, 2_001),
    Span(0, "forward 0->1", 2, "0SEND_F0", 5_020, 7_000),
    Span(1, "forward 0->1", 3, "1RECV_F0", 300, 7_100),
    Span(1, "compute", 4, "WAIT(1RECV_F0)", 301, 7_200),
)
MEASURED = Timeline(
    spans=tuple(
        replace(span, start=span.start + origin, end=span.end + origin, step=step)
        for step, origin in enumerate((0, 9_000_000))
        for span in _STEP_NS
    ),
    ranks=({"tp": 0, "pp": 0}, {"tp": 0, "pp": 1}),
    clock="measured",
    tick_us=Fraction(1, 1000),
    matches=((2, 3),),
)


@pytest.fixture(
    params=[
        {"p": 4, "m": 8, "c": 1},
        {"p": 4, "m": 8},
        {"kind": "gpipe", "p": 3, "m": 4, "c": 2, "p2p": "rendezvous", "tp": 2, "transport": "partial"},
        {"p": 3, "m": 5, "tf": Fraction(1, 7), "tb": Fraction(1, 3), "c": Fraction(1, 6000)},
        {"p": 2, "m": 3, "tf": [1, 1], "tb": [0, 2]},
        "measured",
    ],
    ids=str,
)
def timeline(request, run):
    return MEASURED if request.param == "measured" else run(**request.param).timeline


def events_of(timeline, phase):
    return [event for event in json.loads(trace_json(timeline))["traceEvents"] if event["ph"] == phase]


def ns(us):
    value = us * 1000
    assert abs(value - round(value)) < 1e-3
    return round(value)


def test_only_known_events_in_order_of_time(timeline):
    trace = json.loads(trace_json(timeline))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["otherData"] == {"clock": timeline.clock}
    phases = [event["ph"] for event in trace["traceEvents"]]
    assert set(phases) == {"M", "X", "s", "f", "C"}
    num_names = phases.count("M")
    assert phases[:num_names] == ["M"] * num_names
    timed = [event["ts"] for event in trace["traceEvents"][num_names:]]
    assert timed == sorted(timed)
    assert timed[0] == 0


def test_slices_of_a_thread_nest_or_stand_apart(timeline):
    by_thread = {}
    for event in events_of(timeline, "X"):
        start = ns(event["ts"])
        by_thread.setdefault((event["pid"], event["tid"]), []).append((start, start + ns(event["dur"])))
    for slices in by_thread.values():
        open_ends = []
        for start, end in slices:
            assert start <= end
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_every_arrow_goes_from_a_send_to_its_receive(timeline):
    """Read the file as a viewer does: an arrow binds to the slice that was opened last on its thread."""
    op_ids, arrows, last = {}, {}, {}
    for event in json.loads(trace_json(timeline))["traceEvents"]:
        thread = event["pid"], event.get("tid")
        if event["ph"] == "X":
            last[thread] = event
        elif event["ph"] in "sf":
            bound = last[thread]
            assert ns(bound["ts"]) <= ns(event["ts"]) <= ns(bound["ts"]) + ns(bound["dur"])
            assert (bound["cat"] == ARRIVAL) == (event["ph"] == "f")
            assert (event["ph"] == "f") == (event["id"] in arrows)
            arrows.setdefault(event["id"], []).append(bound)
    ends = {(span.step, span.op_id): span.end for span in timeline.spans}
    for tail, head in arrows.values():
        assert tail["ts"] <= head["ts"]  # a viewer turns an arrow round whose head's slice begins first
        end = ends[head["args"]["step"], head["args"]["op_id"]]
        assert ns(head["ts"]) == round(timeline.us(end - timeline.first_start) * 1000)
        assert (tail["args"]["op_id"], head["args"]["op_id"]) in timeline.matches
        assert tail["args"]["step"] == head["args"]["step"]
        op_ids.setdefault(tail["args"]["step"], []).append(tail["args"]["op_id"])
    num_steps = len({span.step for span in timeline.spans})
    assert {step: sorted(ids) for step, ids in op_ids.items()} == dict.fromkeys(
        range(num_steps), sorted(send for send, _ in timeline.matches)
    )


def test_counters_are_the_curves(timeline):
    more = Curve(
        "memory held", "bytes", tuple(((timeline.first_start, rank + 1),) for rank in range(len(timeline.ranks)))
    )
    events = [e for e in json.loads(trace_json(timeline, [more]))["traceEvents"] if e["ph"] == "C"]
    held = activations_held(timeline)
    for rank, steps in enumerate(held.ranks):
        mine = [e for e in events if e["pid"] == rank and e["name"] == "activations held"]
        assert [(ns(e["ts"]), e["args"]) for e in mine] == [
            (round(timeline.us(time - timeline.first_start) * 1000), {"activations": value}) for time, value in steps
        ]
        assert max((e["args"]["activations"] for e in mine), default=0) == timeline.peak_activations(rank)
        assert [(e["ts"], e["args"]) for e in events if e["pid"] == rank and e["name"] == "memory held"] == [
            (0, {"bytes": rank + 1})
        ]


def test_golden(run, check_golden):
    check_golden("trace_1f1b_pp2_m2.json", trace_json(run(p=2, m=2, tf=1, tb=2, c=1).timeline))


times = st.one_of(
    st.integers(-(10**12), 10**12),
    st.builds(Fraction, st.integers(-(10**9), 10**9), st.integers(1, 9000)),
    st.floats(-1e6, 1e6),
)
ticks = st.sampled_from([Fraction(1), Fraction(1, 1000), Fraction(1, 2000), Fraction(7, 3)])


@given(first=times, time=times, tick=ticks)
@settings(deadline=None)
def test_nanoseconds_are_rounded_exactly(first, time, tick):
    timeline = Timeline((Span(0, "compute", 0, "0F0", first, first),), ({"pp": 0},), tick_us=tick)
    expected = round((Fraction(time) - Fraction(first)) * tick * 1000)
    assert Slices(timeline).nanoseconds(time) == expected
