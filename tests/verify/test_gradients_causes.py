"""Choice among several possible causes, and the rows that are shown for it."""

from __future__ import annotations

import dataclasses

import pytest

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import Group
from pipeproof.stages.describe.gradient_facts import Loss, LossPath, ParameterGradient
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.subject import program_subject
from tests.verify.gradient_models import AUX, BIAS, MAIN, SUM, facts, model
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
    """Each waits for another first: no reduction can begin. The program may hang, but the rule must not."""
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


def test_a_weight_of_two_stages_of_one_rank_is_added_to_by_both():
    """Each stage adds the micro-batch once: only the sum over dp is missing."""
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
