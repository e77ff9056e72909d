"""ZB-H2 in exact arithmetic: no idle time within a rank, and the conditions for it."""

from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.zb_h1 import zb_h1
from pipeproof.schedule.generators.zb_h2 import zb_h2
from pipeproof.schedule.ops import OpKind
from tests.schedule.zero_bubble import few, peaks, run, spans, times, uneven_runs

ranks = st.integers(1, 7)
more = st.integers(0, 12)


def idle_per_hop(tf, ti, tw):
    return max(0, ti - tf, tf + ti - 2 * tw)


def makespan_of(p, m, tf, ti, tw):
    return m * (tf + ti + tw) + (p - 1) * max(tf, idle_per_hop(tf, ti, tw))


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
