"""The simulated step comes to an end if and only if the deadlock definition says so, under every channel model."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.comm.channel_models import MODELS
from pipeproof.sim.costs import Durations
from pipeproof.sim.model import run_model
from pipeproof.verify.deadlock.events import done, events_of, stuck_events
from tests.verify.test_two_writings import broken_subjects, models, random_graphs

warm = models.map(lambda model: replace(model, connections="warm"))


def never_done(graph, model):
    stuck = set(stuck_events(events_of(graph, model)))
    return {op_id for op_id in range(graph.num_ops) if done(op_id) in stuck}


def without_children(graph, outcome):
    """Operations that have no end, but for computations that only wait for a collective inside them."""
    parents = set(graph.parent.tolist())
    return {op_id for op_id, end in enumerate(outcome.ends) if end is None and op_id not in parents}


@st.composite
def timed(draw, graphs):
    graph = draw(graphs)
    ticks = draw(st.lists(st.integers(0, 3), min_size=graph.num_ops, max_size=graph.num_ops))
    messages = draw(st.lists(st.integers(0, 3), min_size=graph.num_ops, max_size=graph.num_ops))
    return graph, Durations(tuple(ticks), 0, 1, message_ticks=tuple(messages))


@given(one=timed(st.one_of(random_graphs(), broken_subjects().map(lambda one: one.graph))), model=warm)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_what_never_ends_is_what_the_definition_says(one, model):
    graph, durations = one
    outcome = run_model(graph, durations, model)
    parents = set(graph.parent.tolist())
    assert without_children(graph, outcome) == never_done(graph, model) - parents


@given(one=timed(random_graphs()), model=warm)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_hosts_are_stuck_where_something_never_ends(one, model):
    graph, durations = one
    outcome = run_model(graph, durations, model)
    for rank, op_id in enumerate(outcome.stuck_at):
        ends = [outcome.ends[i] for i in graph.rank_ops(rank)]
        assert op_id is None or outcome.ends[op_id] is None
        assert (None in ends) or op_id is None


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_every_model_is_simulated(make_plan, model):
    plan = make_plan(kind="gpipe", p=3, m=3)
    durations = Durations((1,) * plan.graph.num_ops, 2, 1)
    assert (None in run_model(plan.graph, durations, model).ends) == bool(never_done(plan.graph, model))
