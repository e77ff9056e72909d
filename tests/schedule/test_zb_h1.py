"""ZB-H1 in exact arithmetic, next to PyTorch's ZB1P and Paddle's static pass."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.generators.zb_h1 import zb_h1
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule
from tests.schedule import paddle_own
from tests.schedule.zero_bubble import few, peaks, pytorch_texts, run, spans, texts, times, uneven_runs

ranks = st.integers(1, 8)
I, W = OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT  # noqa: E741 - the field's names


@given(ranks, st.integers(1, 20), times)
@few
def test_makespan_for_any_sizes(p, m, even):
    tf, ti, tw = even
    total, most = m + p - 1, max(m, p)
    assert run(zb_h1(p, m), *even).makespan == max(
        total * tf + most * ti + m * tw,
        most * tf + total * ti + m * tw,
        total * (tf + ti) + max(1, m - p + 1) * tw,
    )


@given(ranks, st.integers(0, 16), times)
@few
def test_spans_and_makespan_with_at_least_as_many_micro_batches_as_ranks(p, more, even):
    (tf, ti, tw), m = even, p + more
    work = m * (tf + ti + tw)
    timed = run(zb_h1(p, m), *even)
    assert spans(timed) == [work + (p - 1 - rank) * max(ti, tf + ti - tw) for rank in range(p)]
    assert timed.makespan == work + (p - 1) * max(tf, ti, tf + ti - tw)


@given(ranks, st.integers(1, 20), st.data())
@few
def test_peaks_are_the_same_for_any_times_and_never_above_the_first_rank_of_1f1b(p, m, data):
    timed = data.draw(uneven_runs(zb_h1(p, m)))
    assert peaks(timed) == [min(m, p)] * p
    assert peaks(timed, I) == [min(m, p - rank) for rank in range(p)]
    assert max(peaks(timed)) == run(one_f_one_b(p, m)).peak(0)


@pytest.mark.needs_torch
def test_it_is_pytorchs_zb1p_with_one_stage_per_rank():
    for p in range(1, 7):
        for m in range(1, 3 * p + 2):
            assert texts(zb_h1(p, m)) == pytorch_texts("ScheduleInterleavedZeroBubble", p, m, 1)


def paddle_zb_h1(p, m):
    kinds = {"forward": OpKind.FORWARD, "backward": OpKind.BACKWARD, "backward_b": I, "backward_w": W}
    return Schedule(
        tuple(
            tuple(Op(kinds[job], rank, micro_batch) for job, micro_batch in jobs)
            for rank, jobs in enumerate(paddle_own.static_pass("ZBH1", p, m))
        )
    )


@pytest.mark.needs_paddle
def test_paddles_static_pass_differs_in_whole_backwards_and_in_the_order_of_weight_gradients_only():
    for p in range(1, 6):
        for m in range(p, 3 * p):
            for rank, (ours, theirs) in enumerate(zip(zb_h1(p, m).programs, paddle_zb_h1(p, m).programs, strict=True)):
                split = [
                    Op(kind, op.stage, op.micro_batch)
                    for op in theirs
                    for kind in ((I, W) if op.kind is OpKind.BACKWARD else (op.kind,))
                ]
                assert [op.kind for op in split] == [op.kind for op in ours]
                assert [op for op in split if op.kind is not W] == [op for op in ours if op.kind is not W]
                assert [op.micro_batch for op in split if op.kind is W] == [*range(rank, m), *range(rank)]
                assert [op.micro_batch for op in ours if op.kind is W] == [*range(m)]


@pytest.mark.needs_paddle
@pytest.mark.parametrize("p", [2, 3, 5])
def test_paddles_static_pass_is_never_faster(p):
    for m in range(p, 3 * p):
        ours, theirs = zb_h1(p, m), paddle_zb_h1(p, m)
        assert run(theirs).makespan == run(ours).makespan + p - 2
        for even in [(1, 2, 1), (3, 1, 2), (1, 1, 4), (2, 3, Fraction(1, 2))]:
            assert run(theirs, *even).makespan >= run(ours, *even).makespan
            assert peaks(run(theirs, *even)) == peaks(run(ours, *even))
