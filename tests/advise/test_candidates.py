"""Candidates do the same work as the plan that they are compared with."""

from fractions import Fraction

import pytest

from pipeproof.analysis.advise.candidates import MAX_FORWARDS, Candidates, Changed, Choice
from pipeproof.analysis.advise.plan_change import change_between
from pipeproof.analysis.advise.schedule_figures import asap_clock, block_sequences, figures_of
from pipeproof.comm.generated_schedule import plan_schedule
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from tests.advise.plans import four_ranks, loaded
from tests.plans import plan_dict


def candidates_of(data, memory_limit=None, **options):
    return Candidates(loaded(data), memory_limit, **options)


def plans_of(candidates):
    """(choice, plan) of every choice for which there is a plan."""
    for choice in candidates.choices(None):
        try:
            yield choice, candidates.plan_of(choice)
        except BadPlanError:
            continue


UNEVEN = {"forward_us": [3, 2, 2, 5], "backward_input_us": [1, "1/3", 1, 1], "backward_weight_us": 2}


def test_every_candidate_has_the_same_batch_and_the_same_work():
    """Of each kind there is one, and a step computes as much in each, to the last fraction."""
    data = four_ranks(num_layers=8, micro_batch_size=2, num_micro_batches=4, cost=UNEVEN)
    candidates = candidates_of(data)
    seen = set()
    for choice, plan in plans_of(candidates):
        schedule = plan.schedule
        assert schedule.num_micro_batches * schedule.micro_batch_size == 8
        try:
            made = plan_schedule(plan)
        except BadPlanError:
            continue
        figures = figures_of(asap_clock(made, plan), block_sequences(plan))
        assert figures.work_us == Fraction(12 + Fraction(10, 3) + 8) * 4 / 4, choice
        seen.add(choice.kind)
    assert seen == set(SCHEDULE_KINDS)


def test_micro_batches_are_joined_and_cut_with_their_times():
    candidates = candidates_of(four_ranks(micro_batch_size=6, num_micro_batches=4))
    plans = {c.num_micro_batches: plan for c, plan in plans_of(candidates) if c.kind == "gpipe"}
    assert {m: plan.schedule.micro_batch_size for m, plan in plans.items()} == {1: 24, 2: 12, 4: 6, 8: 3, 12: 2, 24: 1}
    assert {m: plan.cost.forward_of(0) for m, plan in plans.items()} == {m: Fraction(4, m) for m in plans}
    assert all(plan.cost.p2p_latency_us == 0 for plan in plans.values())


@pytest.mark.parametrize(
    "fixed",
    [{"last_micro_batch_size": 1}, {"seq_lengths": [8, 8, 4, 8]}],
    ids=lambda fixed: next(iter(fixed)),
)
def test_micro_batches_that_differ_stay_as_they_are(fixed):
    candidates = candidates_of(four_ranks(micro_batch_size=2, num_micro_batches=4, **fixed))
    plans = [plan for _, plan in plans_of(candidates)]
    assert plans
    assert {plan.schedule.num_micro_batches for plan in plans} == {4}
    for key, value in fixed.items():
        assert {getattr(plan.schedule, key) for plan in plans} == {tuple(value) if isinstance(value, list) else value}


def test_a_tensor_of_a_given_shape_keeps_the_micro_batches():
    data = four_ranks(micro_batch_size=2)
    data["boundaries"] = [{"name": "x", "dims": "sbz", "shape": [8, 2, 5]}]
    assert {choice.num_micro_batches for choice in candidates_of(data).choices(None)} == {8}


def test_chunks_divide_the_blocks_of_a_rank():
    counts = {
        num_layers: {c.num_chunks for c in candidates_of(four_ranks(num_layers=num_layers)).choices(None)}
        for num_layers in (4, 8, 12, 24, 27)
    }
    assert counts == {4: {1}, 8: {1, 2}, 12: {1, 2, 3}, 24: {1, 2, 3, 6}, 27: {1, 2, 3, 6}}


def test_a_schedule_of_two_chunks_gets_two_where_three_blocks_are_on_a_rank():
    choices = [*candidates_of(four_ranks(num_layers=12)).choices(None)]
    assert {c.num_chunks for c in choices if c.kind == "zb_v"} == {2}
    assert {c.num_chunks for c in choices if c.kind == "interleaved"} == {2, 3}


