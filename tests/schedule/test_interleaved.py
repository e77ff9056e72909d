"""Interleaved 1F1B in all variants: closed forms, where they are equal, and sizes that they refuse."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.round_robin import in_groups
from pipeproof.schedule.kinds import VARIANTS
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, UnfitSizesError, asap, even_costs, stages_of

ranks, chunks, micro_batches = st.integers(1, 6), st.integers(1, 4), st.integers(1, 20)
variants = st.sampled_from(VARIANTS)
durations = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6))
few = settings(max_examples=60, deadline=None)


def run(schedule, tf=1, tb=2, c=0):
    num_stages = sum(map(len, stages_of(schedule.programs)))
    return asap(schedule, even_costs(num_stages, tf, tb, 0, c))


def makespan(p, m, v, variant="torch", group_size=None, **costs):
    return run(interleaved(p, m, v, variant, group_size), **costs).makespan


def peaks(p, m, v, variant="torch", group_size=None):
    timed = run(interleaved(p, m, v, variant, group_size))
    return [timed.peak(rank) for rank in range(p)]


def made_or_skipped(p, m, v, variant, group_size=None):
    try:
        return interleaved(p, m, v, variant, group_size)
    except UnfitSizesError:
        assume(False)  # another test is about where a variant exists


def peaks_of_warm_up(p, m, v, first_group):
    return [min(v * m, (v - 1) * first_group + 2 * (p - 1 - rank) + 1) for rank in range(p)]


@given(p=ranks, v=chunks, m=micro_batches, tf=durations, tb=durations)
@few
def test_rounds_of_other_sizes_are_as_good_and_fewer_micro_batches_than_ranks_wait_for_the_way_around(p, v, m, tf, tb):
    rounds = max(1, m // p)
    assume(m % rounds == 0)
    assert makespan(p, m, v, tf=tf, tb=tb) == (v * m + p - 1 + (v - 1) * max(0, p - m)) * (tf + tb)
    assert peaks(p, m, v) == peaks_of_warm_up(p, m, v, m // rounds)


@given(p=ranks, v=chunks, m=micro_batches, variant=variants, more=st.integers(0, 3), tf=durations, tb=durations)
@few
def test_without_latency_every_variant_takes_the_same_time_and_differs_in_what_it_holds(p, v, m, variant, more, tf, tb):
    assume(m >= p)
    group_size = p + more if variant == "megatron" else None
    schedule = made_or_skipped(p, m, v, variant, group_size)
    assert run(schedule, tf, tb).makespan == (v * m + p - 1) * (tf + tb)
    if variant == "fleet_fthenb":
        held = [v * m] * p
    elif variant == "fleet_balanced" and m < 2 * p:
        held = [(v - 1) * m + p - rank for rank in range(p)]
    else:
        first_group = {"torch": m // (m // p), "megatron": group_size}.get(variant, p + m % p)
        held = peaks_of_warm_up(p, m, v, first_group)
    assert peaks(p, m, v, variant, group_size) == held


@pytest.mark.parametrize(("p", "v", "m", "taken"), [(4, 2, 10, 79), (3, 2, 4, 37), (2, 3, 5, 52)])
def test_a_last_group_smaller_than_the_ranks_makes_bubbles(p, v, m, taken):
    groups = [p] * (m // p) + [m % p]
    assert run(in_groups(p, v, groups)).makespan == taken > (v * m + p - 1) * 3


def test_a_last_group_much_smaller_than_the_ranks_deadlocks():
    """Rank 0 wants micro-batch 4 back from rank 3 before it runs the backward that rank 3 waits for."""
    with pytest.raises(ValueError, match=r"rank 0 at 8F4, .* rank 3 at 7B0"):
        run(in_groups(4, 3, [4, 1]))


@given(p=ranks, v=chunks, rounds=st.integers(1, 4))
@few
def test_where_micro_batches_divide_by_ranks_the_tools_agree(p, v, rounds):
    m = rounds * p
    torch = interleaved(p, m, v, "torch")
    assert interleaved(p, m, v, "megatron") == torch
    assert interleaved(p, m, v, "fleet") == torch
    assert rounds == 1 or interleaved(p, m, v, "fleet_balanced") == torch


@given(p=ranks, v=chunks, variant=variants)
@few
def test_with_as_many_micro_batches_as_ranks_variants_differ_in_their_warm_up_only(p, v, variant):
    schedule = interleaved(p, p, v, variant)
    for rank, (ours, torchs) in enumerate(zip(schedule.programs, interleaved(p, p, v).programs, strict=True)):
        for kind in (OpKind.FORWARD, OpKind.BACKWARD):
            assert [op for op in ours if op.kind is kind] == [op for op in torchs if op.kind is kind]
        first = next(place for place, op in enumerate(ours) if op.kind is OpKind.BACKWARD)
        per_hop = {"fleet_balanced": 1, "fleet_fthenb": v * p}.get(variant, 2)
        warmup = v * p if variant == "fleet_fthenb" else (v - 1) * p + per_hop * (p - 1 - rank) + 1
        assert first == min(v * p, warmup)


@given(p=ranks, v=chunks, m=micro_batches, variant=variants, data=st.data())
@few
def test_every_variant_finishes_and_accumulates_in_index_order(p, v, m, variant, data):
    schedule = made_or_skipped(p, m, v, variant)
    for rank, program in enumerate(schedule.programs):
        assert len(program) == 2 * m * v
        for stage in range(rank, p * v, p):
            for kind in (OpKind.FORWARD, OpKind.BACKWARD):
                assert [op.micro_batch for op in program if (op.stage, op.kind) == (stage, kind)] == [*range(m)]
    times = st.lists(st.integers(1, 9), min_size=p * v, max_size=p * v)
    asap(schedule, StageCosts(data.draw(times), data.draw(times), [0] * (p * v), data.draw(st.integers(0, 20))))


@given(p=ranks, v=chunks, rounds=st.integers(2, 4), left=st.integers(0, 5), tf=durations, tb=durations, c=durations)
@few
def test_with_equal_stages_the_last_chunk_ahead_is_never_slower(p, v, rounds, left, tf, tb, c):
    m = rounds * p + left % p
    costs = {"tf": tf, "tb": tb, "c": c}
    assert makespan(p, m, v, "fleet_balanced", **costs) <= makespan(p, m, v, "fleet", **costs)
    assert peaks(p, m, v, "fleet_balanced") == peaks(p, m, v, "fleet")


def test_who_is_better_where_micro_batches_do_not_divide_by_ranks():
    """Ten on four ranks, two chunks, one unit of latency: PyTorch holds least, Fleet's flag hides more of it."""
    assert [makespan(4, 10, 2, name, c=1) for name in ("torch", "fleet", "fleet_balanced")] == [80, 81, 77]
    assert [peaks(4, 10, 2, name)[0] for name in ("torch", "fleet", "fleet_balanced")] == [12, 13, 13]


