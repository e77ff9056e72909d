"""Choice among several possible causes, and the rows that are shown for it."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import Group
from pipeproof.stages.describe.gradient_facts import Loss, LossPath, ParameterGradient
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.gradients.coefficient import ONE, Coefficient
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.gradients.verdict_of_update import rows_to_blame, rows_to_blame_for_both
from pipeproof.verify.subject import program_subject
from tests.verify.gradient_models import AUX, BIAS, MAIN, SUM, TWO_WAY_TEXT, facts, model, two_way
from tests.verify.gradient_mutants import only, own
from tests.verify.programs import codes, program


def test_a_sum_of_equal_gradients_that_is_scaled_back_is_no_cause_of_another_lack():
    text = "0F0 0B0 0REDUCE_GRAD:tp{@tp scale=1/tp writes=grad[bias]} 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert own(model(text, facts(BIAS), tp=2, dp=2)) == set()
    lacking = only(model(text.replace("0REDUCE_GRAD:dp{@dp} ", ""), facts(BIAS), tp=2, dp=2), "PP601")
    assert "nothing sums them over dp" in lacking.message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0F0 0B0 0REDUCE_GRAD:dp{@dp} 0SCALE_GRAD{scale=1/2} 0STEP", ["0SCALE_GRAD"]),
        ("0F0 0B0 0REDUCE_GRAD:dp{@dp reduction=avg} 0STEP", ["0REDUCE_GRAD:dp"]),
        ("0F0 0B0{scale=2} 0REDUCE_GRAD:dp{@dp} 0STEP", ["0B0"]),
        ("0F0{scale=2/global_tokens} 0B0 0REDUCE_GRAD:dp{@dp} 0STEP", ["0F0"]),
    ],
)
def test_a_wrong_factor_is_shown_where_it_is(text, shown):
    found = only(model(text, facts(BIAS), dp=2), "PP606")
    assert [op.op for op in found.witness.ops] == shown


def test_ranks_that_wait_for_each_other_in_a_cycle_are_checked_anyway():
    """Each waits for another first, so that no reduction can begin; the program may hang, and the rule must not."""
    one, other = "0REDUCE_GRAD:ep{@ep} 0REDUCE_GRAD:dp{@dp}", "0REDUCE_GRAD:dp{@dp} 0REDUCE_GRAD:ep{@ep}"
    text = "\n".join(f"0F0 0B0 {order} 0STEP" for order in (one, other, other, one))
    circle = model(text, facts(BIAS), ep=2, dp=2)
    assert own(circle) == {"PP601"}
    assert codes(model(text.replace(other, one), facts(BIAS), ep=2, dp=2)) == set()


def test_averages_of_averages_where_ranks_scale_in_different_places():
    twice = "0REDUCE_GRAD:dp{@dp reduction=avg} 0REDUCE_GRAD:dp{@dp reduction=avg"
    text = f"""
        0F0 0B0 {twice}}} 0SCALE_GRAD{{scale=dp}} 0STEP
        0F0 0B0 {twice} scale=dp}} 0STEP
    """
    assert own(model(text, facts(BIAS), dp=2)) == set()
    assert own(model(text.replace("scale=dp", "scale=dp/2"), facts(BIAS), dp=2)) == {"PP606"}


def test_a_maximum_before_the_sum_spoils_it():
    text = "0F0 0B0 0REDUCE_GRAD:dp{@dp reduction=max} 0REDUCE_GRAD:dp{@dp} 0STEP"
    found = only(model(text, facts(BIAS), dp=2), "PP602")
    assert "takes the maximum over dp where gradients are added" in found.message


@pytest.mark.parametrize(
    ("text", "sizes", "fact"),
    [
        ("0F0 0F1 0REDUCE_GRAD:dp{@dp} 0B0 0B1 0STEP", {"dp": 2},
         "0REDUCE_GRAD:dp comes before 0B1 has added its share"),
        ("0F0 0F1 0F2 0B0 0REDUCE_GRAD:dp{@dp} 0B1 0SCALE_GRAD{scale=1} 0B2 0STEP", {"dp": 2},
         "0REDUCE_GRAD:dp comes before 0B1 has added its share"),
        ("0F0 0REDUCE_GRAD:dp{@dp} 0STEP 0B0", {"dp": 2}, "0REDUCE_GRAD:dp comes before 0B0 has added its share"),
        ("0F0 0B0 0REDUCE_GRAD:dp{@dp} 0STEP 0REDUCE_GRAD:ep{@ep}", {"dp": 2, "ep": 2},
         "0STEP reads the gradient before 0REDUCE_GRAD:ep has summed it"),
        ("0F0 0F1 0B0 0B1{reduction=overwrite} 0STEP", {"dp": 1},
         "0B1 writes the gradient instead of adding to it: what 0B0 added is lost"),
        ("0F0 0F1 0F2 0B0 0B1 0B2{reduction=overwrite} 0STEP", {"dp": 1}, "what 0B0 .. 0B1 added is lost"),
        ("0F0 0F1 0F2 0B0 0B2 0B1 0B1 0STEP", {"dp": 1}, "micro-batch 1 is added 2 times (0B1, 0B1)"),
        ("0F0 0F1 0B0{reduction=overwrite} 0B1 0STEP", {"dp": 2}, "nothing sums them over dp"),  # nothing was lost
        ("0F0 0B0 0REDUCE_GRAD:dp 0STEP\n0F0 0B0 0STEP", {"dp": 2, "tp": 1}, "does not take part in the sum over dp"),
    ],
)  # fmt: skip
def test_the_rows_that_a_cause_names(text, sizes, fact):
    found = diagnose(model(text, facts(BIAS), **sizes))
    assert all(fact in problem.fact for problem in found), found
    assert found


def test_a_rank_that_adds_nothing_and_updates():
    reduced = "0REDUCE_GRAD:dp{@dp} 0STEP"
    found = diagnose(model(f"0F0 0B0 {reduced}\n{reduced}", facts(BIAS), dp=2))
    assert {(one.cause.value, one.rank, one.stage) for one in found} == {("PP601", 0, 0), ("PP601", 1, 0)}


def test_a_sum_without_a_step_that_lacks_a_reduction_is_shown_by_its_last_row():
    found = only(model("0F0 0B0 0SCALE_GRAD{scale=1}", facts(BIAS), dp=2), "PP601")
    assert [one.op for one in found.witness.ops] == ["0SCALE_GRAD"]


def test_a_weight_of_one_stage_on_two_ranks_has_copies_on_ranks():
    text = TWO_WAY_TEXT.replace("0REDUCE_GRAD:pp{@pp writes=grad[first]}", "")
    assert {one.fact for one in diagnose(two_way(text))} == {
        "the weight has copies on several ranks, and their gradients are not summed"
    }


def test_a_weight_of_two_stages_of_one_rank_is_added_to_by_both():
    """Each stage adds the micro-batch once, so that only the sum over dp is missing."""
    given = facts(ParameterGradient("embedding", (0, 1)), losses=(Loss("main", 1, SUM),))
    assert own(model("0F0 1F0 1B0 0B0 0STEP 1STEP", given, dp=2)) == {"PP601"}


@pytest.mark.parametrize(
    ("stages", "dp", "missing"),
    [((0, 2), 2, "PP601"), ((0, 1, 2), 1, "PP608")],
)
def test_a_group_of_the_ranks_that_hold_a_copy_is_no_wrong_group(stages, dp, missing):
    """The first and the last of three stages sum: that is right, but not all that is needed."""
    given = facts(ParameterGradient("embedding", stages), losses=(Loss("main", 2, SUM),))
    num = 3 * dp
    lines = [f"group pp: {rank} {rank + 2 * dp}" for rank in range(dp)]
    for rank in range(num):
        stage, group = rank // dp, rank % dp
        row = f" {stage}B0 {stage}REDUCE_GRAD:pp{{group={group} writes=grad[embedding]}} {stage}STEP"
        lines.append(f"rank {rank}: {stage}F0" + (row if stage != 1 else ""))
    known = Facts(gradients=given, mesh=Mesh(("dp", "pp"), (dp, 3)))
    assert own(dataclasses.replace(program_subject("\n".join(lines)), facts=known)) == {missing}


def test_a_group_that_represents_too_few_ranks():
    known = Facts(gradients=facts(BIAS), mesh=Mesh(("dp",), (4,)))
    one = program("0F0 0B0 0REDUCE_GRAD:dp{group=0} 0STEP", groups=[Group("dp", (0,), 2)], facts=known)
    (found,) = diagnose(one)
    assert found.cause.value == "PP603"
    assert "sums over ranks 0 (2 of each), which is not the dp group" in found.fact
    assert found.fix == "reduce over all ranks along dp"


def test_a_missing_reduction_behind_one_whose_share_is_lost():
    """The loss `aux` is not summed over tp, and another rank of the sum over dp has lost a share of both losses."""
    router = ParameterGradient("router", (0,), losses=(LossPath("main"), LossPath("aux", ("tp",))))
    text = "0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp{@dp} 0STEP"
    lines = [text, text, text.replace("0B1", "0B1{reduction=overwrite}"), text]
    found = diagnose(model("\n".join(lines), facts(router, losses=(MAIN, AUX)), tp=2, dp=2))
    assert {one.cause.value for one in found if one.rank == 0} == {"PP601"}
    assert {one.cause.value for one in found if one.rank == 2} == {"PP605"}


DP, EP, DP_MEAN, EP_MEAN = (
    f"0REDUCE_GRAD:{axis}{{@{axis}{mean}}}" for mean in ("", " reduction=avg") for axis in ("dp", "ep")
)


@pytest.mark.parametrize(
    ("rows_of_ranks", "expected"),
    [
        # Over ep rank 0 is alone; over dp each sum of the ranks 0 and 2, and of 1 and 3, meets the other's.
        ([[EP, DP_MEAN], [DP], [DP, DP_MEAN], [DP]], {("PP601", 1)}),
        ([[DP_MEAN, DP], [EP, EP_MEAN, DP], [DP_MEAN], [DP, EP_MEAN, EP_MEAN]], {("PP601", 0)}),
        ([[DP, EP_MEAN, DP], [EP, EP, DP_MEAN], [DP], [DP]], {("PP601", 2), ("PP602", 0), ("PP602", 1)}),
    ],
)
def test_a_rank_that_reduces_more_often_than_its_partner_goes_on_alone(rows_of_ranks, expected):
    text = "\n".join(f"0F0 0B0 {' '.join(rows)} 0STEP" for rows in rows_of_ranks)
    found = diagnose(model(text, facts(BIAS), ep=2, dp=2))
    assert {(one.cause.value, one.rank) for one in found} == expected
    assert {one.key for one in found if one.cause.value == "PP601"} == {("ep",)}


TWO, THREE, FIVE = map(Coefficient.of, (2, 3, 5))
HALF = TWO.inverse
MIXED = ONE + Coefficient.named("step_tokens")


@pytest.mark.parametrize(
    ("error", "rows"), [(3, (1,)), (6, (0, 1)), (10, (0, 2)), (30, (0, 1, 2)), (7, (0, 1, 2)), (None, (0, 1, 2))]
)
def test_the_fewest_rows_that_explain_an_error_else_all(error, rows):
    scaled = list(enumerate((TWO, THREE, FIVE)))
    assert rows_to_blame(scaled, None if error is None else Coefficient.of(error)) == rows


@pytest.mark.parametrize(
    ("found", "scaled", "like", "like_scaled", "rows"),
    [
        (TWO, [(1, TWO)], ONE, [], (1,)),
        (ONE, [], TWO, [(1, TWO)], (1,)),
        (ONE, [(7, HALF), (1, TWO)], HALF, [(7, HALF)], (1,)),
        (Coefficient.of(4), [(7, TWO), (1, TWO)], TWO, [(7, TWO)], (1,)),  # what both meet explains no difference
        (HALF, [(7, HALF)], Coefficient.of(Fraction(1, 4)), [(7, HALF), (8, HALF)], (8,)),
        (TWO, [(1, TWO)], MIXED, [(2, SUM)], (1, 2)),
        (TWO, [(1, TWO)], ONE, [(2, MIXED)], (1, 2)),
        (TWO, [(1, TWO)], ONE, [(2, ONE), (3, MIXED)], (1, 2, 3)),
    ],
)
def test_rows_that_make_two_weights_differ(found, scaled, like, like_scaled, rows):
    assert rows_to_blame_for_both(found, scaled, like, like_scaled) == rows


def shown(lines, **mesh):
    """(rank, operation) of the rows that the finding on the weight of a token shows."""
    return [(op.rank, op.op) for op in only(model(lines, facts(BIAS), **mesh), "PP606").witness.ops]


def test_an_average_without_a_group_is_over_its_whole_axis():
    text = (
        "0F0 0B0{scale=3} 0SCALE_GRAD{scale=1/3} 0REDUCE_GRAD:dp{reduction=avg} 0REDUCE_GRAD:tp{@tp scale=1/tp} 0STEP"
    )
    assert shown(text, dp=2, tp=4) == [(0, "0REDUCE_GRAD:dp")]


@pytest.mark.parametrize(
    ("own", "other", "rows"),
    [
        # Tokens of rank 1 in the update of rank 0: scaled by rank 1 before the sum, or by both after it.
        ("0B0 0REDUCE_GRAD:dp{@dp}", "0B0 0SCALE_GRAD{scale=2} 0REDUCE_GRAD:dp{@dp}", [(1, "0SCALE_GRAD")]),
        (
            "0B0{scale=2} 0REDUCE_GRAD:dp{@dp} 0SCALE_GRAD{scale=1/2}",
            "0B0 0REDUCE_GRAD:dp{@dp} 0SCALE_GRAD{scale=1/2}",
            [(0, "0SCALE_GRAD"), (1, "0SCALE_GRAD")],
        ),
    ],
)
def test_the_scale_of_another_ranks_tokens_is_shown_on_its_rank(own, other, rows):
    assert shown(f"0F0 {own} 0STEP\n0F0 {other} 0STEP", dp=2) == rows
