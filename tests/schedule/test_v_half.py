"""V-Half in exact arithmetic: its idle time, and for which times it grows with the micro-batches."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.v_half import v_half
from tests.schedule.controllable_memory import time_of_one_more
from tests.schedule.zero_bubble import few, peaks, run, spans, time, times


def test_the_golden_of_four_ranks_and_eight_micro_batches():
    timed = run(v_half(4, 8))
    assert timed.makespan == 53
    assert spans(timed) == [53, 52, 51, 50]
    assert peaks(timed) == [6] * 4


@given(st.integers(3, 16), st.integers(1, 20), time)
@few
def test_idle_time_is_half_of_that_of_1f1b(p, more, t):
    """1F1B on stages of twice the size idles 6 (p - 1) t."""
    m = p // 2 + 1 + more
    assert run(v_half(p, m), t, t, t).makespan == (6 * m + 3 * p - (4 if p % 2 else 7)) * t


def test_two_ranks_idle_more_than_that_formula_and_one_never():
    assert run(v_half(2, 8)).makespan == 49 > 6 * 8 + 3 * 2 - 7
    assert run(v_half(1, 8)).makespan == 48


def test_with_few_micro_batches_the_formula_does_not_hold():
    assert run(v_half(5, 4)).makespan == 6 * 4 + 3 * 5 - 4
    assert run(v_half(5, 3)).makespan == 26 < 6 * 3 + 3 * 5 - 4
    assert run(v_half(6, 1)).makespan == 25 > 6 * 1 + 3 * 6 - 7


@given(st.integers(2, 5), times)
@few
def test_what_a_further_micro_batch_takes(p, even):
    tf, ti, tw = even
    assert time_of_one_more(v_half, p, even) == max(2 * (tf + ti + tw), 4 * tf + tw, 4 * ti + tw)


@pytest.mark.parametrize(("even", "grows"), [((2, 3, 2), 0), ((3, 2, 2), 0), ((2, 4, 2), 2), ((4, 2, 2), 2)])
def test_idle_time_grows_exactly_where_the_papers_condition_fails(even, grows):
    tf, ti, tw = even
    assert (tw + 2 * ti >= 2 * tf and tw + 2 * tf >= 2 * ti) is not bool(grows)
    assert time_of_one_more(v_half, 6, even) == 2 * sum(even) + grows


@pytest.mark.parametrize("p", [2, 3, 6, 7])
def test_with_equal_times_it_bears_latencies_of_half_an_operation(p):
    assert time_of_one_more(v_half, p, (6, 6, 6), latency=3) == 36
    assert time_of_one_more(v_half, p, (6, 6, 6), latency=Fraction(16, 5)) > 36
