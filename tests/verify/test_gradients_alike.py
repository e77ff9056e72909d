"""Ranks and stages that do the same are checked once, and only those."""

from __future__ import annotations

import dataclasses

import pytest

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import Group
from pipeproof.stages.describe.gradient_facts import Loss, ParameterGradient
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.gradients import diagnose as module
from pipeproof.verify.gradients.diagnose import diagnose
from tests.plans import subject
from tests.verify.gradient_models import BIAS, SUM, TIED_FACTS, facts, model, regrouped
from tests.verify.gradient_mutants import changed, drop, own, plan
from tests.verify.programs import errors, mutated, program


@pytest.fixture
def ranks_run(monkeypatch):
    """Number of ranks whose gradients were run, by kinds of parameters; grows as subjects are diagnosed."""
    numbers = []
    interpret = module.interpret

    def counted(views, partners):
        numbers.append(len(views))
        return interpret(views, partners)

    monkeypatch.setattr(module, "interpret", counted)
    return numbers


def test_the_work_grows_neither_with_ranks_nor_with_stages_that_are_alike(ranks_run):
    def work(pp, dp):
        ranks_run.clear()
        sections = {"model": {"num_layers": 8}, "topology": {"pp": pp, "tp": 2, "dp": dp, "sequence_parallel": True}}
        assert diagnose(subject(**sections)) == ()
        return list(ranks_run)

    smallest = work(4, 1)
    assert set(smallest) == {1}
    assert work(4, 4) == work(8, 2) == smallest


def test_stages_that_are_alike_are_each_checked_where_one_of_them_is_wrong():
    base = subject(model={"num_layers": 4}, topology={"pp": 4, "dp": 2})
    found = diagnose(mutated(base, drop("1REDUCE_GRAD:dp", "2REDUCE_GRAD:dp")))
    assert {problem.stage for problem in found} == {1, 2}
    assert {(problem.rank, *problem.other_ranks) for problem in found} == {(2, 3), (4, 5)}


def test_each_rank_is_checked_where_one_does_otherwise():
    def first_only(rows):
        changed("=0B3=", reduction="overwrite")(rows[:1])

    found = diagnose(mutated(plan(), first_only))
    assert {problem.cause.value for problem in found} == {"PP605"}
    assert {problem.rank for problem in found} >= {0}
    assert {problem.other_ranks for problem in found} == {()}


def test_as_many_ranks_as_the_grid_has_places_need_not_be_on_all_of_them():
    """Stage 0 on both ranks of one pipeline, stage 1 on both of the other: dp sums unlike gradients."""
    given = facts(
        ParameterGradient("first", (0,)),
        ParameterGradient("last", (1,)),
        losses=(Loss("main", 0, SUM), Loss("main", 1, SUM)),
    )
    text = """
        0F0 0B0 0REDUCE_GRAD:dp{@dp} 0STEP
        1F0 1B0 1REDUCE_GRAD:dp{@dp} 1STEP
        0F0 0B0 0REDUCE_GRAD:dp{@dp} 0STEP
        1F0 1B0 1REDUCE_GRAD:dp{@dp} 1STEP
    """
    assert "PP601" in own(model(text, given, dp=2, pp=2))


def test_the_order_of_additions_makes_ranks_no_less_alike(ranks_run):
    text = "0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp{@dp} 0STEP\n0F0 0F1 0B1 0B0 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert own(model(text, facts(BIAS), dp=2)) == set()
    assert ranks_run == [1]


def test_a_rank_that_adds_otherwise_is_checked_for_itself():
    """Equal but for additions between and behind equal rows: one adds micro-batch 0 again in place of 1."""
    right = "0F0 0F1 0B0 0SCALE_GRAD{scale=1} 0B1 0REDUCE_GRAD:dp{@dp} 0STEP"
    wrong = right.replace("0B1", "0B0")
    assert own(model(right, facts(BIAS), dp=2)) == set()
    for place, ranks in enumerate(((wrong, right), (right, wrong))):
        found = [one for one in diagnose(model("\n".join(ranks), facts(BIAS), dp=2)) if one.cause.value == "PP605"]
        assert [(one.rank, one.other_ranks) for one in found] == [(place, ())]


def test_stages_that_do_the_same_are_each_named_for_their_own_rows():
    """Equal stages are run once where they are right; a scale that cannot be read and a stray call are of one each."""
    given = facts(ParameterGradient("first", (0,), numel=8), ParameterGradient("last", (1,), numel=8))
    given = dataclasses.replace(given, losses=(Loss("main", 1, SUM),))

    def text(row):
        rows = "{s}F0 {s}B0 {s}REDUCE_GRAD:dp {s}REDUCE_GRAD:dp/0.ALL_REDUCE:dp{{@dp range=0..8}} "
        return "\n".join(f"{rows}{row} {{s}}STEP".format(s=s) for s in (0, 1))

    assert own(model(text(""), given, dp=2, pp=2)) == set()
    found = diagnose(model(text("{s}SCALE_GRAD{{scale=1/dpp}}"), given, dp=2, pp=2))
    assert [(one.cause.value, one.stage) for one in found] == [("PP610", 0), ("PP610", 1)]
    found = diagnose(model(text("{s}REDUCE_GRAD:dp/1.ALL_REDUCE:dp{{@dp range=0..7}}"), given, dp=2, pp=2))
    assert [(one.cause.value, one.stage) for one in found] == [("PP613", 0), ("PP613", 1)]


