"""Layouts on a plan's own ranks do the same work as the plan that they are compared with."""

from fractions import Fraction
from math import inf

import pytest

from pipeproof.analysis.tune.frameworks import FRAMEWORKS, every_schedule
from pipeproof.analysis.tune.layouts import Layout
from pipeproof.analysis.tune.plan_layouts import MAX_FORWARDS, PlanLayouts
from pipeproof.analysis.tune.step_clock import asap_clock, block_sequences, figures_of
from pipeproof.analysis.tune.tune_text import change_lines
from pipeproof.comm.generated_schedule import plan_schedule
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import plan_from_dict
from tests.comm.test_overlap_pairs import plan as paired_plan
from tests.plans import plan_dict
from tests.tune.plans import four_ranks, loaded

SIZES = {"mbs": range(1, 10**6), "splits": range(1, 10**6)}
"""All micro-batches and splits, which given times vary with only where they are asked for."""


def layouts_of(data, fix=None, framework=None):
    return PlanLayouts(loaded(data), framework or every_schedule(), SIZES if fix is None else fix)


def layout(kind, vpp, num_micro_batches, mbs, pp=4):
    return Layout(pp, vpp, 1, 1, 1, 1, mbs, num_micro_batches, kind, None, "even", "none", "none")


def plan_of(choices, one):
    return plan_from_dict(choices.plan_of(one)).spec


def plans_of(choices):
    """(layout, plan) of every layout for which there is a plan."""
    for one in choices.layouts():
        try:
            yield one, plan_of(choices, one)
        except BadPlanError:
            continue


UNEVEN = {"forward_us": [3, 2, 2, 5], "backward_input_us": [1, "1/3", 1, 1], "backward_weight_us": 2}


def test_every_layout_has_the_same_batch_and_the_same_work():
    """There is one layout of each kind, and a step computes equally much in each, to the last fraction."""
    seen = set()
    for one, plan in plans_of(
        layouts_of(four_ranks(num_layers=8, micro_batch_size=2, num_micro_batches=4, cost=UNEVEN))
    ):
        schedule = plan.schedule
        assert schedule.num_micro_batches * schedule.micro_batch_size == 8
        try:
            made = plan_schedule(plan)
        except BadPlanError:
            continue
        figures = figures_of(asap_clock(made, plan), block_sequences(plan))
        assert figures.work_us == Fraction(12 + Fraction(10, 3) + 8) * 4 / 4, one
        seen.add(one.kind)
    assert seen == set(SCHEDULE_KINDS)


def test_micro_batches_are_joined_and_cut_with_their_times():
    choices = layouts_of(four_ranks(micro_batch_size=6, num_micro_batches=4))
    plans = {one.num_micro_batches: plan for one, plan in plans_of(choices) if one.kind == "gpipe"}
    sizes = {m: plan.schedule.micro_batch_size for m, plan in plans.items()}
    assert sizes == {1: 24, 2: 12, 3: 8, 4: 6, 6: 4, 8: 3, 12: 2, 24: 1}
    assert {m: plan.cost.forward_of(0) for m, plan in plans.items()} == {m: Fraction(4, m) for m in plans}
    assert all(plan.cost.p2p_latency_us == 0 for plan in plans.values())


def test_given_times_keep_micro_batches_and_splits_unless_they_are_fixed():
    data = four_ranks(micro_batch_size=6, num_micro_batches=4)
    assert {(one.mbs, one.num_sequence_splits) for one in layouts_of(data, {}).layouts()} == {(6, 1)}
    assert {one.mbs for one in layouts_of(data, {"mbs": [3, 6]}).layouts()} == {3, 6}
    computed = {**data, "cost": {"analytic": "h100"}}
    assert {one.mbs for one in layouts_of(computed, {}).layouts()} == {1, 2, 3, 4, 6, 8, 12, 24}
    assert {one.num_sequence_splits for one in layouts_of(computed, {}).layouts()} > {1, 2}


@pytest.mark.parametrize(
    "fixed",
    [{"last_micro_batch_size": 1}, {"seq_lengths": [8, 8, 4, 8]}],
    ids=lambda fixed: next(iter(fixed)),
)
def test_micro_batches_that_differ_stay_as_they_are(fixed):
    plans = [plan for _, plan in plans_of(layouts_of(four_ranks(micro_batch_size=2, num_micro_batches=4, **fixed)))]
    assert plans
    assert {plan.schedule.num_micro_batches for plan in plans} == {4}
    for key, value in fixed.items():
        assert {getattr(plan.schedule, key) for plan in plans} == {tuple(value) if isinstance(value, list) else value}