def test_half_the_warm_up_holds_less_and_hides_less_latency():
    assert (makespan(4, 6, 2, c=1), makespan(4, 6, 2, "fleet_balanced", c=1)) == (53, 59)
    assert (peaks(4, 6, 2), peaks(4, 6, 2, "fleet_balanced")) == ([12, 11, 9, 7], [10, 9, 8, 7])


def test_megatrons_group_size_trades_memory_for_hidden_latency():
    assert [makespan(4, 16, 2, "megatron", size, c=1) for size in (4, 8, 16)] == [119, 111, 111]
    assert [peaks(4, 16, 2, "megatron", size)[0] for size in (4, 8, 16)] == [11, 15, 23]


REFUSED = [
    ("torch", 4, 9, None, "9 does not divide by that", "use 8 or 10"),
    ("torch", 4, 13, None, "3 rounds", "use 12 or 15"),
    ("megatron", 4, 3, None, "3 is less than 4", "use 4"),
    ("megatron", 4, 10, None, "10 leaves 2", "use 8 or 12"),
    ("megatron", 4, 13, 5, "13 leaves 3", "use 10 or 14"),
    ("fleet", 4, 3, None, "3 is less than 4", "use 4"),
    ("fleet", 4, 6, None, "best_unbalanced_scheduler only", "use 4 or 8, or variant fleet_balanced"),
    ("fleet_balanced", 4, 3, None, "3 is less than 4", "use 4"),
    ("fleet_fthenb", 4, 3, None, "as many micro-batches as ranks, 4", "use 4"),
    ("fleet_fthenb", 4, 6, None, "as many micro-batches as ranks, 4", "use 4, or variant fleet_balanced"),
    ("fleet_fthenb", 4, 8, None, "as many micro-batches as ranks, 4", "use 4, or variant fleet_balanced or fleet"),
]
REFUSED_GROUPS = [
    ("megatron", 4, 8, 3, "at most all 8, not 3", "use 4 to 8"),
    ("megatron", 4, 4, 5, "at most all 4, not 5", "use 4"),
    ("torch", 4, 8, 4, "derives", "use variant megatron, or remove the key"),
]


@pytest.mark.parametrize(
    ("key", "case"),
    [
        *(("num_micro_batches", case) for case in REFUSED),
        *(("micro_batch_group_size", case) for case in REFUSED_GROUPS),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(key, case):
    variant, p, m, group_size, words, fix = case
    with pytest.raises(UnfitSizesError, match=words) as caught:
        interleaved(p, m, 2, variant, group_size)
    assert caught.value.help == fix
    assert caught.value.key == ("schedule", key)


@given(p=ranks, m=micro_batches)
@few
def test_the_nearest_numbers_that_pytorch_takes_are_the_nearest(p, m):
    assume(m % max(1, m // p))
    with pytest.raises(UnfitSizesError) as caught:
        interleaved(p, m, 2)
    below, above = (int(word) for word in caught.value.help.removeprefix("use ").split(" or "))
    assert below < m < above
    fits = [n for n in range(below, above + 1) if n % max(1, n // p) == 0]
    assert fits == [below, above]


def test_a_variant_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'deepspeed' is not a variant"):
        interleaved(2, 4, 2, "deepspeed")
