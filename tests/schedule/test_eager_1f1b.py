"""Eager 1F1B next to its closed form."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.eager_1f1b import eager_1f1b
from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.programs import asap, even_costs

ranks, micro_batches = st.integers(1, 7), st.integers(1, 18)
durations = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6))
shares = st.fractions(0, 1, max_denominator=12)


def makespan(schedule, tf=1, tb=2, c=0):
    return asap(schedule, even_costs(len(schedule.programs), tf, tb, 0, c)).makespan


def closed_form(p, m, tf=1, tb=2, c=0):
    return (m + p - 1) * (tf + tb) + 2 * (p - 1) * c


@given(p=ranks, m=micro_batches, tf=durations, tb=durations, share=shares)
@settings(max_examples=80, deadline=None)
def test_a_transfer_of_up_to_half_a_turn_costs_its_hops_alone(p, m, tf, tb, share):
    c = share * (tf + tb) / 2
    assert makespan(eager_1f1b(p, m), tf, tb, c) == closed_form(p, m, tf, tb, c)


@given(p=ranks, m=micro_batches, tf=durations, tb=durations, c=durations)
@settings(max_examples=60, deadline=None)
def test_peaks_are_those_of_its_warm_up_whatever_the_costs(p, m, tf, tb, c):
    timed = asap(eager_1f1b(p, m), even_costs(p, tf, tb, 0, c))
    assert [timed.peak(rank) for rank in range(p)] == [min(m, 2 * (p - 1 - rank) + 1) for rank in range(p)]


@given(p=ranks, m=micro_batches, tf=durations, tb=durations, c=durations)
@settings(max_examples=60, deadline=None)
def test_it_is_never_slower_than_1f1b(p, m, tf, tb, c):
    assert makespan(eager_1f1b(p, m), tf, tb, c) <= makespan(one_f_one_b(p, m), tf, tb, c)


@pytest.mark.parametrize("m", range(1, 6))
def test_one_rank_takes_forward_and_backward_in_turn(m):
    assert eager_1f1b(1, m) == one_f_one_b(1, m)
