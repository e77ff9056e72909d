"""The SimPy model against an independent longest path, and where it has to stop."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.backends import backend_table
from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import OpsWitness
from pipeproof.schedule.op_table import EdgeKind
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COMPUTE_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.programs import asap
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.schedule.drawn import generated, plan_of, requests

times = st.builds(Fraction, st.integers(1, 6), st.integers(1, 4))


def longest_paths(plan):
    """(start, end) of each op: longest paths over (op, start) and (op, end), made of the graph's edges."""
    graph, cost = plan.graph, plan.spec.cost
    rendezvous = cost.p2p == "rendezvous"
    latency = cost.p2p_latency_us
    events = nx.DiGraph()

    def after(early, late, delay=Fraction(0)):
        known = events.edges.get((early, late), {"delay": Fraction(0)})["delay"]
        events.add_edge(early, late, delay=max(known, delay))

    for op_id, op in enumerate(graph.ops):
        duration = Fraction(0)
        if op.kind in COMPUTE_KINDS:
            duration = cost.forward_of(op.stage) if op.is_forward else cost.backward_of(op.stage)
        after((op_id, "start"), (op_id, "end"), duration)
    for kind in (EdgeKind.HOST, EdgeKind.POST, EdgeKind.QUEUE):
        for early, late in graph.edges[kind].tolist():
            after((early, "end"), (late, "start"))
    for transfer, wait in graph.edges[EdgeKind.WAIT].tolist():
        after((transfer, "end"), (wait, "end"))
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        after((send, "start"), (receive, "end"), latency)
        if rendezvous:
            after((send, "start"), (send, "end"), latency)
            after((receive, "start"), (receive, "end"), latency)
            after((receive, "start"), (send, "end"), latency)
    meetings = {}
    for op_id, op in enumerate(graph.ops):
        if op.kind in COLLECTIVE_KINDS:
            meetings.setdefault((int(graph.group[op_id]), int(graph.position[op_id])), []).append(op_id)
    for members in meetings.values():
        for one in members:
            for other in members:
                after((one, "start"), (other, "end"))
    at = {}
    for event in nx.topological_sort(events):
        at[event] = max((at[e] + events.edges[e, event]["delay"] for e in events.predecessors(event)), default=0)
    return [(at[op_id, "start"], at[op_id, "end"]) for op_id in range(len(graph.ops))]


@given(
    kind=st.sampled_from(["gpipe", "1f1b"]),
    p2p=st.sampled_from(["async", "rendezvous"]),
    tf=st.lists(times, min_size=1, max_size=4),
    tb=st.lists(times, min_size=4, max_size=4),
    m=st.integers(1, 6),
    c=st.builds(Fraction, st.integers(0, 9), st.integers(1, 4)),
    replicas=st.sampled_from([{}, {"tp": 2, "transport": "partial"}, {"dp": 2}]),
)
@settings(max_examples=40, deadline=None)
def test_every_span_is_a_longest_path(make_plan, kind, p2p, tf, tb, m, c, replicas):
    plan = make_plan(kind=kind, p=len(tf), m=m, tf=tf, tb=tb[: len(tf)], c=c, p2p=p2p, **replicas)
    spans = simulate(plan).timeline.spans
    assert [(span.start, span.end) for span in spans] == longest_paths(plan)


def test_async_messages_overlap_in_flight(make_plan):
    plan = make_plan(kind="gpipe", p=2, m=3, tf=1, tb=1, c=10)
    receives = [s for s in simulate(plan).timeline.spans if s.op in ("1RECV_F0", "1RECV_F1", "1RECV_F2")]
    assert [span.end for span in receives] == [11, 12, 13]


def test_backend_posts_that_block_hold_the_host(make_plan):
    plan = make_plan(kind="gpipe", p=2, m=2, tf=1, tb=1, c=5, p2p="backend")
    free = backend_table("paddle", "cpu")
    assert simulate(plan, free).makespan == simulate(plan).makespan
    # Receives at 6 and, free, at 11 with 0F1 next to the first transfer; blocked, 0F1 starts at 6 only.
    blocked = simulate(plan, replace(free, host_blocks_on_post=True))
    assert next(s.start for s in blocked.timeline.spans if s.op == "0F1") == 6
    assert next(s.start for s in simulate(plan).timeline.spans if s.op == "0F1") == 1


