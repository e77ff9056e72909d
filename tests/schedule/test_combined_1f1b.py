"""Combined 1F1B: a longer warm-up, then pairs whose forward and backward do not depend on each other."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, UnfitSizesError, asap, even_costs
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import make_subject
from tests.comm.test_overlap_pairs import plan

ranks, rounds, chunks = st.integers(1, 4), st.integers(1, 4), st.integers(2, 3)


def check(schedule, warmups, num_items):
    for rank, (program, warmup) in enumerate(zip(schedule.programs, warmups, strict=True)):
        warmup = min(warmup, num_items)
        assert all(op.kind is OpKind.FORWARD for op in program[:warmup])
        assert sorted(schedule.pairs_of(rank)) == [warmup + 2 * k for k in range(num_items - warmup)]
        for place in schedule.pairs_of(rank):
            forward, backward = program[place : place + 2]
            assert (forward.kind, backward.kind) == (OpKind.FORWARD, OpKind.BACKWARD)
            assert (forward.stage, forward.micro_batch) != (backward.stage, backward.micro_batch)


@given(ranks, st.integers(1, 12))
def test_one_stage_a_rank(p, m):
    schedule = one_f_one_b(p, m, overlaps=True)
    check(schedule, [2 * (p - 1 - rank) + 1 for rank in range(p)], m)
    assert [set(program) for program in schedule.programs] == [set(program) for program in one_f_one_b(p, m).programs]


@given(ranks, rounds, chunks)
def test_several_stages_a_rank(p, n, v):
    m = n * p
    schedule = interleaved(p, m, v, "megatron", None, overlaps=True)
    # get_pp_rank_microbatches of megatron/core/pipeline_parallel/schedules.py
    check(schedule, [2 * (p - 1 - rank) + (v - 1) * p + 1 for rank in range(p)], m * v)
    assert asap(schedule, even_costs(p * v)).makespan


def test_one_rank_has_the_phases_of_its_originator():
    """Phase 0: F0; then Bi next to Fi+1; at last B3."""
    schedule = one_f_one_b(1, 4, overlaps=True)
    assert [str(op) for op in schedule.programs[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert schedule.pairs == (frozenset({1, 3, 5}),)


def test_pairs_take_the_time_of_pairs():
    costs = StageCosts((2,), (2,), (2,), 0, overlapped=(4,))
    assert asap(one_f_one_b(1, 4, overlaps=True), costs).makespan == 2 + 3 * 4 + 4


@st.composite
def equal_stages(draw):
    """Ranks, micro-batches, times of equal stages and of a pair, at most as long as both one after the other."""
    forward, backward_input, latency = (draw(st.integers(least, 20)) for least in (1, 1, 0))
    weight = draw(st.integers(0, 20))
    pair = draw(st.integers(1, forward + backward_input + weight))
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    return p, m, StageCosts((forward,) * p, (backward_input,) * p, (weight,) * p, latency, overlapped=(pair,) * p)


@given(equal_stages())
def test_pairs_of_equal_stages_are_never_slower(sizes):
    p, m, costs = sizes
    alone = asap(one_f_one_b(p, m), replace(costs, overlapped=None)).makespan
    in_pairs = asap(one_f_one_b(p, m, overlaps=True), costs).makespan
    assert in_pairs <= alone
    both = costs.forward[0] + costs.backward_input[0] + costs.backward_weight[0]
    if costs.latency == 0 and costs.overlapped[0] >= both - costs.forward[0] >= costs.forward[0] and m >= 2 * p:
        assert in_pairs == p * both + (m - 1) * costs.overlapped[0]


def test_pairs_of_unequal_stages_may_be_slower_with_few_micro_batches():
    """The backward of the last rank waits for a forward of the first, which is long."""
    costs = StageCosts((8, 1), (4, 2), (5, 1), 4, overlapped=(13, 3))
    alone, in_pairs = (
        asap(one_f_one_b(2, 2, overlaps), replace(costs, overlapped=costs.overlapped if overlaps else None)).makespan
        for overlaps in (False, True)
    )
    assert (alone, in_pairs) == (38, 45)


def test_other_variants_have_no_pairs():
    with pytest.raises(UnfitSizesError) as error:
        interleaved(2, 4, 2, "torch", None, overlaps=True)
    assert error.value.key == ("schedule", "overlap")


V = {"kind": "interleaved", "num_chunks": 2, "variant": "megatron"}


@pytest.mark.parametrize(
    ("pp", "schedule"), [(1, {"kind": "1f1b"}), (2, {"kind": "1f1b"}), (3, {"kind": "1f1b"}), (1, V), (2, V)]
)
def test_plans_are_proved(pp, schedule):
    one = make_subject(
        plan(topology={"pp": pp}, schedule={"num_micro_batches": 2 * pp, **schedule, "overlap": "pairs"})
    )
    assert [f for f in check_subject(one).findings if f.code != "PP411"] == []
    assert "PART" in " ".join(map(str, one.graph.ops))
