"""Two timelines side by side: pairs, clocks, distances, and the first divergence."""

import json
from fractions import Fraction
from itertools import count
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.compare.compare_timelines import compare_timelines
from pipeproof.analysis.compare.timeline_files import TimedOp, TimelineFile, TimelineFileError, read_timeline
from pipeproof.comm.lower import lower
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.views.chrome_trace import trace_json
from tests.plans import plan_dict, plan_file


def file_of(*rows, measured=False, name="a"):
    """A timeline of (rank, step, queue, op, start, end)."""
    order = count()
    ops = (
        TimedOp(rank, step, queue, parse_op(op), Fraction(start), Fraction(end), next(order))
        for rank, step, queue, op, start, end in rows
    )
    return TimelineFile(name, "report" if measured else "trace", measured, tuple(ops))


def write_plan(folder, name="plan.json", **sections):
    return plan_file(folder / name, **sections)


C = "compute"
PREDICTED = file_of(
    (0, 0, C, "0F0", 0, 10),
    (0, 0, C, "0B0", 30, 50),
    (1, 0, C, "WAIT(1RECV_F0)", 0, 10),
    (1, 0, C, "1F0", 10, 20),
    (1, 0, C, "1B0", 20, 30),
)
MEASURED = file_of(
    (0, 0, C, "0F0", 1000, 1040), (0, 0, C, "0B0", 1080, 1100),
    (1, 0, C, "WAIT(1RECV_F0)", 500, 1045), (1, 0, C, "1F0", 1045, 1057), (1, 0, C, "1B0", 1060, 1068),
    (0, 1, C, "0F0", 2000, 2012), (0, 1, C, "0B0", 2040, 2060), (0, 1, C, "0STEP", 2060, 2065),
    (1, 1, C, "WAIT(1RECV_F0)", 1990, 2002), (1, 1, C, "1F0", 2002, 2013), (1, 1, C, "1B0", 2013, 2025),
    measured=True, name="b",
)  # fmt: skip


def test_a_prediction_stands_beside_every_step_on_clocks_of_each_rank():
    found = compare_timelines(PREDICTED, MEASURED)
    assert found.per_rank_clocks
    assert [(s.step_a, s.step_b, s.makespan_a, s.makespan_b) for s in found.steps] == [(0, 0, 50, 600), (0, 1, 50, 75)]
    assert [(s.compute_a, s.compute_b) for s in found.steps] == [(50, 100), (50, 60)]
    starts = {(p.a.rank, p.b.step, str(p.a.op)): p.start_error for p in found.pairs}
    assert starts[0, 0, "0F0"] == starts[1, 0, "WAIT(1RECV_F0)"] == 0
    assert starts[0, 0, "0B0"] == 80 - 30
    assert starts[1, 0, "1F0"] == 545 - 10
    assert starts[1, 1, "1B0"] == 23 - 20
    by_kind = {kind.kind: kind for kind in found.kinds}
    forward = by_kind[OpKind.FORWARD]
    assert (forward.count, forward.total_a, forward.total_b) == (4, 40, 40 + 12 + 12 + 11)
    assert (forward.median_error, forward.max_error, forward.median_ratio) == (2, 30, Fraction(12, 10))
    assert abs(by_kind[OpKind.BACKWARD].max_error) == 2
    assert by_kind[OpKind.BACKWARD].median_error == median([0, -2, 0, 2])
    assert found.only_a == {}
    assert found.only_b == {OpKind.STEP: 1}
    assert found.first_divergence is None


def test_the_worst_are_those_whose_length_is_their_own():
    found = compare_timelines(PREDICTED, MEASURED)
    listed = [(str(pair.a.op), pair.b.step, pair.duration_error) for pair in found.worst(3)]
    assert listed == [("0F0", 0, 30), ("1F0", 0, 2), ("1B0", 0, -2)]
    assert compare_timelines(PREDICTED, PREDICTED).worst(10) == ()


def test_simulated_timelines_have_one_clock():
    later = file_of((0, 0, C, "0F0", 5, 15), (1, 0, C, "1F0", 25, 35))
    found = compare_timelines(file_of((0, 0, C, "0F0", 0, 10), (1, 0, C, "1F0", 10, 20)), later)
    assert not found.per_rank_clocks
    assert [pair.start_error for pair in found.pairs] == [0, 10]


