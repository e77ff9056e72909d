"""DualPipe: DeepSeek's order, two folded DualPipeVs, and when the published bubble is exact for both."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.dualpipe import dualpipe
from pipeproof.schedule.generators.dualpipe_v import dualpipe_v
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, UnfitSizesError, asap
from tests.schedule.originators import actions, recorded

positive = st.builds(Fraction, st.integers(1, 12), st.integers(1, 4))
few = settings(max_examples=60, deadline=None)


@st.composite
def sizes(draw):
    """An even number of ranks and twice as many micro-batches or more, half of them in each direction."""
    num_ranks = 2 * draw(st.integers(1, 4))
    return num_ranks, 2 * num_ranks + 2 * draw(st.integers(0, 4))


def even(num_ranks, f, i, w, pair, latency=0):
    return StageCosts((f,) * num_ranks, (i,) * num_ranks, (w,) * num_ranks, latency, (pair,) * num_ranks)


def published_bubble(num_stages, i, w, pair):
    """DeepSeek-V3, table 2: ``(PP/2 - 1)(F&B + B - 3W)``."""
    return (num_stages // 2 - 1) * (pair + (i + w) - 3 * w)


def idle(timed):
    return [timed.makespan - timed.busy(rank) for rank in range(len(timed.programs))]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "programs"), recorded("dualpipe"))
def test_the_order_is_that_of_deepseeks_code(num_ranks, num_micro_batches, programs):
    assert actions(dualpipe(num_ranks, num_micro_batches)) == programs


@given(sizes=sizes(), data=st.data())
@few
def test_opposite_ranks_do_at_one_time_what_one_rank_of_dualpipe_v_does(sizes, data):
    p, m = sizes
    uneven = [data.draw(st.lists(positive, min_size=p, max_size=p)) for _ in range(4)]
    costs = StageCosts(*uneven[:3], overlapped=uneven[3])
    timed, folded = asap(dualpipe(p, m), costs), asap(dualpipe_v(p // 2, m // 2), costs)
    for rank in range(p):
        place = min(rank, p - 1 - rank)
        assert timed.starts[rank] == folded.starts[place]
        assert timed.ends[rank] == folded.ends[place]
        for op, of_v in zip(timed.programs[rank], folded.programs[place], strict=True):
            assert (op.kind, op.stage, op.micro_batch % (m // 2)) == (of_v.kind, of_v.stage, of_v.micro_batch)
            assert (op.stage == rank) == (op.micro_batch < m // 2)
    for freed_at in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT):
        assert [timed.peak(rank, freed_at) for rank in range(p)] == [p + 1] * p


def test_the_fold_of_dualpipe_v_saves_a_latency_that_dualpipe_has():
    assert asap(dualpipe(4, 8), even(4, 1, 1, 1, 3, latency=1)).makespan == 35
    assert asap(dualpipe_v(2, 4), even(4, 1, 1, 1, 3, latency=1)).makespan == 31


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "key", "help"),
    [
        (1, 4, ("topology", "pp"), "use 2"),
        (5, 20, ("topology", "pp"), "use 4 or 6"),
        (5, 10, ("topology", "pp"), "use 4"),
        (9, 8, ("topology", "pp"), "use 4"),
        (3, 5, ("schedule", "kind"), "use pp 2 with 6 micro-batches, or another kind"),
        (1, 2, ("schedule", "kind"), "use pp 2 with 4 micro-batches, or another kind"),
        (4, 1, ("schedule", "num_micro_batches"), "use 8, or a larger even number"),
        (4, 7, ("schedule", "num_micro_batches"), "use 8, or a larger even number"),
        (4, 9, ("schedule", "num_micro_batches"), "use 8 or 10"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(num_ranks, num_micro_batches, key, help):
    with pytest.raises(UnfitSizesError) as caught:
        dualpipe(num_ranks, num_micro_batches)
    assert (caught.value.key, caught.value.help) == (key, help)


@given(sizes=sizes(), forward=positive, share=st.fractions(0, 1), saved=st.fractions(0, 1))
@few
def test_with_f_equal_to_i_and_w_no_longer_the_published_bubble_is_the_largest_idle_time(sizes, forward, share, saved):
    p, m = sizes
    f = i = forward
    w = share * i
    full = f + i + w
    pair = full - saved * (full - max(f, i + w))
    times, published = even(p, f, i, w, pair), published_bubble(p, i, w, pair)
    for timed in (asap(dualpipe(p, m), times), asap(dualpipe_v(p // 2, m // 2), times)):
        num_ranks = len(timed.programs)
        least_overlap = range(p // 2 - 1, p // 2 + 1) if num_ranks == p else [num_ranks - 1]
        assert max(idle(timed)) == published
        assert {idle(timed)[rank] for rank in least_overlap} == {published}
        assert timed.span(0) == timed.makespan
        outer = max(0, p // 2 - 2) * (full - pair)
        assert idle(timed)[0] == published - outer
        assert (set(idle(timed)) == {published}) == (outer == 0)


@given(sizes=sizes().filter(lambda sizes: sizes[0] > 2), f=positive, i=positive, w=positive, saved=st.fractions(0, 1))
@example(sizes=(6, 12), f=1, i=1, w=1, saved=Fraction(1, 2))
@example(sizes=(6, 12), f=1, i=2, w=3, saved=Fraction(1, 2))
@example(sizes=(6, 12), f=Fraction(1, 2), i=Fraction(3, 4), w=1, saved=0)
@example(sizes=(6, 12), f=Fraction(1, 4), i=Fraction(7, 8), w=1, saved=0)
@few
def test_the_published_bubble_is_exact_under_these_conditions_and_no_others(sizes, f, i, w, saved):
    """``F = I`` where W is no longer than I; a coincidence of the three where it is longer."""
    p, m = sizes
    full = f + i + w
    pair = full - saved * (full - max(f, i + w))
    bubble = max(idle(asap(dualpipe(p, m), even(p, f, i, w, pair))))
    exact = f == i if w <= i else max(f, i - f / Fraction(p // 2 - 1)) == 2 * i - w
    assert (bubble == published_bubble(p, i, w, pair)) == exact