def test_chunks_take_what_their_layers_take():
    candidates = candidates_of(four_ranks(num_layers=8, cost={"forward_us": [10, 10, 10, 16], "p2p_latency_us": 7}))
    plan = candidates.plan_of(Choice("interleaved", 2, 8, 1))
    assert plan.num_stages == 8
    assert plan.cost.forward_us == (5, 5, 5, 5, 5, 5, 5, 11)  # the head's 6 stay with the head
    assert plan.cost.backward_input_us == Fraction(1, 2)
    assert plan.cost.p2p_latency_us == 7


def test_a_backward_that_is_given_whole_stays_so():
    data = four_ranks(num_layers=8, micro_batch_size=2)
    data["cost"] = {"backward_us": 30}
    plan = candidates_of(data).plan_of(Choice("interleaved", 2, 16, 1))
    assert (plan.cost.forward_us, plan.cost.backward_us, plan.cost.backward_input_us) == (25, Fraction(30, 4), None)


def test_times_that_the_plan_does_not_give_are_given():
    data = four_ranks(num_layers=8)
    data["cost"] = {}
    plan = candidates_of(data).plan_of(Choice("interleaved", 2, 8, 1))
    assert (plan.cost.forward_us, plan.cost.backward_us) == (50, 100)


def test_the_same_stages_keep_their_layers_and_times():
    stages = [["embed", "layer.0", "layer.1"], ["layer.2"], ["layer.3"], ["norm", "head"]]
    cost = {"forward_us": [2, 1, 1, 3]}
    data = four_ranks(cost=cost)
    data["stages"] = stages
    candidates = candidates_of(data)
    for kind in ("gpipe", "1f1b", "zb_h1"):
        plan = candidates.plan_of(Choice(kind, 1, 8, 1))
        assert plan.stages == tuple(map(tuple, stages))
        assert plan.cost.forward_us == (2, 1, 1, 3)
    assert {choice.num_chunks for choice in candidates.choices(None)} == {1}  # four blocks, four ranks


def test_stages_that_are_cut_anew_are_no_longer_listed():
    data = four_ranks(num_layers=8, cost={"forward_us": [4, 3, 1, 4]})
    data["stages"] = [
        ["embed", "layer.0", "layer.1"],
        ["layer.2", "layer.3", "layer.4"],
        ["layer.5"],
        ["layer.6", "layer.7", "norm", "head"],
    ]
    candidates = candidates_of(data)
    plan = candidates.plan_of(Choice("interleaved", 2, 8, 1))
    assert plan.stages is None
    assert plan.cost.forward_us == (3, 1, 1, 1, 1, 1, 1, 3)  # a block takes one; what is above that, embed and head
    change = change_between(candidates.data, plan.model_dump(mode="json", exclude_unset=True))
    assert change.remove == ("stages",)
    assert "# remove stages" in change.lines()


def test_stages_that_lack_a_layer_or_are_empty_are_not_cut_anew():
    for stages in (
        [["embed", "layer.0", "layer.1"], ["layer.2"], ["layer.3", "layer.4"], ["layer.5", "norm", "head"]],
        [["embed", "layer.0", "layer.1"], [], ["layer.2", "layer.3"], [f"layer.{i}" for i in range(4, 8)]],
    ):
        data = four_ranks(num_layers=8)
        data["stages"] = stages
        assert {choice.num_chunks for choice in candidates_of(data).choices(None)} == {1}


def test_a_tensor_on_one_edge_keeps_the_stages():
    data = four_ranks(num_layers=8)
    data["boundaries"] = [{"edge": 1, "name": "x", "dims": "sbh"}]
    assert {choice.num_chunks for choice in candidates_of(data).choices(None)} == {1}


def test_a_plan_of_two_chunks_may_go_back_to_one():
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2, cost={"forward_us": [1, 2, 1, 1, 1, 1, 1, 4]})
    candidates = candidates_of(data)
    plan = candidates.plan_of(Choice("1f1b", 1, 8, 1))
    assert plan.cost.forward_us == (3, 2, 2, 5)
    assert plan.num_stages == 4
    assert candidates.changes(Choice("1f1b", 1, 8, 1)) == {Changed.CHUNKS}
    assert candidates.changes(Choice("zb_v", 2, 8, 1)) == set()


