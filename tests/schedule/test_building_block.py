"""Common properties of V-Min and V-Half: as short as their memory allows, in exactly that memory, on every rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.building_block import BuildingBlock, repeated
from pipeproof.schedule.generators.zb_v import zb_v
from pipeproof.schedule.ops import OpKind
from tests.schedule.controllable_memory import KINDS, kinds, shortest
from tests.schedule.originators import recorded
from tests.schedule.zero_bubble import few, peaks, run, spans, time, times, uneven_runs

ranks = st.integers(1, 16)
micro_batches = st.integers(1, 40)
RECORDED = [
    pytest.param(name, *case.values, id=f"{name}-{case.id}") for name in ("v_half", "v_min") for case in recorded(name)
]


@given(kinds, ranks, micro_batches, time)
@few
def test_with_equal_times_nothing_in_this_memory_is_shorter(name, p, m, t):
    generate, num_held = KINDS[name]
    timed = run(generate(p, m), t, t, t)
    assert timed.makespan == shortest(p, m, num_held(p)) * t
    if m > num_held(p):
        assert spans(timed)[0] == timed.makespan


@given(kinds, ranks, micro_batches)
@few
def test_the_bound_is_the_one_of_the_docstrings(name, p, m):
    held = KINDS[name][1](p)
    few_micro_batches = max(4 * p - 1 + 2 * m, 3 * p - 1 + 4 * m)
    many = 6 * m + 3 * p - 1 - 2 * held + max(0, 3 * p - 4 * held)
    assert shortest(p, m, held) == (many if m > held else few_micro_batches)


@given(kinds, st.integers(1, 8), st.integers(1, 20), times, time)
@few
def test_no_times_and_no_latency_get_below_the_bound(name, p, m, even, latency):
    generate, num_held = KINDS[name]
    assert run(generate(p, m), *even, latency).makespan >= shortest(p, m, num_held(p), *even, latency)


@given(st.integers(1, 8), st.integers(1, 20), times, time)
@few
def test_the_bound_holds_for_zb_v_in_its_memory_too(p, m, even, latency):
    assert run(zb_v(p, m), *even, latency).makespan >= shortest(p, m, p, *even, latency)
    assert run(zb_v(p, m + 2 * p)).makespan == shortest(p, m + 2 * p, p)


@given(kinds, st.integers(1, 10), st.integers(1, 24), st.data())
@few
def test_peaks_are_the_same_for_any_times(name, p, m, data):
    generate, num_held = KINDS[name]
    schedule = generate(p, m)
    timed = data.draw(uneven_runs(schedule))
    assert peaks(timed) == peaks(run(schedule))
    assert max(peaks(timed)) == 2 * min(m, num_held(p))
    assert max(peaks(timed, OpKind.BACKWARD_INPUT)) <= max(peaks(timed))


@given(kinds, ranks, st.integers(0, 20))
@few
def test_with_as_many_micro_batches_as_ranks_each_rank_holds_the_same(name, p, more):
    generate, num_held = KINDS[name]
    assert peaks(run(generate(p, p + more))) == [2 * num_held(p)] * p


@given(kinds, st.integers(1, 12), st.integers(1, 30))
@few
def test_every_rank_runs_its_parts_in_index_order_and_weight_gradients_in_that_of_input_gradients(name, p, m):
    for program in KINDS[name][0](p, m).programs:
        for stage in {op.stage for op in program}:
            for kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT):
                assert [op.micro_batch for op in program if op.stage == stage and op.kind is kind] == list(range(m))
        of_inputs, of_weights = (
            [(op.stage, op.micro_batch) for op in program if op.kind is kind]
            for kind in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
        )
        assert of_inputs == of_weights


@given(kinds, st.integers(1, 12), st.integers(1, 30))
@few
def test_the_last_rank_idles_only_before_its_first_input_gradient_and_behind_its_last_forward(name, p, m):
    generate, num_held = KINDS[name]
    m += num_held(p)
    timed = run(generate(p, m))
    last = list(zip(timed.programs[-1], timed.starts[-1], timed.ends[-1], strict=True))
    first_input = next(start for op, start, _ in last if op.kind is OpKind.BACKWARD_INPUT)
    last_forward = max(end for op, _, end in last if op.kind is OpKind.FORWARD)
    between = [op for op, start, _ in last if first_input <= start < last_forward]
    assert first_input == 3 * p - 1
    assert len(between) == last_forward - first_input


@given(kinds, st.integers(1, 12), st.integers(1, 30))
@few
def test_nothing_runs_later_than_its_first_slot_and_its_due_slot(name, p, m):
    generate, num_held = KINDS[name]
    hop = {"v_min": 1, "v_half": 2}[name]
    block = BuildingBlock(p, num_held(p), hop=hop, turn=hop)
    assert repeated(block, m) == generate(p, m)
    timed = run(generate(p, m))
    for program, starts in zip(timed.programs, timed.starts, strict=True):
        for op, start in zip(program, starts, strict=True):
            if op.kind is not OpKind.BACKWARD_WEIGHT:
                place = op.stage if op.kind is OpKind.FORWARD else 4 * p - 1 - op.stage
                assert start <= max(block.windows(place, m)[op.micro_batch])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
@few
def test_early_forwards_are_due_one_pair_after_the_other_right_before_the_first_cycle(p, num_ahead, m):
    down = BuildingBlock(p, num_ahead, hop=1, turn=1).windows(p - 1, m)
    last_dues = [3 * p - 3 - 2 * k for k in range(num_ahead)]
    assert [due for _, due in down[:num_ahead]] == last_dues[::-1][:m]


@pytest.mark.parametrize(("hop", "turn", "meet"), [(1, 1, False), (2, 2, False), (1, 2, True), (2, 1, True)])
def test_two_micro_batches_are_never_given_one_slot_if_both_steps_are_alike(hop, turn, meet):
    assert any(_slots_meet(BuildingBlock(p, p, hop, turn)) for p in range(2, 12)) is meet


def _slots_meet(block):
    """True if a rank has one slot for two parts of its cycles; forwards go back up as soon as they are down."""
    p, m = block.num_ranks, 4 * block.num_ranks
    for rank in range(p):
        down, input_down, input_up = (
            {first for first, _ in block.windows(place, m)[block.num_ahead :]}
            for place in (rank, 2 * p + rank, 4 * p - 1 - rank)
        )
        turned = {first + 1 for first, _ in block.windows(p - 1, m)[block.num_ahead :]}
        parts = [down, {first + p - 1 - rank for first in turned}, input_down, input_up]
        if len(set().union(*parts)) < sum(map(len, parts)):
            return True
    return False


@pytest.mark.parametrize("p", [4, *range(6, 17)])
def test_less_memory_for_a_longer_step(p):
    m = 2 * p
    v_min, v_half, v_zb = (run(generate(p, m)) for generate in (KINDS["v_min"][0], KINDS["v_half"][0], zb_v))
    assert max(peaks(v_min)) < max(peaks(v_half)) < max(peaks(v_zb)) == 2 * p
    assert v_min.makespan > v_half.makespan > v_zb.makespan


def test_with_five_ranks_v_min_and_v_half_need_the_same():
    v_min, v_half = (run(generate(5, 10)) for generate, _ in KINDS.values())
    assert peaks(v_min) == peaks(v_half) == [6] * 5
    assert v_min.makespan == v_half.makespan


@pytest.mark.parametrize(("name", "p", "m", "theirs"), RECORDED)
def test_between_warm_up_and_last_forwards_f_and_i_are_in_the_authors_order(name, p, m, theirs):
    """But for V-Min where p % 3 = 2: its block there is another one, which is not as short."""
    generate, num_held = KINDS[name]
    ours = [[str(op) for op in program] for program in generate(p, m).programs]
    same = [
        _cycles(mine, rank, 2 * num_held(p), m) == _cycles(other, rank, 2 * num_held(p), m)
        for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True))
    ]
    assert all(same) if name == "v_half" or p % 3 != 2 else not any(same)


def _cycles(program, rank, first, num_micro_batches):
    """F and I from the forward of one micro-batch on the way down to the forward of the last."""
    steady = [text for text in program if "W" not in text]
    return steady[steady.index(f"{rank}F{first}") : steady.index(f"{rank}F{num_micro_batches - 1}")]


@pytest.mark.parametrize(("name", "p", "m", "theirs"), RECORDED)
def test_the_authors_order_is_never_shorter_with_equal_times(name, p, m, theirs):
    from pipeproof.schedule.ops import parse_op
    from pipeproof.schedule.programs import Schedule

    generate, num_held = KINDS[name]
    timed = run(Schedule(tuple(tuple(map(parse_op, program)) for program in theirs)))
    assert max(peaks(timed)) == 2 * num_held(p)
    more = 4 if name == "v_min" and p % 3 == 2 else 0
    assert timed.makespan == run(generate(p, m)).makespan + more


@given(st.integers(1, 40), st.integers(1, 60), kinds)
@settings(max_examples=20, deadline=None)
def test_large_sizes_come_to_the_same_end(p, m, name):
    generate, num_held = KINDS[name]
    assert run(generate(p, m)).makespan == shortest(p, m, num_held(p))
