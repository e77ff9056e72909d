"""Gradient rules on symbolic models: experts, routers, tied weights, auxiliary losses, context parallelism."""

import dataclasses
import re
from pathlib import Path

import pytest

from pipeproof.stages.describe.gradient_facts import Loss, LossPath, ParameterGradient
from pipeproof.verify.gradients.diagnose import diagnose
from tests.verify.gradient_models import (
    AUX,
    BIAS,
    COUNTS,
    DENSE,
    EXPERTS,
    MAIN,
    MEAN,
    MOE_TEXT,
    NORM,
    ROUTER,
    SUM,
    TIED_TEXT,
    TWO_WAY_TEXT,
    facts,
    model,
    moe,
    tied,
    two_way,
)
from tests.verify.gradient_mutants import only, own
from tests.verify.programs import codes, errors


def test_experts_tied_weights_and_counts_are_right():
    for one in (moe(), tied(), two_way()):
        assert own(one) == set()
    assert codes(moe()) == set()
    assert codes(tied()) == set()


def naming(axis, *names):
    """The reduction over an axis with the parameters that it is about."""
    return f"{{@{axis} writes={'+'.join(f'grad[{name}]' for name in names)}}}"


def forwards(scale):
    return f"0F0{{scale={scale}}} 0F1{{scale={scale}}}"