def test_an_average_over_pp_of_a_weight_without_copies_changes_nothing():
    given = facts(ParameterGradient("first", (0,)), ParameterGradient("last", (1,)), losses=(Loss("main", 1, SUM),))
    average = "0REDUCE_GRAD:pp{reduction=avg writes=grad[first]}"
    assert own(model(f"0F0 0B0 {average} 0STEP\n1F0 1B0 1STEP", given, pp=2)) == set()


def test_a_group_with_a_rank_of_another_stage_sums_what_is_not_the_gradient():
    given = facts(ParameterGradient("first", (0,)), ParameterGradient("last", (1,)), losses=(Loss("main", 1, SUM),))
    text = "0F0 0B0 0REDUCE_GRAD:dp{@dp} 0STEP\n1F0 1B0 1REDUCE_GRAD:dp{@dp} 1STEP"
    one = model(text, given, dp=2, pp=2)
    assert own(one) == set()
    assert {p.parameter for p in diagnose(regrouped(one, "dp", (0, 1, 2), (3,)))} >= {"first"}


def test_a_shared_weight_of_a_folded_program():
    sums = "{s}F0 {s}B0 {s}REDUCE_GRAD:pp{{group=1 writes=grad[embedding]}} {s}REDUCE_GRAD:dp{{group={g}}} {s}STEP"
    known = Facts(
        gradients=dataclasses.replace(TIED_FACTS, losses=(Loss("main", 1, SUM),)), mesh=Mesh(("dp", "pp"), (2, 2))
    )
    groups = [Group("dp", (0,), 2), Group("pp", (0, 1)), Group("dp", (1,), 2)]
    texts = [sums.format(s=s, g=2 * s) for s in (0, 1)]
    one = program(*texts, groups=groups, facts=known)
    object.__setattr__(one.graph, "global_rank", (0, 2))
    assert own(one) == set()
    one = program(texts[0], texts[1].replace("{group=2}", "{group=2 reduction=avg}"), groups=groups, facts=known)
    object.__setattr__(one.graph, "global_rank", (0, 2))
    assert own(one) == {"PP606"}


FACTS = facts(
    ParameterGradient("embedding", (0, 2)),
    *(ParameterGradient(f"own{stage}", (stage,)) for stage in range(3)),
    losses=(Loss("main", 2, SUM),),
)


def three_stages(middle="", group="@pp", how=""):
    """Three stages; the first and the last share a weight. Transfers are left out."""
    ends = [f"{s}F0 {s}B0 {s}REDUCE_GRAD:pp{{{group} {how} writes=grad[embedding]}} {s}STEP" for s in (0, 2)]
    return model("\n".join([ends[0], f"1F0 1B0 {middle} 1STEP", ends[1]]), FACTS, pp=3)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("", set()), ("reduction=avg scale=2", set()), ("reduction=avg scale=3", {"PP606"}), ("scale=1/2", {"PP606"})],
)
def test_the_group_of_the_owners_sums_their_gradients(how, expected):
    assert own(regrouped(three_stages(how=how), "pp", (0, 2))) == expected


@pytest.mark.parametrize("middle", ["", "1REDUCE_GRAD:pp{@pp writes=grad[embedding]}", "1REDUCE_GRAD:pp{@pp}"])
def test_a_rank_without_a_copy_must_not_be_in_the_group(middle):
    """It sums another weight's gradient there, or the old contents of its buffer."""
    assert own(three_stages(middle)) == {"PP601"}


def test_a_reduction_that_names_no_group_is_over_the_ranks_that_hold_a_copy():
    assert own(three_stages(group="")) == set()


DP = subject(topology={"dp": 2, "tp": 2}).unfolded()


def without(base, part, *ranks):
    """The base without some rows, on some ranks."""

    def change(rows):
        for rank in ranks:
            drop(part)([rows[rank]])

    return mutated(base, change)


def test_the_rank_without_a_sum_over_its_axis_is_named():
    (found,) = (one for one in errors(without(DP, "1REDUCE_GRAD:dp/2.", 7)) if one.code == "PP601")
    assert found.message.startswith("rank 7 (pp 1, dp 1, tp 1), gradient of `layer.2.attn.out.weight`:")
    assert "does not take part in the sum over dp" in found.message
    assert {one.rank for one in found.witness.ops} == {7}
