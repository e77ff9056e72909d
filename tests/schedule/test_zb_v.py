"""ZB-V in exact arithmetic, next to PyTorch's own and ZB-H1 on stages of twice the size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.zb_h1 import zb_h1
from pipeproof.schedule.generators.zb_v import zb_v
from pipeproof.schedule.ops import OpKind
from tests.schedule.zero_bubble import few, peaks, pytorch_texts, run, spans, texts, time, times, uneven_runs

ranks = st.integers(1, 7)


def idle_of(p, tf, ti, tw):
    """The makespan minus the work of a rank, for at least 2p - 1 micro-batches and two ranks."""
    n = p - 1
    return max(
        n * ti,
        2 * n * (ti - tw),
        max(tf, ti) + (n - 1) * tw,
        (2 * n - 1) * tf - (n - 1) * ti + max(0, tf - ti - tw) + n * max(0, ti - 2 * tw),
    )


@given(ranks, st.integers(0, 12), time)
@few
def test_with_equal_times_no_rank_idles_between_its_first_and_its_last_operation(p, more, t):
    m = 2 * p - 1 + more
    timed = run(zb_v(p, m), t, t, t)
    assert spans(timed) == [6 * m * t] * p
    assert timed.makespan == (6 * m + p - 1) * t


@given(ranks, st.integers(1, 20), time)
@few
def test_makespan_with_equal_times_for_any_sizes(p, m, t):
    assert run(zb_v(p, m), t, t, t).makespan == max(6 * m + p - 1, 4 * m + 4 * p - 2) * t


@given(st.integers(2, 7), st.integers(0, 10), times)
@few
def test_makespan_with_any_even_times(p, more, even):
    m = 2 * p - 1 + more
    assert run(zb_v(p, m), *even).makespan == 2 * m * sum(even) + idle_of(p, *even)


@given(ranks, st.integers(1, 20), st.data())
@few
def test_peaks_are_the_same_for_any_times(p, m, data):
    timed = data.draw(uneven_runs(zb_v(p, m)))
    for freed_at in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT):
        assert peaks(timed, freed_at) == [min(2 * p, m + 1 + rank, 2 * m) for rank in range(p)]


def test_zb_h1_on_stages_of_twice_the_size_is_faster_where_weight_gradients_are_slow():
    assert run(zb_v(4, 8), 1, 1, 1).makespan == 51 < run(zb_h1(4, 8), 2, 2, 2).makespan == 54
    assert run(zb_v(4, 8), 1, 1, 10).makespan == 213 > run(zb_h1(4, 8), 2, 2, 20).makespan == 198


@pytest.mark.needs_torch
def test_it_is_pytorchs_over_a_grid():
    for p in range(1, 8):
        for m in range(1, 4 * p + 1):
            assert texts(zb_v(p, m)) == pytorch_texts("ScheduleZBVZeroBubble", p, m, 2)
