"""The simulated step comes to an end if and only if the deadlock definition says so, under every channel model."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.schedule.op_table import NONE, Row, build_graph
from pipeproof.schedule.ops import COMPUTE_KINDS, parse_op
from pipeproof.sim.op_durations import Durations
from pipeproof.sim.simpy_model import run_model
from tests.verify.deadlock_definition import done, events_of, stuck_events
from tests.verify.programs import program, tensor
from tests.verify.test_two_writings import broken_subjects, models, random_rows

warm = models.map(lambda model: replace(model, connections="warm"))


def never_done(graph, model):
    stuck = set(stuck_events(events_of(graph, model)))
    return {op_id for op_id in range(graph.num_ops) if done(op_id) in stuck}


def without_children(graph, outcome):
    """Operations that have no end, but for computations that only wait for a collective inside them."""
    parents = set(graph.parent.tolist())
    return {op_id for op_id, end in enumerate(outcome.ends) if end is None and op_id not in parents}


@st.composite
def graphs_that_compute(draw):
    """Random graphs with computations between and inside of their calls; waits, too, may be members of calls."""
    rows, tensors, groups = draw(random_rows())
    batches = st.sampled_from([NONE, 0, 1])
    for k in range(draw(st.integers(0, 2))):
        mine = rows[draw(st.integers(0, len(rows) - 1))]
        mine.insert(draw(st.integers(0, len(mine))), Row(parse_op(f"0F{k}"), batch=draw(batches)))
    waits = [(mine, place) for mine in rows for place, row in enumerate(mine) if row.op.target is not None]
    if waits:
        mine, place = draw(st.sampled_from(waits))
        mine[place] = replace(mine[place], batch=draw(batches))
    return build_graph(rows, tensors, groups)


def beside(graph):
    """Computations of one batch as pairs, a computation in one pair at most."""
    open_, pairs = {}, {}
    for op_id in range(graph.num_ops):
        if graph.ops[op_id].kind in COMPUTE_KINDS and graph.batch[op_id] != NONE:
            first = open_.pop((graph.rank[op_id], graph.batch[op_id]), None)
            if first is None:
                open_[graph.rank[op_id], graph.batch[op_id]] = op_id
            else:
                pairs[first] = op_id
    return pairs


@st.composite
def timed(draw, graphs):
    graph = draw(graphs)
    ticks = draw(st.lists(st.integers(0, 3), min_size=graph.num_ops, max_size=graph.num_ops))
    messages = draw(st.lists(st.integers(0, 3), min_size=graph.num_ops, max_size=graph.num_ops))
    return graph, Durations(tuple(ticks), 0, 1, beside(graph), tuple(messages))


@given(one=timed(st.one_of(graphs_that_compute(), broken_subjects().map(lambda one: one.graph))), model=warm)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_what_never_ends_is_what_the_definition_says(one, model):
    graph, durations = one
    outcome = run_model(graph, durations, model)
    parents = set(graph.parent.tolist())
    assert without_children(graph, outcome) == never_done(graph, model) - parents


@given(one=timed(graphs_that_compute()), model=warm)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_hosts_are_stuck_where_something_never_ends(one, model):
    graph, durations = one
    outcome = run_model(graph, durations, model)
    for rank, op_id in enumerate(outcome.stuck_at):
        ends = [outcome.ends[i] for i in graph.rank_ops(rank)]
        assert op_id is None or outcome.ends[op_id] is None
        assert (None in ends) or op_id is None


ORDER = ["0SEND_F0{peer=1 %s} 0SEND_F1{peer=1} 0SEND_F2{peer=1 %s}",
         "1RECV_F0{peer=0 %s} 1RECV_F1{peer=0} 1RECV_F2{peer=0 %s}"]  # fmt: skip


@pytest.mark.parametrize("ends", [("batch=0", ""), ("", "batch=0"), ("batch=0", "batch=0")])
def test_a_call_that_is_closed_behind_a_later_message_of_its_channel_never_ends(ends):
    """Not where it receives either, nor where each send has a buffer: the peer would get one message for another."""
    texts = [text % (batch, batch) for text, batch in zip(ORDER, ends, strict=True)]
    graph = program(*texts, tensors=[tensor()]).graph
    inside = {op_id for op_id in range(graph.num_ops) if graph.batch[op_id] != NONE}
    for model in (*MODELS, ChannelModel("directed_edge", "eager")):
        outcome = run_model(graph, Durations((0,) * graph.num_ops, 1, 1), model)
        stuck = {op_id for op_id, end in enumerate(outcome.ends) if end is None}
        assert set() < inside <= stuck == never_done(graph, model)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_every_model_is_simulated(make_plan, model):
    plan = make_plan(kind="gpipe", p=3, m=3)
    durations = Durations((1,) * plan.graph.num_ops, 2, 1)
    assert (None in run_model(plan.graph, durations, model).ends) == bool(never_done(plan.graph, model))
