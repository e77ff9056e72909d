"""Chimera: its authors' order, its times and peaks in exact arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.chimera import chimera
from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import StageCosts, UnfitSizesError, asap, even_costs
from tests.schedule.originators import actions, recorded

positive = st.builds(Fraction, st.integers(1, 12), st.integers(1, 4))
even_ranks = st.integers(1, 5).map(lambda half: 2 * half)
few = settings(max_examples=60, deadline=None)


def run(p, m, tf, tb, c=0):
    return asap(chimera(p, m), even_costs(p, tf, tb, 0, c))


def makespan(p, num_units, tf, tb):
    return num_units * p * (tf + tb) + (p - 2) * (max(tf, tb) + (num_units - 1) * abs(tb - tf))


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "programs"), recorded("chimera"))
def test_the_order_is_that_of_the_authors_code(num_ranks, num_micro_batches, programs):
    assert actions(chimera(num_ranks, num_micro_batches)) == programs


@given(p=even_ranks, m=st.integers(1, 30))
@few
def test_half_of_each_unit_enters_at_each_end(p, m):
    programs = chimera(p, m).programs
    for first in range(0, m, p):
        unit = range(first, min(m, first + p))
        at_0 = (len(unit) + 1) // 2
        for place, micro_batch in enumerate(unit):
            for stage in range(p):
                rank = stage if place < at_0 else p - 1 - stage
                assert Op(OpKind.FORWARD, stage, micro_batch) in programs[rank]


@given(p=even_ranks, num_units=st.integers(1, 4), tf=positive, tb=positive)
@few
def test_makespan_of_whole_units(p, num_units, tf, tb):
    assert run(p, num_units * p, tf, tb).makespan == makespan(p, num_units, tf, tb)


@given(p=even_ranks, data=st.data(), tf=positive, tb=positive)
@few
def test_makespan_of_one_unit_that_may_not_be_full(p, data, tf, tb):
    m = data.draw(st.integers(1, p))
    assert run(p, m, tf, tb).makespan == p * (tf + tb) + 2 * ((m + 1) // 2 - 1) * max(tf, tb)


def test_beside_1f1b_it_gains_half_the_bubble_until_units_add_theirs():
    def of_1f1b(p, m, tb):
        return asap(one_f_one_b(p, m), even_costs(p, 1, tb, 0)).makespan

    assert (run(8, 24, 1, 1).makespan, of_1f1b(8, 24, 1)) == (54, 62)
    assert (run(8, 8, 1, 2).makespan, of_1f1b(8, 8, 2)) == (36, 45)
    assert (run(8, 24, 1, 2).makespan, of_1f1b(8, 24, 2)) == (96, 93)


@given(p=even_ranks, m=st.integers(1, 30), data=st.data())
@example(p=8, m=7, data=None)
@few
def test_peaks_lie_between_half_the_ranks_and_one_and_all_of_them(p, m, data):
    per_stage = st.lists(positive, min_size=p, max_size=p)
    costs = (
        StageCosts(*(data.draw(per_stage) for _ in range(3)), latency=data.draw(positive)) if data else even_costs(p)
    )
    timed = asap(chimera(p, m), costs)
    at_ends = (min(p, m) + 1) // 2, min(p, m) // 2
    for rank in range(p):
        nearer = at_ends[rank >= p // 2]
        assert timed.peak(rank) == min(m, p, nearer + 1 + min(rank, p - 1 - rank))


@pytest.mark.parametrize(("num_ranks", "help"), [(1, "use 2"), (3, "use 2 or 4"), (7, "use 6 or 8")])
def test_odd_numbers_of_ranks_are_refused_with_the_nearest_even_ones(num_ranks, help):
    with pytest.raises(UnfitSizesError) as caught:
        chimera(num_ranks, 4)
    assert (caught.value.key, caught.value.help) == (("topology", "pp"), help)