def test_a_tensor_of_a_given_shape_keeps_the_micro_batches():
    data = four_ranks(micro_batch_size=2)
    data["boundaries"] = [{"name": "x", "dims": "sbz", "shape": [8, 2, 5]}]
    assert {one.num_micro_batches for one in layouts_of(data).layouts()} == {8}


def test_chunks_divide_the_blocks_of_a_rank():
    counts = {
        num_layers: {one.vpp for one in layouts_of(four_ranks(num_layers=num_layers)).layouts()}
        for num_layers in (4, 8, 12, 24)
    }
    assert counts == {4: {1}, 8: {1, 2}, 12: {1, 2, 3}, 24: {1, 2, 3, 6}}


def test_a_schedule_of_two_chunks_gets_two_where_three_blocks_are_on_a_rank():
    found = [*layouts_of(four_ranks(num_layers=12)).layouts()]
    assert {one.vpp for one in found if one.kind == "zb_v"} == {2}
    assert {one.vpp for one in found if one.kind == "interleaved"} == {2, 3}


def test_chunks_take_what_their_layers_take():
    choices = layouts_of(four_ranks(num_layers=8, cost={"forward_us": [10, 10, 10, 16], "p2p_latency_us": 7}))
    plan = plan_of(choices, layout("interleaved", 2, 8, 1))
    assert plan.num_stages == 8
    assert plan.cost.forward_us == (5, 5, 5, 5, 5, 5, 5, 11)  # the head's 6 stay with the head
    assert plan.cost.backward_input_us == Fraction(1, 2)
    assert plan.cost.p2p_latency_us == 7


def test_a_backward_that_is_given_whole_stays_so():
    data = four_ranks(num_layers=8, micro_batch_size=2)
    data["cost"] = {"backward_us": 30}
    plan = plan_of(layouts_of(data), layout("interleaved", 2, 16, 1))
    assert (plan.cost.forward_us, plan.cost.backward_us, plan.cost.backward_input_us) == (25, Fraction(30, 4), None)


def test_times_that_the_plan_does_not_give_are_given():
    data = four_ranks(num_layers=8)
    data["cost"] = {}
    plan = plan_of(layouts_of(data), layout("interleaved", 2, 8, 1))
    assert (plan.cost.forward_us, plan.cost.backward_us) == (50, 100)


def test_the_same_stages_keep_their_layers_and_times():
    stages = [["embed", "layer.0", "layer.1"], ["layer.2"], ["layer.3"], ["norm", "head"]]
    data = four_ranks(cost={"forward_us": [2, 1, 1, 3]})
    data["stages"] = stages
    choices = layouts_of(data)
    for kind in ("gpipe", "1f1b", "zb_h1"):
        plan = plan_of(choices, layout(kind, 1, 8, 1))
        assert plan.stages == tuple(map(tuple, stages))
        assert plan.cost.forward_us == (2, 1, 1, 3)
    assert {one.vpp for one in choices.layouts()} == {1}  # four blocks, four ranks


def test_stages_that_are_cut_anew_are_no_longer_listed():
    data = four_ranks(num_layers=8, cost={"forward_us": [4, 3, 1, 4]})
    data["stages"] = [
        ["embed", "layer.0", "layer.1"],
        ["layer.2", "layer.3", "layer.4"],
        ["layer.5"],
        ["layer.6", "layer.7", "norm", "head"],
    ]
    choices = layouts_of(data)
    changed = choices.plan_of(layout("interleaved", 2, 8, 1))
    plan = plan_from_dict(changed).spec
    assert plan.stages is None
    assert plan.cost.forward_us == (3, 1, 1, 1, 1, 1, 1, 3)  # a block takes one, embed and head the rest
    changes = change_lines(choices.data, changed)
    assert [line for line in changes if line.startswith("# remove")] == ["# remove stages"]


