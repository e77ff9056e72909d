"""Looped breadth-first next to its closed form, and on any placement."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.looped_bfs import looped_bfs
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, asap, even_costs

sizes = {"p": st.integers(1, 6), "v": st.integers(1, 4), "m": st.integers(1, 13)}
durations = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6))
few = settings(max_examples=60, deadline=None)


def run(p, m, v, tf=1, tb=2, c=0):
    return asap(looped_bfs(p, m, v), even_costs(p * v, tf, tb, 0, c))


def closed_form(p, m, v, tf=1, tb=2):
    return (v * m + p - 1) * (tf + tb)


@given(p=st.integers(1, 6), v=st.integers(1, 4), more=st.integers(0, 8), tf=durations, tb=durations)
@few
def test_with_as_many_micro_batches_as_ranks_and_no_latency_only_the_pipeline_fill_is_lost(p, v, more, tf, tb):
    timed = run(p, p + more, v, tf, tb)
    assert timed.makespan == closed_form(p, p + more, v, tf, tb)
    assert [timed.peak(rank) for rank in range(p)] == [v * (p + more)] * p


@given(**sizes, tf=durations, tb=durations, c=durations)
@few
def test_in_general_a_stage_follows_the_one_before_it_on_its_rank_when_that_or_the_way_around_is_done(
    p, v, m, tf, tb, c
):
    hop = c if p > 1 else 0

    def one_way(time):
        return (v - 1) * max(m * time, p * (time + hop)) + (m + p - 1) * time + (p - 1) * c

    assert run(p, m, v, tf, tb, c).makespan == one_way(tf) + one_way(tb)


def test_goldens():
    timed = run(4, 8, 2)
    assert timed.makespan == 57
    assert [timed.peak(rank) for rank in range(4)] == [16] * 4


def test_the_closed_form_ends_with_fewer_micro_batches_than_ranks_and_with_latency():
    assert run(4, 4, 2).makespan == closed_form(4, 4, 2) == 33
    assert run(4, 3, 2).makespan == 30 != closed_form(4, 3, 2)
    assert run(4, 4, 2, c=Fraction(1, 2)).makespan > closed_form(4, 4, 2)


placements = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(
    lambda ranks: tuple(
        tuple(stage for stage, of in enumerate(ranks) if of == rank) for rank in range(4) if rank in ranks
    )
)


@given(placement=placements, m=st.integers(1, 5), data=st.data())
@few
def test_any_placement_runs_each_stage_on_its_rank_and_finishes(placement, m, data):
    num_stages = sum(map(len, placement))
    schedule = SCHEDULE_KINDS["looped_bfs"].generate(Request(len(placement), m, placement=placement))
    for stages, program in zip(placement, schedule.programs, strict=True):
        forwards = [(stage, batch) for stage in sorted(stages) for batch in range(m)]
        ops = [(op.kind, op.stage, op.micro_batch) for op in program]
        assert ops == [
            *((OpKind.FORWARD, *pair) for pair in forwards),
            *((OpKind.BACKWARD, *pair) for pair in reversed(forwards)),
        ]
    times = st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages)
    forward, backward = data.draw(times), data.draw(times)
    timed = asap(schedule, StageCosts(forward, backward, [0] * num_stages, data.draw(st.integers(0, 9))))
    work = [m * sum(forward[stage] + backward[stage] for stage in stages) for stages in placement]
    assert [timed.busy(rank) for rank in range(len(placement))] == work
    assert timed.makespan >= max(work)
