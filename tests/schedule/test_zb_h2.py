"""ZB-H2 in exact arithmetic: no idle time within a rank, and what it takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.zb_h1 import zb_h1
from pipeproof.schedule.generators.zb_h2 import zb_h2
from pipeproof.schedule.ops import OpKind
from tests.schedule.zero_bubble import few, peaks, run, spans, time, times, uneven_runs

ranks = st.integers(1, 7)
more = st.integers(0, 12)


def idle_per_hop(tf, ti, tw):
    return max(0, ti - tf, tf + ti - 2 * tw)


def makespan_of(p, m, tf, ti, tw):
    return m * (tf + ti + tw) + (p - 1) * max(tf, idle_per_hop(tf, ti, tw))


@given(ranks, more, time)
@few
def test_with_equal_times_no_rank_idles_between_its_first_and_its_last_operation(p, more, t):
    m = 2 * p - 1 + more
    timed = run(zb_h2(p, m), t, t, t)
    assert spans(timed) == [3 * m * t] * p
    assert timed.makespan == (3 * m + p - 1) * t


@given(ranks, more, times)
@few
def test_spans_and_makespan_for_any_even_times(p, more, even):
    m = 2 * p - 1 + more
    timed = run(zb_h2(p, m), *even)
    assert spans(timed) == [m * sum(even) + (p - 1 - rank) * idle_per_hop(*even) for rank in range(p)]
    assert timed.makespan == makespan_of(p, m, *even)


@given(ranks, more, times)
@few
def test_makespan_with_at_least_as_many_micro_batches_as_ranks(p, more, even):
    (tf, ti, tw), m, n = even, p + more, p - 1
    s = min(more, n)
    assert run(zb_h2(p, m), *even).makespan == m * sum(even) + max(
        n * tf + (n - s) * max(0, ti - tw),
        n * ti - s * tf,
        s * tf + (n - s) * ti,
        n * (tf + ti) - (n + s) * tw,
    )


@pytest.mark.parametrize(
    ("even", "idle"),
    [
        ((1, 1, 1), 0),
        ((3, 2, 3), 0),  # I no longer than F, and both together no longer than two W
        ((2, 3, 4), 3),  # I longer than F: 1 per hop
        ((3, 3, 2), 6),  # the paper's F + I - 2 W: 2 per hop
    ],
)
def test_a_rank_idles_where_input_gradients_are_slow_or_weight_gradients_are_short(even, idle):
    assert spans(run(zb_h2(4, 8), *even))[0] == 8 * sum(even) + idle


@pytest.mark.parametrize(
    ("p", "m", "even", "makespan"),
    [
        (4, 3, (1, 1, 1), 13),  # fewer than ranks: the formula gives 12
        (2, 2, (1, 3, 2), 15),  # one micro-batch fewer than 2p - 1: the formula gives 14
        (3, 4, (1, 4, 3), 39),  # again one fewer: 38
    ],
)
def test_with_fewer_micro_batches_the_formula_for_many_is_too_short(p, m, even, makespan):
    assert run(zb_h2(p, m), *even).makespan == makespan > makespan_of(p, m, *even)


@given(ranks, st.integers(1, 20), st.data())
@few
def test_peaks_are_the_same_for_any_times(p, m, data):
    timed = data.draw(uneven_runs(zb_h2(p, m)))
    spare = max(0, m - p)
    ahead = [min(p - 1 - rank, spare) for rank in range(p)]
    behind = [min(rank, spare) for rank in range(p)]
    assert peaks(timed) == [min(m, p + ahead[rank] + behind[rank]) for rank in range(p)]
    assert peaks(timed, OpKind.BACKWARD_INPUT) == [min(m, p - rank + ahead[rank]) for rank in range(p)]
    if m >= 2 * p - 1:
        assert peaks(timed) == [2 * p - 1] * p


@given(ranks, st.integers(1, 16), times)
@few
def test_it_is_never_slower_than_zb_h1_and_with_no_more_micro_batches_than_ranks_it_is_zb_h1(p, m, even):
    assert run(zb_h2(p, m), *even).makespan <= run(zb_h1(p, m), *even).makespan
    if m <= p:
        assert zb_h2(p, m) == zb_h1(p, m)
