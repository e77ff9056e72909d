"""Sensitivity of a step to delays, exactly."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.jitter.delays import Delay, costliest, delays_of
from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

few = settings(max_examples=30, deadline=None)


@given(p=st.integers(1, 6), more=st.integers(0, 6), tf=st.integers(1, 9), tb=st.integers(1, 9))
@few
def test_a_late_rank_of_1f1b(make_plan, p, more, tf, tb):
    """The step feels m F and B of rank s, less what falls into its two idle times behind p - 1 - s ranks.

    All stages are equal, so that any rank that is 1 % slower is the slowest: (s + f m)(tf + tb) and twice
    (p - 1 - s) times what is idle, see ``test_jitter``, for f = 1.01.
    """
    m = p + more
    delays = delays_of(make_plan(p=p, m=m, tf=tf, tb=tb))
    assert delays.undisturbed == (m + p - 1) * (tf + tb)
    for rank, delay in enumerate(delays.ranks):
        assert delay.where == str(rank)
        assert delay.added_us == Fraction(m * (tf + tb), 100)
        assert delay.step_us == Fraction((m - (p - 1 - rank)) * (tf + tb), 100)
        assert delay.sensitivity == Fraction(m - (p - 1 - rank), m)
    assert [delay.where for delay in costliest(delays.ranks)] == [str(p - 1)]


@given(p=st.integers(2, 6), m=st.integers(1, 9), t=st.integers(1, 9))
@few
def test_a_late_channel_of_gpipe(make_plan, p, m, t):
    """Each channel is passed once on the way up and once on the way down: one message of m is felt."""
    delays = delays_of(make_plan(kind="gpipe", p=p, m=m, tf=t, tb=t))
    assert len(delays.channels) == 2 * (p - 1)
    for delay in delays.channels:
        assert (delay.added_us, delay.step_us) == (Fraction(m * t, 100), Fraction(t, 100))
        assert delay.sensitivity == Fraction(1, m)
    assert len(costliest(delays.channels)) == len(delays.channels)


def test_delays_are_differences_of_two_simulations(run, make_plan):
    options = {"p": 3, "m": 5, "tb": [7, 3, 4], "c": Fraction(1, 3)}
    delays = delays_of(make_plan(tf=[2, 3, 5], **options))
    late = run(tf=[2, Fraction(303, 100), 5], **options | {"tb": [7, Fraction(303, 100), 4]})
    assert delays.undisturbed == run(tf=[2, 3, 5], **options).makespan
    assert delays.undisturbed + delays.ranks[1].step_us == late.makespan
    assert delays.ranks[1].added_us == Fraction(5 * 6, 100)


def test_replicas_are_late_together():
    plan = lower(plan_from_dict(plan_dict(topology={"tp": 2, "dp": 2})).spec)
    assert plan.graph.num_ranks == 8
    delays = delays_of(plan)
    assert [delay.where for delay in delays.ranks] == ["0", "4"]
    assert [delay.where for delay in delays.channels] == ["forward 0->4", "backward 4->0"]
    assert delays.undisturbed == simulate(plan).makespan


def test_the_pair_of_an_overlap_is_counted_once():
    plan = plan_dict(
        topology={"pp": 2},
        schedule={"kind": "dualpipe", "num_micro_batches": 4},
        cost={"forward_us": 100, "backward_us": 200, "overlapped_us": 250},
    )
    lowered = lower(plan_from_dict(plan).spec)
    assert simulate(lowered).timeline
    for delay, figures in zip(delays_of(lowered).ranks, simulate(lowered).figures, strict=True):
        assert delay.added_us == figures.busy_us / 100


def test_one_rank_alone_has_no_channels(make_plan):
    delays = delays_of(make_plan(p=1, m=2))
    assert (len(delays.ranks), delays.channels) == (1, ())
    assert costliest(delays.channels) == ()


@pytest.mark.parametrize(("steps", "found"), [([0, 0], []), ([1, 2, 2], ["b", "c"]), ([], [])])
def test_costliest(steps, found):
    delays = [Delay(name, Fraction(4), Fraction(step)) for name, step in zip("abc", steps, strict=False)]
    assert [delay.where for delay in costliest(delays)] == found


def test_what_adds_nothing_is_not_felt():
    assert Delay("a", Fraction(0), Fraction(0)).sensitivity == 0
