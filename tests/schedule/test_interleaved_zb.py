"""Interleaved zero bubble in exact arithmetic, and next to PyTorch's own."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeproof.schedule.generators.interleaved_zb import interleaved_zb
from pipeproof.schedule.generators.zb_h1 import zb_h1
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import UnfitSizesError
from tests.schedule.zero_bubble import few, peaks, pytorch_texts, run, texts, times, uneven_runs

ranks = st.integers(1, 6)
chunks = st.integers(2, 4)


def fits(p, m):
    return m % max(1, m // p) == 0


def makespan_of(p, m, v, tf, ti, tw):
    return v * m * (tf + ti + tw) + (p - 1) * max(tf, ti, tf + ti - tw)


def test_the_golden_of_four_ranks_eight_micro_batches_and_two_chunks():
    timed = run(interleaved_zb(4, 8, 2))
    assert timed.makespan == 51
    assert peaks(timed) == [8, 8, 8, 8]
    assert peaks(timed, OpKind.BACKWARD_INPUT) == [8, 7, 6, 5]


@given(ranks, st.integers(0, 12), chunks, times)
@few
def test_makespan_with_at_least_as_many_micro_batches_as_ranks(p, more, v, even):
    m = p + more
    assume(fits(p, m))
    tf, ti, tw = even
    makespan = run(interleaved_zb(p, m, v), *even).makespan
    assert makespan == makespan_of(p, m, v, *even)
    if tf >= min(ti, tw):
        assert makespan == v * m * sum(even) + (p - 1) * (tf + max(0, ti - tw))  # the published form


@given(ranks, st.integers(1, 16), chunks, st.data())
@few
def test_peaks_are_the_same_for_any_times(p, m, v, data):
    assume(fits(p, m))
    timed = data.draw(uneven_runs(interleaved_zb(p, m, v)))
    ahead = (v - 1) * (m // max(1, m // p))
    assert peaks(timed) == [min(v * m, ahead + p)] * p
    assert peaks(timed, OpKind.BACKWARD_INPUT) == [min(v * m, ahead + p - rank) for rank in range(p)]
    if m % p == 0:
        assert peaks(timed) == [v * p] * p


@given(ranks, st.integers(1, 24))
@few
def test_one_chunk_is_zb_h1(p, m):
    assume(fits(p, m))
    assert interleaved_zb(p, m, 1) == zb_h1(p, m)


@given(st.integers(1, 12), st.integers(1, 200))
@few
def test_it_names_the_nearest_numbers_that_fit_and_refuses_no_other(p, m):
    if fits(p, m):
        interleaved_zb(p, m, 1)
    else:
        below = max(n for n in range(1, m) if fits(p, n))
        above = next(n for n in range(m, 400) if fits(p, n))
        with pytest.raises(UnfitSizesError) as refused:
            interleaved_zb(p, m, 1)
        assert refused.value.help == f"use {below} or {above}"


@pytest.mark.needs_torch
def test_it_is_pytorchs_over_a_grid():
    for p in range(1, 7):
        for m in range(1, 3 * p + 2):
            for v in range(1, 5):
                if fits(p, m):
                    theirs = pytorch_texts("ScheduleInterleavedZeroBubble", p, m, v)
                    assert texts(interleaved_zb(p, m, v)) == theirs