def test_stages_that_lack_a_layer_or_are_empty_are_not_cut_anew():
    for stages in (
        [["embed", "layer.0", "layer.1"], ["layer.2"], ["layer.3", "layer.4"], ["layer.5", "norm", "head"]],
        [["embed", "layer.0", "layer.1"], [], ["layer.2", "layer.3"], [f"layer.{i}" for i in range(4, 8)]],
    ):
        data = four_ranks(num_layers=8)
        data["stages"] = stages
        assert {one.vpp for one in layouts_of(data).layouts()} == {1}


def test_a_tensor_on_one_edge_keeps_the_stages():
    data = four_ranks(num_layers=8)
    data["boundaries"] = [{"edge": 1, "name": "x", "dims": "sbh"}]
    assert {one.vpp for one in layouts_of(data).layouts()} == {1}


def test_a_plan_of_two_chunks_may_go_back_to_one():
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2, cost={"forward_us": [1, 2, 1, 1, 1, 1, 1, 4]})
    plan = plan_of(layouts_of(data), layout("1f1b", 1, 8, 1))
    assert plan.cost.forward_us == (3, 2, 2, 5)
    assert plan.num_stages == 4


def test_what_a_layout_needs_is_noted():
    def notes(choices, *layouts):
        return [*choices.notes(layouts)]

    choices = layouts_of(four_ranks(num_layers=8, micro_batch_size=2))
    assert notes(choices, layout("zb_h1", 1, 8, 2)) == []
    assert notes(choices, layout("zb_h1", 1, 16, 1)) == [
        "Times are taken to be in proportion to tokens; kernels on small inputs take longer."
    ]
    (cut,) = notes(choices, layout("zb_v", 2, 8, 2))
    assert cut.startswith("Costs are per layer: ")
    assert notes(choices, layout("dualpipe", 1, 8, 2)) == [
        "dualpipe: every stage is on two ranks, with its weights on both."
    ]
    assert notes(layouts_of(four_ranks(kind="dualpipe")), layout("dualpipe", 1, 8, 1)) == []


def test_the_plans_own_kind_keeps_its_variant_and_others_have_none():
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2, variant="megatron", micro_batch_group_size=4)
    choices = layouts_of(data)
    same = plan_of(choices, layout("interleaved", 2, 4, 2)).schedule
    assert (same.variant, same.micro_batch_group_size) == ("megatron", 4)
    other = plan_of(choices, layout("interleaved_zb", 2, 8, 1)).schedule
    assert (other.variant, other.micro_batch_group_size) == (None, None)


def test_a_schedule_of_ones_own_gives_way():
    programs = [["0F0", "0B0"], ["1F0", "1B0"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 1, "micro_batch_size": 2})
    plan = plan_of(layouts_of(data), layout("gpipe", 1, 1, 2, pp=2))
    assert plan.schedule.programs is None
    assert plan.schedule.kind == "gpipe"