def test_where_the_order_parts_first():
    a = file_of((0, 0, C, "0F0", 0, 1), (0, 0, C, "0F1", 1, 2), (1, 0, C, "1F0", 1, 2), (1, 0, C, "1F1", 2, 3))
    b = file_of((0, 0, C, "0F0", 0, 1), (0, 0, C, "0B0", 1, 2), (1, 0, C, "1F1", 1, 2), (1, 0, C, "1F0", 2, 3))
    first_divergence = compare_timelines(a, b).first_divergence
    assert (
        first_divergence.rank,
        first_divergence.queue,
        first_divergence.place,
        first_divergence.op_a,
        first_divergence.op_b,
    ) == (0, C, 1, "0F1", "0B0")
    shorter = compare_timelines(a, file_of((0, 0, C, "0F0", 0, 1), (1, 0, C, "1F0", 1, 2))).first_divergence
    assert (shorter.rank, shorter.op_a, shorter.op_b) == (0, "0F1", None)
    longer = compare_timelines(file_of((0, 0, C, "0F0", 0, 1)), a).first_divergence
    assert (longer.op_a, longer.op_b) == (None, "1F0")


TIMES = st.integers(1, 50)


@settings(deadline=None, max_examples=25)
@given(TIMES, TIMES, TIMES, st.integers(0, 9), st.sampled_from(["1f1b", "gpipe"]))
def test_the_order_of_plans_is_the_same_whatever_they_cost(forward, backward, other, latency, kind):
    """The order is the schedule's; lengths are exactly the plan's."""

    def timed(number, **cost):
        plan = plan_dict(schedule={"kind": kind}, cost={"forward_us": forward, "backward_us": backward, **cost})
        timeline = simulate(lower(plan_from_dict(plan).spec)).timeline
        ops = (
            TimedOp(s.rank, s.step, s.queue, parse_op(s.op), timeline.us(s.start), timeline.us(s.end), s.op_id)
            for s in timeline.spans
        )
        return TimelineFile(number, "plan", measured=False, ops=tuple(ops))

    found = compare_timelines(timed("a"), timed("b", forward_us=other, p2p_latency_us=latency))
    assert found.first_divergence is None
    assert found.only_a == found.only_b == {}
    errors = {kind.kind: (kind.median_error, kind.max_error) for kind in found.kinds}
    assert errors[OpKind.FORWARD] == (other - forward, other - forward)
    assert errors[OpKind.BACKWARD] == (0, 0)


# --- files ---


def test_a_plan_and_the_trace_of_it_are_the_same(tmp_path):
    plan = write_plan(tmp_path, cost={"forward_us": "100/3", "p2p_latency_us": 5}, topology={"tp": 2})
    simulated = read_timeline(plan)
    trace = tmp_path / "trace.json"
    trace.write_text(trace_json(simulate(lower(plan_from_dict(json.loads(plan.read_text())).spec)).timeline))
    read = read_timeline(trace)
    assert (simulated.source, simulated.measured, read.source, read.measured) == ("plan", False, "trace", False)
    found = compare_timelines(simulated, read)
    assert found.first_divergence is None
    assert found.only_b == {}
    kept = {(op.rank, op.op) for op in read.ops}
    left_out = [op for op in simulated.ops if (op.rank, op.op) not in kept]
    assert len(left_out) == sum(found.only_a.values()) > 0
    assert not any(op.duration for op in left_out)
    assert max(abs(pair.duration_error) for pair in found.pairs) <= Fraction(1, 1000)
    assert max(abs(pair.start_error) for pair in found.pairs) <= Fraction(1, 1000)


REPORT = {
    "digest": "0" * 64,
    "timeline": [
        {"step": 1, "rank": 0, "queue": C, "op": "0F0", "start_us": 1.1, "end_us": 3.4},
        {"step": 1, "rank": 0, "queue": "forward 0->1", "op": "0SEND_F0", "start_us": 3.5, "end_us": 4},
    ],
}


def test_a_report_of_a_run(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("\n " + json.dumps(REPORT))
    read = read_timeline(path)
    assert (read.source, read.measured) == ("report", True)
    assert [(str(op.op), op.step, op.start, op.duration) for op in read.ops] == [
        ("0F0", 1, Fraction(11, 10), Fraction(23, 10)),
        ("0SEND_F0", 1, Fraction(7, 2), Fraction(1, 2)),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"traceEvents": []}, "its timeline is empty"),
        ({"traceEvents": [{"ph": "X", "name": "0F0", "pid": 0}]}, "slice 0 has no 'ts'"),
        (
            {"traceEvents": [{"ph": "X", "name": "matmul", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": {}}]},
            "slice 0 has no",
        ),
        ({"timeline": [{**REPORT["timeline"][0], "op": "2F0x"}]}, "timeline entry 0 is not an operation: '2F0x'"),
        ({"timeline": [{**REPORT["timeline"][0], "start_us": None}]}, "timeline entry 0 is not an operation"),
        ({"timeline": [3]}, "timeline entry 0 is not an operation"),
        ({"makespan": 3, "ranks": []}, "`simulate -o` writes its timeline"),
        ({"digest": None}, "it has no timeline"),
    ],
)
def test_json_that_is_no_timeline_says_what_would_be_one(content, words, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TimelineFileError) as refusal:
        read_timeline(path)
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
