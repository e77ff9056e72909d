"""DualPipeV: the order of its three originators, and its times and peaks in exact arithmetic."""

import re
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.dualpipe_v import dualpipe_v
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, UnfitSizesError, asap
from tests.schedule.originators import actions, recorded

GRID = [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (3, 8), (4, 8), (5, 17), (8, 16)]
times = st.builds(Fraction, st.integers(0, 12), st.integers(1, 4))
few = settings(max_examples=80, deadline=None)


@st.composite
def sizes(draw, max_ranks=6):
    num_ranks = draw(st.integers(1, max_ranks))
    return num_ranks, 2 * num_ranks + draw(st.integers(0, 6))


@st.composite
def cost_sets(draw):
    """F, I, W and D with ``D >= max(F, I + W)``; an overlap may even cost more than it saves."""
    forward, backward_input, weight = draw(times), draw(times), draw(times)
    return forward, backward_input, weight, max(forward, backward_input + weight) + draw(times)


def even(num_ranks, f, i, w, pair, latency=0):
    stages = 2 * num_ranks
    return StageCosts((f,) * stages, (i,) * stages, (w,) * stages, latency, (pair,) * stages)


def makespan(p, m, f, i, w, pair):
    return 2 * p * f + max(p * f, (p - 1) * i) + (2 * m - p - 2) * pair + 2 * (i + w) + p * i + w + (p - 1) * max(i, w)


def num_pairs(p, m, rank):
    return 2 * m - 3 * p + rank + 1 - (rank == p - 1)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "programs"), recorded("dualpipe_v"))
def test_the_order_is_that_of_deepseeks_code(num_ranks, num_micro_batches, programs):
    assert actions(dualpipe_v(num_ranks, num_micro_batches)) == programs


@pytest.mark.needs_torch
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), GRID)
def test_the_order_is_that_of_pytorch(num_ranks, num_micro_batches):
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    theirs = object.__new__(ScheduleDualPipeV)  # its constructor wants stages that can run
    theirs.pp_group_size, theirs._n_microbatches = num_ranks, num_micro_batches
    expected = [
        [str(action) for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(num_ranks)
    ]
    assert actions(dualpipe_v(num_ranks, num_micro_batches)) == expected


def in_words_of_fleet(action, num_ranks):
    """``c0`` is the way out, ``c1`` the way back; ``BI`` is our I, ``FB(.., ..)`` an overlapped pair."""
    words = [
        f"{'BI' if kind == 'I' else kind}{batch}_c{int(int(stage) >= num_ranks)}"
        for stage, kind, batch in re.findall(r"(\d+)([FBIW])(\d+)", action)
    ]
    return words[0] if len(words) == 1 else f"FB({','.join(words)})"


def fleet_actions(num_ranks, num_micro_batches):
    schedule = actions(dualpipe_v(num_ranks, num_micro_batches))
    return [[in_words_of_fleet(action, num_ranks) for action in program] for program in schedule]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "programs"), recorded("dualpipe_v of Fleet"))
def test_the_order_is_that_of_traces_of_fleet(num_ranks, num_micro_batches, programs):
    assert fleet_actions(num_ranks, num_micro_batches) == programs


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (2, 3), (4, 1), (4, 7)])
def test_too_few_micro_batches_are_refused_with_the_least_that_fit(num_ranks, num_micro_batches):
    with pytest.raises(UnfitSizesError) as caught:
        dualpipe_v(num_ranks, num_micro_batches)
    assert caught.value.key == ("schedule", "num_micro_batches")
    assert caught.value.help == f"use {2 * num_ranks} or more"
    assert dualpipe_v(num_ranks, 2 * num_ranks).programs


@given(sizes=sizes())
@few
def test_each_rank_overlaps_all_but_its_warm_up_and_cool_down(sizes):
    p, m = sizes
    schedule = dualpipe_v(p, m)
    for rank in range(p):
        assert len(schedule.pairs_of(rank)) == num_pairs(p, m, rank)
        for place in schedule.pairs_of(rank):
            forward, backward = schedule.programs[rank][place : place + 2]
            assert (forward.kind, backward.kind) == (OpKind.FORWARD, OpKind.BACKWARD)
            assert forward.stage + backward.stage == 2 * p - 1


@given(sizes=sizes())
@few
def test_weight_gradients_come_in_index_order_for_each_stage(sizes):
    p, m = sizes
    for program in dualpipe_v(p, m).programs:
        for stage in {op.stage for op in program}:
            adds = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)
            assert [op.micro_batch for op in program if op.stage == stage and op.kind in adds] == list(range(m))


@given(sizes=sizes(), data=st.data())
@few
def test_every_rank_holds_one_chunk_more_than_there_are_stages(sizes, data):
    p, m = sizes
    per_stage = st.lists(st.builds(Fraction, st.integers(1, 12), st.integers(1, 4)), min_size=2 * p, max_size=2 * p)
    uneven = [data.draw(per_stage) for _ in range(4)]
    timed = asap(dualpipe_v(p, m), StageCosts(*uneven[:3], latency=data.draw(times), overlapped=uneven[3]))
    for freed_at in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT):
        assert [timed.peak(rank, freed_at) for rank in range(p)] == [2 * p + 1] * p


@given(sizes=sizes(), costs=cost_sets())
@example(sizes=(4, 9), costs=(1, 1, 1, 3))
@example(sizes=(4, 9), costs=(1, 5, 1, 7))
@few
def test_makespan_and_what_each_rank_idles(sizes, costs):
    (p, m), (f, i, w, pair) = sizes, costs
    timed = asap(dualpipe_v(p, m), even(p, *costs))
    assert timed.makespan == makespan(p, m, *costs)
    for rank in range(p):
        pairs = num_pairs(p, m, rank)
        assert timed.starts[rank][0] == rank * f
        assert timed.ends[rank][-1] == timed.makespan - rank * max(0, i - w)
        assert timed.makespan - timed.span(rank) == rank * (f + max(0, i - w))
        assert timed.makespan - (2 * m - pairs) * (f + i + w) - pairs * pair == (
            (p - 1) * (pair - w - min(i, w))
            + max((p - 1) * f, (p - 1) * i - f)
            - max(0, p - 2 - rank) * (f + i + w - pair)
        )


def rays(p):
    """Points where the planes of the formula's kinks meet: F, I, W = 0; pF = (p - 1) I; I = W; F = I + W."""
    planes = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (p, 1 - p, 0), (0, 1, -1), (1, -1, -1)]
    found = set()
    for a, b in combinations(planes, 2):
        ray = (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])
        found |= {r for r in (ray, tuple(-x for x in ray)) if min(r) >= 0 and any(r)}
    return sorted(found)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(1, 5) for m in (2 * p, 2 * p + 1, 2 * p + 3)])
def test_the_makespan_is_proved_for_all_times_at_these_sizes(p, m):
    """Makespan is a maximum of linear functions of the times: convex, and homogeneous.

    The planes cut all times with ``D >= max(F, I + W)`` into cones; on each the formula is linear. A convex function
    that equals a linear one on the rays of a cone is nowhere above it there, and if it also equals it at one inner
    point, nowhere below. Sums of up to three rays, with and without more D, have an inner point of each cone.
    """
    schedule, corners = dualpipe_v(p, m), rays(p)
    for count in (0, 1, 2, 3):
        for chosen in combinations(corners, count):
            f, i, w = (sum(ray[place] for ray in chosen) for place in range(3))
            for more in (0, 1):
                costs = f, i, w, max(f, i + w) + more
                assert asap(schedule, even(p, *costs)).makespan == makespan(p, m, *costs)