def test_a_limit_of_the_plan_goes_on_in_the_new_stages_activations():
    """Six of two blocks each are twelve of one, and six of two sequences twelve of one."""
    choices = layouts_of(four_ranks(num_layers=8, micro_batch_size=2, memory_limit=6))
    limits = {
        (v, m): plan_of(choices, layout(kind, v, m, 16 // m)).schedule.memory_limit
        for kind, v, m in (("zb_h1", 1, 8), ("zb_v", 2, 8), ("zb_h1", 1, 16), ("zb_v", 2, 16), ("zb_h1", 1, 2))
    }
    assert limits == {(1, 8): 6, (2, 8): 12, (1, 16): 12, (2, 16): 24, (1, 2): 1}
    assert plan_of(layouts_of(four_ranks()), layout("zb_h1", 1, 8, 1)).schedule.memory_limit is None


@pytest.mark.parametrize("limit", [2, 4, 7])
def test_layouts_over_the_limit_of_the_plan_have_no_room(limit):
    choices = layouts_of(four_ranks(num_layers=8, micro_batch_size=2, memory_limit=limit), {})
    peaks = {}
    for one, plan in plans_of(choices):
        bound = choices.bound(one, inf)
        if bound is not None:
            figures = figures_of(asap_clock(plan_schedule(plan), plan), block_sequences(plan))
            peaks[one] = figures.peak
            assert (bound.peak_bytes == inf) == (figures.peak > limit * 4), one
    assert min(peaks.values()) <= limit * 4 < max(peaks.values())


def test_a_schedule_for_a_limit_is_made_for_the_plans_own_micro_batches_with_few_chunks():
    """Six of two blocks each are twelve of one. Without a limit it is made for the plan's memory, and for none."""

    def limits(**schedule):
        choices = layouts_of(four_ranks(num_layers=16, micro_batch_size=2, **schedule))
        tried = [one for one in choices.layouts() if one.kind == "optimal"]
        assert {one.num_micro_batches for one in tried} == {8}
        return {(one.vpp, one.placement, one.memory_limit) for one in tried}

    assert limits(memory_limit=6) == {(1, None, 6), (2, None, 12), (2, "v", 12)}
    assert limits() == {
        (1, None, 4), (1, None, None), (2, None, 8), (2, None, None), (2, "v", 8), (2, "v", None)
    }  # fmt: skip


def test_more_micro_batches_than_can_be_timed_at_once_are_not_tried():
    data = plan_dict(
        model={"num_layers": 64},
        topology={"pp": 64},
        schedule={"num_micro_batches": 512, "micro_batch_size": 4},
    )
    assert 64 * 1024 <= MAX_FORWARDS < 64 * 2048
    assert max(one.num_micro_batches for one in layouts_of(data).layouts()) == 1024


def test_pieces_of_sequences_divide_them():
    data = plan_dict(model={"seq_length": 12}, cost={"analytic": "h100"})
    splits = {one.num_sequence_splits for one in layouts_of(data, {}).layouts() if one.kind == "seq1f1b"}
    assert splits == {2, 3, 4, 6}


@pytest.mark.parametrize(
    ("framework", "num_micro_batches", "tried"),
    [
        ("megatron", 8, {("1f1b", None), ("interleaved", "megatron")}),
        ("paddle", 8, {("1f1b", None), ("interleaved", "fleet"), ("interleaved", "fleet_balanced"),
                       ("interleaved", "fleet_fthenb"), ("dualpipe_v", None)}),
        ("paddle", 4, {("1f1b", None), ("interleaved", "fleet_balanced"), ("interleaved", "fleet_fthenb")}),
    ],
)  # fmt: skip
def test_a_framework_has_its_own_orders_and_conditions(framework, num_micro_batches, tried):
    data = four_ranks(num_layers=8, num_micro_batches=num_micro_batches, micro_batch_size=1)
    choices = layouts_of(data, {}, FRAMEWORKS[framework])
    found = [*choices.layouts()]
    assert {(one.kind, one.variant) for one in found} == tried
    interleaved = next(one for one in found if one.kind == "interleaved")
    assert plan_of(choices, interleaved).schedule.variant == interleaved.variant


def overlaps(framework=None, **sections):
    """(kind, overlap) of all layouts with an overlap."""
    choices = PlanLayouts(paired_plan(**sections), framework or every_schedule(), {})
    return {(one.kind, one.overlap) for one in choices.layouts() if one.overlap != "none"}


def test_kinds_with_pairs_are_tried_with_turns():
    kinds = ("dualpipe", "dualpipe_v", "1f1b", "interleaved")
    assert overlaps(schedule={"kind": "gpipe"}) == {(kind, "pairs") for kind in kinds}


@pytest.mark.parametrize("sections", [{"topology": {"ep": 1}}, {"moe": None}, {"memory": {"recompute": "full"}}])
def test_plans_without_anything_to_hide_are_not(sections):
    assert overlaps(schedule={"kind": "1f1b"}, **sections) == set()


def test_a_framework_has_its_own_pairs():
    assert overlaps(FRAMEWORKS["megatron"], schedule={"kind": "1f1b"}) == {("interleaved", "pairs")}
    assert overlaps(FRAMEWORKS["paddle"], schedule={"kind": "1f1b"}) == set()


def test_a_given_order_stays_or_is_left_out():
    schedule = {"kind": "interleaved", "num_chunks": 2, "variant": "megatron", "num_micro_batches": 8}
    choices = PlanLayouts(paired_plan(schedule={**schedule, "overlap": {"order": ["F", "B"]}}), every_schedule(), {})
    found = [one for one in choices.layouts() if one.kind in ("1f1b", "zb_h1")]
    assert [(one.kind, one.overlap) for one in found] == [("1f1b", "none"), ("1f1b", "F,B"), ("zb_h1", "none")]
    assert plan_of(choices, found[1]).schedule.overlap == ("F", "B")
