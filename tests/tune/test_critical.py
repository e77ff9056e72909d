"""The critical path has no gaps, and its operations decide the makespan."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.tune.critical_path import critical_path
from pipeproof.analysis.tune.step_clock import simulated_clock
from pipeproof.comm.lower import lower
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.programs import StageCosts, Timed, UnfitSizesError, asap, even_costs
from tests.tune.plans import four_ranks, loaded

PROMPT = settings(deadline=None, max_examples=60)
TIMES = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=4)


def generated(name, num_ranks, num_micro_batches):
    """A schedule with as few chunks as it takes, or None where it does not exist."""
    kind = SCHEDULE_KINDS[name]
    splits = 2 if kind.splits_sequences else 1
    placement = tuple(tuple(chunk * num_ranks + rank for chunk in range(kind.min_chunks)) for rank in range(num_ranks))
    request = Request(num_ranks, num_micro_batches, kind.min_chunks, splits, placement=placement)
    try:
        return kind.generate(request)
    except UnfitSizesError:
        return None


@st.composite
def timed_schedules(draw):
    """(schedule, costs) with costs of their own for every stage, and a latency."""
    names = st.sampled_from(sorted(SCHEDULE_KINDS))
    sizes = st.tuples(names, st.integers(1, 4), st.integers(1, 9))
    schedule = draw(sizes.map(lambda size: generated(*size)).filter(lambda made: made is not None))
    num_stages = 1 + max(op.stage for program in schedule.programs for op in program)
    rows = [tuple(draw(TIMES) for _ in range(num_stages)) for _ in range(3)]
    return schedule, StageCosts(*rows, latency=draw(st.sampled_from([0, Fraction(1, 2), 3])))


@PROMPT
@given(timed_schedules())
def test_the_parts_of_the_path_are_the_makespan(made):
    schedule, costs = made
    timed = asap(schedule, costs)
    path = critical_path(timed, costs.latency)
    assert sum(path.compute.values()) + sum(path.messages.values()) == timed.makespan == path.makespan
    assert not path.held_up
    assert path.warm_up + path.steady + path.cool_down == path.makespan
    assert sum(path.compute.values()) + path.waiting == path.makespan
    assert path.steady >= path.compute[path.rank] == max(path.compute.values())
    assert bool(path.messages) == (path.edge is not None)


@PROMPT
@given(timed_schedules(), st.sampled_from([Fraction(1, 8), 1, 10]))
def test_messages_on_the_path_lengthen_the_step_as_often_as_they_are_there(made, more):
    schedule, costs = made
    timed = asap(schedule, costs)
    slower = StageCosts(costs.forward, costs.backward_input, costs.backward_weight, costs.latency + more)
    path = critical_path(timed, costs.latency)
    crossings = Fraction(sum(path.messages.values())) / (costs.latency or 1)
    assert crossings.denominator == 1
    assert asap(schedule, slower).makespan >= timed.makespan + crossings * more


@PROMPT
@given(timed_schedules(), st.sampled_from([Fraction(1, 8), 1, 10]))
def test_a_slower_critical_rank_lengthens_the_step_by_all_its_work_on_the_path(made, factor):
    """If each stage is on one rank, its times can be lengthened separately."""
    schedule, costs = made
    path = critical_path(asap(schedule, costs), costs.latency)
    mine = {op.stage for op in schedule.programs[path.rank]}
    others = {op.stage for rank, p in enumerate(schedule.programs) if rank != path.rank for op in p}
    if mine & others:
        return
    rows = [
        tuple(time * (1 + factor) if stage in mine else time for stage, time in enumerate(row))
        for row in (costs.forward, costs.backward_input, costs.backward_weight)
    ]
    slower = asap(schedule, StageCosts(*rows, latency=costs.latency))
    assert slower.makespan >= path.makespan + factor * path.compute[path.rank]


def test_1f1b_is_the_last_ranks_work_between_warm_up_and_cool_down():
    path = critical_path(asap(generated("1f1b", 4, 8), even_costs(4)), 0)
    assert (path.makespan, path.rank, path.warm_up, path.steady, path.cool_down) == (33, 3, 3, 24, 6)
    assert path.compute == {0: 3, 1: 3, 2: 3, 3: 24}
    assert path.edge is None


def test_a_slow_stage_is_the_critical_rank():
    slow = StageCosts((1, 1, 3, 1), (1, 1, 3, 1), (1, 1, 3, 1))
    for name in ("gpipe", "1f1b"):
        path = critical_path(asap(generated(name, 4, 8), slow), 0)
        assert path.rank == 2
        assert path.compute[2] > path.makespan / 2


def test_1f1b_waits_for_a_message_in_each_direction_again_and_again():
    costs = even_costs(4, latency=5)
    path = critical_path(asap(generated("1f1b", 4, 8), costs), 5)
    assert path.makespan == 33 + 2 * 5 * (3 + 7 * 3 // 4)
    assert path.waiting == path.makespan - 33
    assert path.edge == (1, 2)


def test_of_two_that_overlap_the_pair_counts_once():
    schedule = generated("dualpipe_v", 2, 8)
    assert any(schedule.pairs)
    costs = even_costs(4)
    pairs = StageCosts(costs.forward, costs.backward_input, costs.backward_weight, 0, overlapped=(2,) * 4)
    timed = asap(schedule, pairs)
    path = critical_path(timed, 0)
    assert sum(path.compute.values()) == timed.makespan < asap(schedule, costs).makespan


def test_sends_that_wait_for_their_receives_hold_ranks_up():
    plan = loaded(four_ranks(cost={"p2p_latency_us": 1, "p2p": "rendezvous"})).spec
    clock = simulated_clock(lower(plan))
    path = clock.path()
    parts = (path.compute, path.messages, path.held_up)
    assert path.makespan == 52
    assert sum(sum(part.values()) for part in parts) == 52
    assert path.held_up


def test_nothing_has_no_path():
    with pytest.raises(ValueError, match="without operations"):
        critical_path(Timed(((),), ((),), ((),)), 0)