DENSE_NAMES = ("dense", "norm", "bias", "router", "expert_bias")
MUTANTS = {
    "H4 H5 A11: the router's gradient is partial over tp": (
        "{@tp}", naming("tp", "norm", "experts", "expert_bias"), "PP601",
    ),
    "H6: counts of tokens not summed over tp": ("{@tp}", naming("tp", "norm", "experts", "router"), "PP601"),
    "D8: no sum over ep": ("0REDUCE_GRAD:ep{@ep}", "", "PP601"),
    "experts summed over ep": ("{@ep}", naming("ep", *DENSE_NAMES, "experts"), "PP602"),
    "a bias summed over tp": ("{@tp}", naming("tp", "norm", "experts", "router", "expert_bias", "bias"), "PP602"),
    "E5: experts averaged by expert-data ranks": (
        "0STEP", "0SCALE_GRAD{scale=1/dp writes=grad[experts]} 0STEP", "PP606",
    ),
    "E2: the sum so far scaled at each micro-batch": (
        "0B0 0B1", "0B0 0SCALE_GRAD0{scale=1/2} 0B1 0SCALE_GRAD1{scale=1/2}", "PP606",
    ),
    "E7: the auxiliary loss once for each tp rank": ("0F0 0F1", forwards("aux:0.01/global_tokens*tp"), "PP607"),
    "E7: the auxiliary loss by micro-batches": ("0F0 0F1", forwards("aux:0.01/micro_batch_tokens"), "PP607"),
    "E8: the auxiliary loss is discarded": ("0F0 0F1", forwards("aux:0"), "PP607"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_with_experts_is_found_by_its_rule_alone(name):
    old, new, code = MUTANTS[name]
    assert old in MOE_TEXT
    only(moe(MOE_TEXT.replace(old, new)), code)


def test_e5_dividing_experts_twice_or_not_at_all():
    """A mean over data ranks: dense weights average over ep and dp, experts hold the sum over ep already."""
    given = facts(DENSE, EXPERTS, losses=(Loss("main", 0, MEAN),))
    text = (
        "0F0{scale=1/micro_batch_tokens/num_micro_batches} 0F1{scale=1/micro_batch_tokens/num_micro_batches} 0B0 0B1 "
        "0REDUCE_GRAD:tp{@tp} 0REDUCE_GRAD:ep{@ep reduction=avg} 0SCALE_GRAD{scale=1/ep writes=grad[experts]} "
        "0REDUCE_GRAD:dp{@dp reduction=avg} 0STEP"
    )
    assert codes(moe(text, given)) == set()
    missing = only(moe(text.replace("0SCALE_GRAD{scale=1/ep writes=grad[experts]}", ""), given), "PP606")
    assert "counts 1/(4*micro_batch_tokens) in the update of `experts`, declared 1/(8*micro_batch_tokens)" in (
        missing.message
    )
    twice = only(moe(text.replace("scale=1/ep", "scale=1/ep/ep"), given), "PP606")
    assert "counts 1/(16*micro_batch_tokens)" in twice.message


def test_e6_the_divisor_lacks_cp():
    given = facts(BIAS, losses=(Loss("main", 0, MEAN),), even_tokens=True)
    text = "0F0{scale=1/rank_tokens} 0B0 0REDUCE_GRAD:cp{@cp} 0REDUCE_GRAD:dp{@dp reduction=avg} 0STEP"
    found = only(model(text, given, cp=2, dp=2), "PP606")
    assert "multiply by 1/2" in found.help
    assert codes(model(text.replace("{@cp}", "{@cp reduction=avg}"), given, cp=2, dp=2)) == set()


def test_a_mean_over_cp_ranks_is_only_right_where_they_have_equally_many_tokens():
    text = "0F0{scale=1/rank_tokens} 0B0 0REDUCE_GRAD:cp{@cp reduction=avg} 0STEP"
    losses = (Loss("main", 0, "1/micro_batch_tokens"),)
    assert own(model(text, facts(BIAS, losses=losses, even_tokens=True), cp=2)) == set()
    assert own(model(text, facts(BIAS, losses=losses), cp=2)) == {"PP606"}


def test_known_numbers_of_tokens_are_in_the_message():
    given = facts(BIAS, token_counts=((1024, 512), (2048, 512)))
    text = "0F0{scale=1/micro_batch_tokens} 0F1 0B0 0B1 0REDUCE_GRAD:dp{@dp} 0STEP"
    found = only(model(text, given, dp=2), "PP606")
    assert "each token of micro-batch 0 on dp 0 counts 1/1024" in found.message
    assert "declared 1/4096 (1/global_tokens)" in found.message


def test_known_numbers_can_make_another_scale_right():
    given = facts(BIAS, token_counts=((100, 300), (200, 200)))
    text = "0F0 0F1 0B0 0B1 0SCALE_GRAD{scale=2*step_tokens/global_tokens} 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert own(model(text, given, dp=2)) == set()
    assert own(model(text, facts(BIAS), dp=2)) == {"PP606"}
    with pytest.raises(ValueError, match="token_counts has 1 rows"):
        own(model(text, facts(BIAS, token_counts=((1, 2),)), dp=2))


def test_the_auxiliary_loss_on_whole_sequences_needs_its_own_factor():
    """E7: all tp ranks compute it in full, so it is summed tp times with the main loss's addends."""
    whole = dataclasses.replace(ROUTER, losses=(LossPath("main", ("tp",)), LossPath("aux")))
    given = facts(whole, losses=(MAIN, AUX))
    found = only(moe(given=given), "PP607")
    assert "counts 1/(50*global_tokens)" in found.message
    scaled = MOE_TEXT.replace("0F0 0F1", "0F0{scale=aux:0.01/global_tokens/tp} 0F1{scale=aux:0.01/global_tokens/tp}")
    assert codes(moe(scaled, given)) == set()


def test_g4_copies_without_a_sum():
    text = TIED_TEXT.replace("0REDUCE_GRAD:pp{@pp writes=grad[embedding]}", "")
    text = text.replace("1REDUCE_GRAD:pp{@pp writes=grad[embedding]}", "")
    found = only(tied(text), "PP608")
    assert "copies on stages 0, 1" in found.message


def test_two_ranks_for_one_stage_need_a_sum():
    text = TWO_WAY_TEXT.replace("0REDUCE_GRAD:pp{@pp writes=grad[first]}", "")
    assert own(two_way(text)) == {"PP608"}


def test_a_sum_over_copies_next_to_one_over_dp():
    side = TIED_TEXT.replace("REDUCE_GRAD:dp{@dp}", "REDUCE_GRAD:dp{@dp queue=side}")
    assert "PP608" in own(tied(side))
    waited = side.replace("0REDUCE_GRAD:dp{", "WAIT(0REDUCE_GRAD:pp){queue=side} 0REDUCE_GRAD:dp{")
    waited = waited.replace("1REDUCE_GRAD:dp{", "WAIT(1REDUCE_GRAD:pp){queue=side} 1REDUCE_GRAD:dp{")
    assert own(tied(waited)) == set()


def test_f8_a_loss_is_lost_on_its_way():
    text = TIED_TEXT.replace("1F1", "1F1{scale=mtp:0}")
    found = only(tied(text), "PP607")
    assert "`mtp` of stage 1: each token of micro-batch 1" in found.message
    assert found.help == "let the backward pass take the loss `mtp` along"


def test_h8_stages_without_experts_next_to_stages_with_them():
    given = facts(
        ParameterGradient("experts", (0,), sharded_over=("ep",)),
        ParameterGradient("dense", (1,)),
        losses=(Loss("main", 1, SUM), Loss("aux", 0, "0.01/global_tokens")),
    )
    text = """
        0F0 0B0 0REDUCE_GRAD:ep{@ep} 0REDUCE_GRAD:dp{@dp} 0STEP
        1F0 1B0 1REDUCE_GRAD:ep{@ep} 1REDUCE_GRAD:dp{@dp} 1STEP
    """
    assert own(model(text, given, ep=2, dp=2, pp=2)) == set()


def test_weight_gradients_may_come_late_but_before_the_reduction():
    text = "0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert codes(model(text, facts(BIAS), dp=2)) == set()
    late = text.replace(" 0W1 0REDUCE_GRAD:dp{@dp}", " 0REDUCE_GRAD:dp{@dp} 0W1")
    only(model(late, facts(BIAS), dp=2), "PP604")


def test_f2_one_micro_batch_twice():
    text = "0F0 0F1 0I0 0I1 0W0 0W1 0W1 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert own(model(text, facts(BIAS), dp=2)) == {"PP605"}


def test_e10_an_evaluation_with_the_factor_of_gradient_accumulation():
    text = "0F0{scale=1/global_tokens/num_micro_batches} 0F1{scale=1/global_tokens/num_micro_batches}"
    found = only(model(text, facts(BIAS), dp=2), "PP609")
    assert "counts 1/(2*global_tokens), declared 1/global_tokens" in found.message
    assert codes(model("0F0 0F1{scale=1/global_tokens}", facts(BIAS), dp=2)) == set()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0SCALE_GRAD{scale=1/dpp}", "`dpp` is not a size"),
        ("0SCALE_GRAD{scale=1//2}", "neither a number nor a size"),
        ("0SCALE_GRAD{scale=1/0}", "divides by zero"),
        ("0SCALE_GRAD{scale=1/micro_batch_tokens}", "`micro_batch_tokens` is not a size here"),
        ("0SCALE_GRAD{scale=aux:2}", "only forwards"),
        ("0SCALE_GRAD{scale=1,1}", "twice"),
        ("0SCALE_GRAD{scale=1 writes=grad[bios]}", "no parameter `bios`"),
        ("0F1{scale=mtp:1}", "stage 0 has no loss `mtp`; it has main"),
    ],
)
def test_what_cannot_be_read_is_reported(row, why):
    found = [f for f in errors(model(f"0F0 0F1 {row} 0B0 0B1 0STEP", facts(BIAS), dp=1)) if f.code == "PP610"]
    assert why in found[0].message
    assert found[0].witness.ops[0].op == row.partition("{")[0]


def test_facts_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="`speed` is not a size"):
        own(model("0F0 0B0 0STEP", facts(BIAS, losses=(Loss("main", 0, "1/speed"),)), dp=1))
    with pytest.raises(ValueError, match="declared to count zero"):
        own(model("0F0 0B0 0STEP", facts(BIAS, losses=(Loss("main", 0, "0"),)), dp=1))


def test_a_statistic_is_added_by_forwards():
    text = "0F0 0F1 0REDUCE_GRAD:tp{@tp} 0B0 0B1 0STEP"
    given = facts(dataclasses.replace(COUNTS, made_by="forward"), NORM)
    found = diagnose(model(text, given, tp=2))
    assert {(problem.cause.value, problem.parameter) for problem in found} == {("PP604", "norm")}


def test_the_code_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "gradients.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(code, page.name, "exec"), {})
