"""Computations slowed down by pending receives, against hand-computed cases and a formula."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.lower import lower
from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import COMPUTE_KINDS, KIND_CODE, RECV_KINDS, parse_op
from pipeproof.sim.fast_engine import NotTimedError, run_fast
from pipeproof.sim.op_durations import Durations, durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict, plan_spec
from tests.schedule.drawn import generated, plan_of, requests

EAGER, RENDEZVOUS = (ChannelModel("directed_edge", completes) for completes in ("eager", "rendezvous"))
HALF = Fraction(1, 2)


def run_of(*programs, model=EAGER, slowdown=HALF):
    """(start, end) by operation of programs of (text, ticks, fields of its row); texts are of one rank each."""
    rows = [[Row(parse_op(text), **fields) for text, _, fields in program] for program in programs]
    ticks = tuple(ticks for program in programs for _, ticks, _ in program)
    graph = build_graph(rows, (), ())
    outcome = run_model(graph, Durations(ticks, 0, 1, recv_slowdown=slowdown), model)
    spans = zip(outcome.starts, outcome.ends, strict=True)
    return {(int(rank), str(op)): span for rank, op, span in zip(graph.rank, graph.ops, spans, strict=True)}


def sender(after, text="0SEND_F0"):
    """A rank that computes so long and then sends to rank 1."""
    return [("0F0", after, {}), (text, 0, {"peer": 1})]


RECEIVE = ("1RECV_F0", 0, {"peer": 0})
WAIT = ("WAIT(1RECV_F0)", 0, {})


@pytest.mark.parametrize(
    ("message_at", "ticks", "end"),
    [
        (20, 4, 6),  # slowed down all the time: 4 * 3/2
        (20, 5, 8),  # 7 1/2, which ends with the tick
        (6, 4, 6),  # it ends in the tick in which the receive ends
        (5, 10, 12),  # 3 1/3 of its work in the first 5 ticks, 6 2/3 after that: 11 2/3
        (0, 7, 7),  # the message is there at once
    ],
)
def test_one_receive(message_at, ticks, end):
    spans = run_of(sender(message_at), [RECEIVE, ("7F7", ticks, {}), WAIT])
    assert spans[1, "7F7"] == (0, end)
    assert spans[1, "1RECV_F0"] == (0, message_at)


def test_what_comes_after_the_receive_has_its_own_speed_in_either_order_of_events():
    """The first computation ends at 6, when the message comes: the second is not slowed down for an instant."""
    spans = run_of(sender(6), [RECEIVE, ("7F7", 4, {}), ("8F8", 4, {}), WAIT])
    assert spans[1, "8F8"] == (6, 10)


def test_two_receives_slow_down_no_more_than_one():
    """From 0 to 4 both are under way, to 10 the second: 6 2/3 of 12 are done then, and 5 1/3 are left."""
    other = [("2B0", 10, {}), ("2SEND_B0", 0, {"peer": 1})]
    receives = [RECEIVE, ("1RECV_B0", 0, {"peer": 2})]
    spans = run_of(sender(4), [*receives, ("7F7", 12, {})], other)
    assert spans[1, "7F7"] == (0, 16)


def test_the_speed_changes_back_and_forth():
    """Slow to 2, fast to 6, slow to 9, fast: 12 - 4/3 - 4 - 2 = 4 2/3 are left at 9."""
    on_queue = [("1SEND_F0", 0, {"peer": 2, "queue": "q"}), ("1RECV_B0", 0, {"peer": 2, "queue": "q"})]
    third = [("2F5", 6, {}), ("2RECV_F0", 0, {"peer": 1}), ("WAIT(2RECV_F0)", 0, {}),
             ("2B0", 3, {}), ("2SEND_B0", 0, {"peer": 1})]  # fmt: skip
    spans = run_of(sender(2), [RECEIVE, *on_queue, ("7F7", 12, {})], third, model=RENDEZVOUS)
    assert spans[1, "1RECV_F0"] == (0, 2)
    assert spans[1, "1RECV_B0"] == (6, 9)
    assert spans[1, "7F7"] == (0, 14)


def test_waiting_ranks_and_other_ranks_are_not_slowed_down():
    spans = run_of([*sender(5), ("3F3", 4, {})], [RECEIVE, WAIT, ("7F7", 4, {})])
    assert spans[0, "3F3"] == (5, 9)
    assert spans[1, "7F7"] == (5, 9)


def test_a_pair_that_overlaps_is_slowed_down_together():
    pair = {"batch": 0}
    sends = [Row(parse_op("0F0")), Row(parse_op("0SEND_F0"), peer=1)]
    receives = [Row(parse_op("1RECV_F0"), peer=0), Row(parse_op("7F7"), **pair), Row(parse_op("3B3"), **pair)]
    graph = build_graph([sends, receives], (), ())
    durations = Durations((9, 0, 0, 4, 99), 0, 1, overlapped={3: 4}, recv_slowdown=HALF)
    outcome = run_model(graph, durations, EAGER)
    assert (outcome.ends[3], outcome.ends[4]) == (6, 6)


# --- plans ---

some = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
slowdowns = st.sampled_from([Fraction(1, 10), HALF, Fraction(1)])


@st.composite
def plans(draw, recv_order):
    kind, request = draw(requests(max_ranks=4, max_chunks=2))
    generated(kind, request)
    plan = plan_of(kind, request)
    plan["transport"] = {"recv_order": recv_order}
    plan["cost"]["p2p"] = draw(st.sampled_from(["async", "rendezvous"]))
    return lower(plan_from_dict(plan).spec)


def model_of(plan):
    return EAGER if plan.spec.cost.p2p == "async" else RENDEZVOUS


def in_turn(plan):
    """True if every receive is posted just before its own use: no computation of its rank is between."""
    return not any(plan.receives)


@given(plan=plans("just_in_time").filter(in_turn), slowdown=slowdowns)
@some
def test_just_in_time_nothing_changes(plan, slowdown):
    usual = durations_of(plan)
    slowed = replace(usual, recv_slowdown=slowdown)
    outcome = run_model(plan.graph, usual, model_of(plan))
    assert run_model(plan.graph, slowed, model_of(plan)) == outcome
    assert run_fast(plan.graph, slowed, model_of(plan)).outcome(plan.graph) == outcome


@given(plan=plans("prefetch_one"), slowdown=slowdowns)
@some
def test_one_ahead_each_computation_takes_what_the_receives_beside_it_make_of_it(plan, slowdown):
    """Its work is the time without a receive, and the time next to one over 1 + slowdown; a tick is all it may wait."""
    graph, usual = plan.graph, durations_of(plan)
    durations = replace(usual, ticks=tuple(100 * t for t in usual.ticks), latency_ticks=100 * usual.latency_ticks,
                        recv_slowdown=slowdown)  # fmt: skip
    outcome = run_model(graph, durations, model_of(plan))
    kinds = graph.kind.tolist()
    codes = {KIND_CODE[kind] for kind in COMPUTE_KINDS}
    receives = {KIND_CODE[kind] for kind in RECV_KINDS}
    seconds = set(durations.overlapped.values())
    for rank in range(graph.num_ranks):
        busy = [(outcome.starts[i], outcome.ends[i]) for i in graph.rank_ops(rank) if kinds[i] in receives]
        for i in graph.rank_ops(rank):
            if kinds[i] in codes and i not in seconds:
                start, end = outcome.starts[i], outcome.ends[i]
                assert end - start == expected(start, durations.ticks[i], busy, 1 + slowdown)


def expected(start, ticks, busy, slow):
    """The first whole number of ticks in which the work is done, tick by tick."""
    left, now = Fraction(ticks), start
    edges = sorted({time for span in busy for time in span if time > start})
    for edge in [*edges, None]:
        pace = slow if any(begin <= now < end for begin, end in busy) else Fraction(1)
        if edge is None or left * pace <= edge - now:
            return ceil(now + left * pace) - start
        left, now = left - (edge - now) / pace, edge
    raise AssertionError


@given(plan=plans("prefetch_one"))
@some
def test_the_fast_engine_takes_early_receives_that_slow_nothing_down(plan):
    durations = durations_of(plan)
    outcome = run_model(plan.graph, durations, model_of(plan))
    assert run_fast(plan.graph, durations, model_of(plan)).outcome(plan.graph) == outcome


def simulated(recv_order, m=8, backward_us=200, **cost):
    plan = plan_dict(
        schedule={"num_micro_batches": m}, transport={"recv_order": recv_order},
        cost={"forward_us": 100, "backward_us": backward_us, **cost},
    )  # fmt: skip
    return simulate(lower(plan_from_dict(plan).spec))


def test_1f1b_with_receives_one_ahead_on_two_ranks_by_hand():
    """F2 comes in at 500 while B1 runs from 400, which is half done then: everything behind it is 50 later.

    Rank 0 posts the receive of B2's gradient before its own B1, which takes twice as long next to it, and nobody waits.
    """
    plan = {"backward_us": 100, "m": 3}
    assert simulated("just_in_time", recv_slowdown=1, **plan).makespan == 800
    slowed = simulated("prefetch_one", recv_slowdown=1, **plan)
    spans = {span.op: (span.start, span.end) for span in slowed.timeline.spans}
    assert spans["1RECV_F2"] == (400, 500)
    assert spans["1B1"] == (400, 550)
    assert spans["0RECV_B2"] == (550, 750)  # behind the message of B1 on its channel
    assert spans["0B1"] == (550, 750)
    assert (slowed.makespan, slowed.engine) == (850, "simpy")
    assert simulated("prefetch_one", **plan).makespan == 800


def test_a_slowed_computation_ends_with_a_nanosecond():
    slowed = simulated("prefetch_one", recv_slowdown="1/3")
    ends = {span.end * 1000 for span in slowed.timeline.spans}
    assert all(Fraction(end).denominator == 1 for end in ends)
    assert any(Fraction(end, 1000).denominator > 1 for end in ends)


def test_the_fast_engine_refuses_slowed_computations():
    plan = lower(plan_spec(transport={"recv_order": "prefetch_one"}, cost={"recv_slowdown": 0.1}))
    with pytest.raises(NotTimedError, match="slowed down by pending receives"):
        run_fast(plan.graph, durations_of(plan), EAGER)


@pytest.mark.parametrize(
    ("device", "given", "slowdown"),
    [("h200", None, Fraction(14, 100)), ("h200", 0, 0), ("a100", None, None), ("a100", 0.2, Fraction(1, 5))],
)
def test_a_device_has_the_slowdown_that_was_measured_unless_the_plan_says_another(device, given, slowdown):
    cost = {"analytic": device} | ({} if given is None else {"recv_slowdown": given})
    assert lower(plan_spec(cost=cost)).spec.cost.recv_slowdown == slowdown


def test_a_receive_that_nobody_waits_for_slows_down_to_the_end():
    """Its message never comes; the graph is one of the deadlock rules, which the fast engine leaves to the model."""
    spans = run_of([("0F0", 1, {})], [RECEIVE, ("7F7", 4, {})])
    assert spans[1, "7F7"] == (0, 6)
    assert spans[1, "1RECV_F0"] == (0, None)