def test_an_eager_backend_is_async(make_plan):
    eager = replace(backend_table("paddle", "cpu"), send_completes="eager")
    by_backend = simulate(make_plan(c=1, p2p="backend"), eager)
    assert (by_backend.makespan, by_backend.p2p, by_backend.send_completes) == (49, "backend", "eager")


def test_a_buffer_with_one_slot_holds_the_second_send_back(make_plan):
    plan = make_plan(kind="gpipe", p=2, m=3, tf=[1, 10], tb=1, c=2, p2p="backend")
    table = replace(backend_table("paddle", "cpu"), send_completes="slots")
    spans = {span.op: (span.start, span.end) for span in simulate(plan, table).timeline.spans}
    # stage 1 posts a receive when it is free: at 0, 13 and 23
    assert [spans[f"1RECV_F{k}"] for k in range(3)] == [(0, 3), (13, 13), (23, 23)]
    assert [spans[f"0SEND_F{k}"] for k in range(3)] == [(1, 1), (2, 3), (3, 13)]


def test_a_fifo_for_each_pair_makes_a_send_wait_behind_a_receive(make_plan):
    plan = make_plan(kind="1f1b", p=2, m=2, tf=1, tb=[3, 1], c=2, p2p="backend")
    table = backend_table("paddle", "cpu")
    by_edge = {span.op: (span.start, span.end) for span in simulate(plan, table).timeline.spans}
    assert (by_edge["0SEND_F1"], by_edge["1SEND_B0"]) == ((3, 7), (5, 7))
    with pytest.raises(SimulationError, match="rank 0 waits in WAIT"):
        simulate(plan, replace(table, queue="pair"))


def wait_for_send_at_once(rows):
    """Wait for each send right after it is posted, as blocking sends do."""
    for program in rows:
        waits = [row for row in program if row.op.kind is OpKind.WAIT and row.op.target.kind in SEND_KINDS]
        for wait in waits:
            program.remove(wait)
            position = next(i for i, row in enumerate(program) if row.op == wait.op.target)
            program.insert(position + 1, wait)


def test_blocking_sends_of_1f1b_deadlock_under_rendezvous_only(make_plan, edit):
    plan = make_plan(kind="1f1b", p=2, m=4, p2p="rendezvous")
    blocking = edit(plan.graph, wait_for_send_at_once)
    with pytest.raises(SimulationError) as caught:
        simulate(replace(plan, graph=blocking))
    (finding,) = caught.value.findings
    assert finding.code == "PP403"
    assert "rank 0 waits in WAIT(0SEND_F1) for 1RECV_F1 on rank 1" in finding.message
    assert "rank 1 waits in WAIT(1SEND_B0) for 0RECV_B0 on rank 0" in finding.message
    assert isinstance(finding.witness, OpsWitness)
    assert [(op.rank, op.op) for op in finding.witness.ops] == [(0, "WAIT(0SEND_F1)"), (1, "WAIT(1SEND_B0)")]
    buffered = make_plan(kind="1f1b", p=2, m=4, p2p="async")
    assert simulate(replace(buffered, graph=blocking)).makespan == simulate(buffered).makespan


def drop(rank, text):
    def change(rows):
        rows[rank] = [row for row in rows[rank] if str(row.op) != text]

    return change


@pytest.mark.parametrize(
    ("rank", "text", "message"),
    [
        (0, "0SEND_F1", "rank 1 waits in WAIT(1RECV_F1) for rank 0, which never issues a counterpart"),
        (1, "1RECV_F0", "rank 1 waits in WAIT(1RECV_F0) for a transfer that was never posted"),
    ],
)
def test_what_never_comes_is_named(make_plan, edit, rank, text, message):
    plan = make_plan(kind="gpipe", p=2, m=2)
    with pytest.raises(SimulationError, match="does not end") as caught:
        simulate(replace(plan, graph=edit(plan.graph, drop(rank, text))))
    assert message in str(caught.value)


