"""Seq1F1B against its closed form, and the effect of splits."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.generators.seq1f1b import seq1f1b
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, asap, even_costs

ranks, micro_batches, splits = st.integers(1, 8), st.integers(1, 12), st.integers(1, 5)
times = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6))


@given(ranks, micro_batches, splits, times, times)
@settings(deadline=None)
def test_closed_form(p, m, k, tf, tb):
    """(mk + p - 1)(tf + tb) per split, and min(mk, p - r + k - 1) splits on rank r, without latency."""
    timed = asap(seq1f1b(p, m, k), even_costs(p, tf, tb / 2, tb / 2))
    assert timed.makespan == (m * k + p - 1) * (tf + tb)
    assert [timed.peak(rank) for rank in range(p)] == [min(m * k, p - rank + k - 1) for rank in range(p)]


def test_the_closed_form_needs_messages_that_take_no_time():
    """4 ranks, 8 splits, unit times and latency: every turn of the steady state waits for a message, too."""
    assert asap(seq1f1b(4, 4, 2), even_costs(4)).makespan == (4 * 2 + 3) * 3 == 33
    assert asap(seq1f1b(4, 4, 2), even_costs(4, latency=1)).makespan == 47


class LaterSplitsTakeLonger(StageCosts):
    """Causal attention: the second half of a sequence sees more keys than the first; two units on average."""

    def of(self, op):
        return (1 if op.split == 0 else 3) * (1 if op.kind is OpKind.FORWARD else 2)


def test_the_closed_form_needs_equal_splits():
    """2 ranks, 2 micro-batches in halves: the longer half sets the pace, (mk + p - 1)(tf + tb) of the average fails."""
    assert (2 * 2 + 1) * (2 + 4) == 30
    assert asap(seq1f1b(2, 2, 2), LaterSplitsTakeLonger((), (), ())).makespan == 39


@given(ranks, micro_batches)
def test_one_split_is_1f1b(p, m):
    assert seq1f1b(p, m, 1) == one_f_one_b(p, m)


@given(ranks, micro_batches, st.integers(2, 5))
def test_splits_go_forward_from_the_first_and_back_from_the_last(p, m, k):
    for program in seq1f1b(p, m, k).programs:
        units = [(op.micro_batch, op.split) for op in program if op.kind is OpKind.FORWARD]
        assert units == sorted(units)
        back = [(op.micro_batch, -op.split) for op in program if op.kind is OpKind.BACKWARD]
        assert back == sorted(back)


def test_splits_shorten_the_bubble_of_1f1b():
    """4 ranks, 8 micro-batches, the same work: 33 whole, 28 1/2 in halves, 26 1/4 in quarters."""
    assert [asap(seq1f1b(4, 8, k), even_costs(4, Fraction(1, k), Fraction(1, k), Fraction(1, k))).makespan
            for k in (1, 2, 4)] == [33, Fraction(57, 2), Fraction(105, 4)]  # fmt: skip