def test_what_a_candidate_asks_of_its_taker_is_named():
    candidates = candidates_of(four_ranks(num_layers=8, micro_batch_size=2))
    assert candidates.changes(Choice("zb_h1", 1, 8, 2)) == set()
    assert candidates.changes(Choice("zb_h1", 1, 16, 1)) == {Changed.MICRO_BATCHES}
    assert candidates.changes(Choice("zb_v", 2, 8, 2)) == {Changed.CHUNKS}
    assert candidates.changes(Choice("dualpipe", 1, 8, 2)) == {Changed.COPIES}
    assert candidates.changes(Choice("seq1f1b", 1, 8, 2, 4)) == {Changed.SPLITS}
    copied = candidates_of(four_ranks(kind="dualpipe"), has_copies=True)
    assert copied.changes(Choice("chimera", 1, 8, 1)) == set()


def test_the_plans_own_kind_keeps_its_variant_and_others_have_none():
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2, variant="megatron", micro_batch_group_size=4)
    candidates = candidates_of(data)
    same = candidates.plan_of(Choice("interleaved", 2, 4, 2)).schedule
    assert (same.variant, same.micro_batch_group_size) == ("megatron", 4)
    other = candidates.plan_of(Choice("interleaved_zb", 2, 8, 1)).schedule
    assert (other.variant, other.micro_batch_group_size) == (None, None)


def test_a_schedule_of_ones_own_gives_way():
    programs = [["0F0", "0B0"], ["1F0", "1B0"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 1, "micro_batch_size": 2})
    plan = candidates_of(data).plan_of(Choice("gpipe", 1, 1, 2))
    assert plan.schedule.programs is None
    assert plan.schedule.kind == "gpipe"


def test_a_limit_of_the_plan_goes_on_in_the_new_stages_activations():
    """Six of two blocks each are twelve of one, and six of two sequences twelve of one."""
    candidates = candidates_of(four_ranks(num_layers=8, micro_batch_size=2, memory_limit=6), 6)
    assert candidates.activation == 4
    assert candidates.room == 24
    limits = {
        (v, m): candidates.plan_of(Choice(kind, v, m, 16 // m)).schedule.memory_limit
        for kind, v, m in (("zb_h1", 1, 8), ("zb_v", 2, 8), ("zb_h1", 1, 16), ("zb_v", 2, 16), ("zb_h1", 1, 2))
    }
    assert limits == {(1, 8): 6, (2, 8): 12, (1, 16): 12, (2, 16): 24, (1, 2): 1}
    assert candidates_of(four_ranks(), 6).plan_of(Choice("zb_h1", 1, 8, 1)).schedule.memory_limit is None


def test_a_schedule_for_a_limit_is_made_for_the_plans_own_micro_batches_with_few_chunks():
    """Six of two blocks each are twelve of one. Without a limit it is made for what the plan holds, and for none."""

    def limits(candidates, held):
        tried = [choice for choice in candidates.choices(held) if choice.kind == "optimal"]
        assert {choice.num_micro_batches for choice in tried} == {8}
        return {(c.num_chunks, c.placement, c.memory_limit) for c in tried}

    given = candidates_of(four_ranks(num_layers=16, micro_batch_size=2), 6)
    assert limits(given, Fraction(8)) == {(1, None, 6), (2, None, 12), (2, "v", 12)}
    free = candidates_of(four_ranks(num_layers=16, micro_batch_size=2))
    assert limits(free, Fraction(36)) == {
        (1, None, 4), (1, None, None), (2, None, 9), (2, None, None), (2, "v", 9), (2, "v", None)
    }  # fmt: skip
    assert limits(free, None) == {(1, None, None), (2, None, None), (2, "v", None)}


def test_more_micro_batches_than_can_be_timed_at_once_are_not_tried():
    data = plan_dict(
        model={"num_layers": 64},
        topology={"pp": 64},
        schedule={"num_micro_batches": 512, "micro_batch_size": 4},
    )
    assert 64 * 1024 <= MAX_FORWARDS < 64 * 2048
    assert max(choice.num_micro_batches for choice in candidates_of(data).choices(None)) == 1024


def test_pieces_of_sequences_divide_them():
    data = plan_dict(model={"seq_length": 12})
    splits = {c.num_sequence_splits for c in candidates_of(data).choices(None) if c.kind == "seq1f1b"}
    assert splits == {2, 3, 4, 6}
