"""V-Min in exact arithmetic: its idle time, and for which times it grows with the micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.v_half import v_half
from pipeproof.schedule.generators.v_min import v_min
from tests.schedule.controllable_memory import time_of_one_more
from tests.schedule.zero_bubble import few, peaks, run, spans, time, times


def test_the_golden_of_four_ranks_and_eight_micro_batches():
    timed = run(v_min(4, 8))
    assert timed.makespan == 59
    assert spans(timed) == [59, 57, 55, 54]
    assert peaks(timed) == [4] * 4


@given(st.integers(3, 16), st.integers(1, 20), time)
@few
def test_idle_time_is_two_thirds_of_that_of_1f1b(p, more, t):
    """1F1B on stages of twice the size idles 6 (p - 1) t."""
    m = (p + 4) // 3 + more
    less = {0: 7, 1: 5, 2: 9}[p % 3]
    assert run(v_min(p, m), t, t, t).makespan == (6 * m + 4 * p - less) * t


def test_two_ranks_and_one_idle_less_than_nothing_of_that_formula():
    assert run(v_min(2, 8)).makespan == 49
    assert run(v_min(1, 8)).makespan == 48


def test_with_few_micro_batches_the_formula_does_not_hold():
    assert run(v_min(6, 4)).makespan == 6 * 4 + 4 * 6 - 7
    assert run(v_min(6, 3)).makespan == 29 < 6 * 3 + 4 * 6 - 7
    assert run(v_min(2, 1)).makespan == 9 > 6 * 1 + 1


@given(st.integers(3, 5), times)
@few
def test_what_a_further_micro_batch_takes(p, even):
    tf, ti, tw = even
    assert time_of_one_more(v_min, p, even) == max(2 * (tf + ti + tw), 6 * tf, 6 * ti)


def test_with_two_ranks_it_may_take_less():
    assert time_of_one_more(v_min, 2, (6, 7, 7)) == 41 < 6 * 7


@pytest.mark.parametrize(
    ("even", "grows"), [((2, 3, 4), 0), ((3, 2, 4), 0), ((2, 2, 9), 0), ((2, 3, 3), 2), ((3, 2, 3), 2)]
)
def test_idle_time_grows_where_weight_gradients_do_not_fill_the_difference(even, grows):
    assert time_of_one_more(v_min, 6, even) == 2 * sum(even) + grows


def test_unequal_times_and_latency_cost_v_half_nothing_that_grows():
    for even, latency in (((10, 12, 9), 0), ((10, 10, 10), 5)):
        assert time_of_one_more(v_half, 6, even, latency) == 2 * sum(even) < time_of_one_more(v_min, 6, even, latency)


@given(st.integers(2, 4), times, time)
@few
def test_with_latency_idle_time_grows_for_any_times(p, even, latency):
    assert time_of_one_more(v_min, p, even, latency) > 2 * sum(even)