def test_a_transfer_that_nobody_waits_for_must_end_too(make_plan, edit):
    plan = make_plan(kind="gpipe", p=2, m=1, p2p="rendezvous")

    def change(rows):
        rows[0] = [row for row in rows[0] if str(row.op) not in ("0RECV_B0", "WAIT(0RECV_B0)")]
        rows[1] = [row for row in rows[1] if str(row.op) != "WAIT(1SEND_B0)"]

    with pytest.raises(SimulationError, match="rank 1 waits in 1SEND_B0 for rank 0, which never issues"):
        simulate(replace(plan, graph=edit(plan.graph, change)))


def test_a_member_that_never_joins_is_named(make_plan, edit):
    plan = make_plan(kind="gpipe", p=2, m=1, tp=2, transport="partial")
    graph = edit(plan.graph, drop(3, "1GATHER_F0"))
    # Without its gather, rank 3's next collective meets the others' gather; its last one is never met.
    with pytest.raises(SimulationError, match="for rank 3 of its tp group") as caught:
        simulate(replace(plan, graph=graph))
    assert "rank 2 waits in" in str(caught.value)


def test_many_stuck_ranks_are_summed_up(make_plan, edit):
    plan = make_plan(kind="gpipe", p=10, m=1)
    with pytest.raises(SimulationError, match="; and 2 more") as caught:
        simulate(replace(plan, graph=edit(plan.graph, drop(0, "0SEND_F0"))))
    assert len(caught.value.findings[0].witness.ops) == 10


def test_a_split_backward_takes_half_for_each_part(make_plan, edit):
    plan = make_plan(kind="gpipe", p=1, m=2, tf=1, tb=3)

    def split(rows):
        program = []
        for row in rows[0]:
            if row.op.kind is OpKind.BACKWARD:
                program += [
                    replace(row, op=row.op._replace(kind=kind))
                    for kind in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
                ]
            else:
                program.append(row)
        rows[0] = program

    simulation = simulate(replace(plan, graph=edit(plan.graph, split)))
    ends = {span.op: span.end for span in simulation.timeline.spans}
    assert ends["0I0"] == Fraction(7, 2)
    assert ends["0W0"] == 5
    assert simulation.makespan == 8


def test_two_runs_give_the_same_spans(make_plan):
    options = {"p": 3, "m": 4, "tf": Fraction(1, 3), "tb": Fraction(2, 7), "c": Fraction(1, 5), "tp": 2}
    first, second = (simulate(make_plan(**options)) for _ in range(2))
    assert first.timeline.spans == second.timeline.spans
    assert {kind for op in make_plan(**options).graph.ops if (kind := op.kind) in TRANSFER_KINDS}


@given(requests(max_ranks=4, max_chunks=3))
@settings(deadline=None, max_examples=150)
def test_equal_on_both_engines(drawn):
    kind, request = drawn
    schedule = generated(kind, request)
    timed = asap(schedule, request.costs)
    lowered = lower(plan_from_dict(plan_of(kind, request)).spec)
    assert lowered.schedule == schedule
    for engine in ("fast", "simpy"):
        assert_equal(simulate(lowered, engine=engine), timed)


def assert_equal(simulation, timed):
    assert simulation.makespan == timed.makespan
    for rank, figures in enumerate(simulation.figures):
        spans = {span.op: (span.start, span.end) for span, _ in simulation.timeline.compute_spans(rank)}
        times = zip(timed.starts[rank], timed.ends[rank], strict=True)
        assert spans == dict(zip(map(str, timed.programs[rank]), times, strict=True))
        assert figures.busy_us == timed.busy(rank)
        assert figures.span_us == timed.span(rank)
        assert figures.peak_activations == timed.peak(rank)
