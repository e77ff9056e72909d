"""V-Half and V-Min in exact arithmetic: their idle time, and for which times it grows with the micro-batches."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.v_half import v_half
from pipeproof.schedule.generators.v_min import v_min
from tests.schedule.controllable_memory import time_of_one_more
from tests.schedule.zero_bubble import few, peaks, run, spans, time, times


@pytest.mark.parametrize(
    ("kind", "spans_of_ranks", "peak"), [(v_half, [53, 52, 51, 50], 6), (v_min, [59, 57, 55, 54], 4)]
)
def test_the_goldens_of_four_ranks_and_eight_micro_batches(kind, spans_of_ranks, peak):
    timed = run(kind(4, 8))
    assert timed.makespan == spans_of_ranks[0]
    assert spans(timed) == spans_of_ranks
    assert peaks(timed) == [peak] * 4


@given(st.integers(3, 16), st.integers(1, 20), time)
@few
def test_idle_time_is_half_and_two_thirds_of_that_of_1f1b(p, more, t):
    """1F1B on stages of twice the size idles 6 (p - 1) t."""
    m = p // 2 + 1 + more
    assert run(v_half(p, m), t, t, t).makespan == (6 * m + 3 * p - (4 if p % 2 else 7)) * t
    m = (p + 4) // 3 + more
    assert run(v_min(p, m), t, t, t).makespan == (6 * m + 4 * p - {0: 7, 1: 5, 2: 9}[p % 3]) * t


@pytest.mark.parametrize("kind", [v_half, v_min])
def test_one_rank_idles_never_and_two_ranks_do_not_follow_the_formulas(kind):
    """The formulas give 47 for V-Half and 47 for V-Min on two ranks."""
    assert run(kind(1, 8)).makespan == 48
    assert run(kind(2, 8)).makespan == 49


@pytest.mark.parametrize(
    ("kind", "p", "m", "makespan", "by_formula"),
    [
        (v_half, 5, 4, 35, 6 * 4 + 3 * 5 - 4),
        (v_half, 5, 3, 26, 6 * 3 + 3 * 5 - 4),
        (v_half, 6, 1, 25, 6 * 1 + 3 * 6 - 7),
        (v_min, 6, 4, 41, 6 * 4 + 4 * 6 - 7),
        (v_min, 6, 3, 29, 6 * 3 + 4 * 6 - 7),
        (v_min, 2, 1, 9, 6 * 1 + 1),
    ],
)
def test_with_few_micro_batches_the_formulas_do_not_hold(kind, p, m, makespan, by_formula):
    assert run(kind(p, m)).makespan == makespan
    assert (makespan == by_formula) == (m == 4)


@given(st.integers(2, 5), times)
@few
def test_what_a_further_micro_batch_takes(p, even):
    tf, ti, tw = even
    assert time_of_one_more(v_half, p, even) == max(2 * (tf + ti + tw), 4 * tf + tw, 4 * ti + tw)
    if p > 2:
        assert time_of_one_more(v_min, p, even) == max(2 * (tf + ti + tw), 6 * tf, 6 * ti)


def test_with_two_ranks_it_may_take_less_in_v_min():
    assert time_of_one_more(v_min, 2, (6, 7, 7)) == 41 < 6 * 7


@pytest.mark.parametrize(("even", "grows"), [((2, 3, 2), 0), ((3, 2, 2), 0), ((2, 4, 2), 2), ((4, 2, 2), 2)])
def test_idle_time_of_v_half_grows_exactly_where_the_papers_condition_fails(even, grows):
    tf, ti, tw = even
    assert (tw + 2 * ti >= 2 * tf and tw + 2 * tf >= 2 * ti) is not bool(grows)
    assert time_of_one_more(v_half, 6, even) == 2 * sum(even) + grows


@pytest.mark.parametrize(
    ("even", "grows"), [((2, 3, 4), 0), ((3, 2, 4), 0), ((2, 2, 9), 0), ((2, 3, 3), 2), ((3, 2, 3), 2)]
)
def test_idle_time_of_v_min_grows_where_weight_gradients_do_not_fill_the_difference(even, grows):
    assert time_of_one_more(v_min, 6, even) == 2 * sum(even) + grows


@pytest.mark.parametrize("p", [2, 3, 6, 7])
def test_with_equal_times_v_half_bears_latencies_of_half_an_operation(p):
    assert time_of_one_more(v_half, p, (6, 6, 6), latency=3) == 36
    assert time_of_one_more(v_half, p, (6, 6, 6), latency=Fraction(16, 5)) > 36


def test_unequal_times_and_latency_cost_v_half_nothing_that_grows():
    for even, latency in (((10, 12, 9), 0), ((10, 10, 10), 5)):
        assert time_of_one_more(v_half, 6, even, latency) == 2 * sum(even) < time_of_one_more(v_min, 6, even, latency)


@given(st.integers(2, 4), times, time)
@few
def test_with_latency_idle_time_of_v_min_grows_for_any_times(p, even, latency):
    assert time_of_one_more(v_min, p, even, latency) > 2 * sum(even)
