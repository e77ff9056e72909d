"""A fake world hangs if and only if the verifier's definition says so, under every channel model, at the same times."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from pipeproof.comm.channel_models import MODELS
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.sim.op_durations import Durations
from pipeproof.sim.simpy_model import run_model
from pipeproof.testing.fake.fake_operations import DeadlockError, NeverComesError, UnmatchedError
from pipeproof.testing.fake.fake_rank import FakeWorld
from pipeproof.verify.deadlock.deadlock_verdict import deadlocks
from pipeproof.verify.deadlock.events import events_of, stuck_events
from tests.testing.fake_programs import models, programs

NETWORK = {"ranks_per_node": 2, "node": {"bandwidth": 1, "latency_us": 1}, "between": {"bandwidth": 0.5}}


def world_of(program, model, network=None):
    return FakeWorld(len(program.ranks), semantics=model, network=network, groups=program.groups)


@settings(max_examples=500)
@given(programs(), models)
def test_balanced_programs_deadlock_exactly_where_the_definition_has_a_cycle(program, model):
    graph = program.graph()
    try:
        run = world_of(program, model).run(program.run_rank)
    except DeadlockError:
        assert deadlocks(graph, model)
    else:
        assert not stuck_events(events_of(graph, model))
        assert run.values == tuple(range(len(program.ranks)))


@settings(max_examples=300)
@given(programs(balanced=False), models)
def test_programs_that_lack_something_fail_exactly_where_something_never_happens_or_is_left_over(program, model):
    graph = program.graph()
    counts = Counter()
    for op_id in range(graph.num_ops):
        if graph.channel[op_id] != NONE:
            counts[int(graph.channel[op_id])] += 1 if graph.ops[op_id].kind is OpKind.SEND_FORWARD else -1
    stuck = bool(stuck_events(events_of(graph, model)))
    try:
        world_of(program, model).run(program.run_rank)
    except (DeadlockError, NeverComesError):
        assert stuck
    except UnmatchedError:
        assert any(counts.values())
    else:
        assert not stuck
        assert not any(counts.values())


@settings(max_examples=300)
@given(programs(), models)
def test_the_recorded_graph_is_the_program_and_its_times_are_the_simulators(program, model):
    model = replace(model, connections="warm")
    try:
        run = world_of(program, model, NETWORK).run(program.run_rank)
    except DeadlockError:
        return
    graph, written = run.graph, program.graph()
    for column in ("rank", "peer", "position", "group", "waits_for", "match"):
        assert getattr(graph, column).tolist() == getattr(written, column).tolist(), column
    assert not deadlocks(graph, model)
    nanoseconds = [0] * graph.num_ops
    messages = [0] * graph.num_ops
    ops = run.recorded.ops
    for op_id, op in enumerate(ops):
        if op is not None and graph.ops[op_id].kind in COMPUTE_KINDS:
            nanoseconds[op_id] = int(op.duration_us * 1000)
        elif op is not None and graph.group[op_id] != NONE:
            steps = 2 * (len(op.group.ranks) - 1)
            nanoseconds[op_id] = 1000 * steps  # a barrier is a ring of the slowest latency, that inside the node
        elif op is not None and op.is_send:
            crosses = op.rank // 2 != op.peer // 2
            messages[op_id] = 2 * op.num_bytes if crosses else 1000 + op.num_bytes
    outcome = run_model(graph, Durations(tuple(nanoseconds), 0, 1000, message_ticks=tuple(messages)), model)
    expected = [(outcome.starts[i], outcome.ends[i]) for i, op in enumerate(ops) if op is not None]
    assert [(one.start_us * 1000, one.end_us * 1000) for one in run.timeline] == expected
    assert run.makespan_us * 1000 == max((end for end in outcome.ends), default=0)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_two_that_both_send_first_under_every_model(model):
    def program(rank):
        rank.send([1.0, 2.0], 1 - rank.rank)
        return rank.recv(1 - rank.rank).tolist()

    world = FakeWorld(2, semantics=model)
    buffered = model.completes != "rendezvous"
    if buffered:
        assert world.run(program).values == ([1.0, 2.0], [1.0, 2.0])
    else:
        with pytest.raises(DeadlockError):
            world.run(program)
    assert (model in world.failing_models(program)) == (not buffered)
