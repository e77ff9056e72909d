"""Forwards, tokens and ranks that a gradient finding names, and the micro-batches of a step."""

import dataclasses

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gradient_facts import Loss, LossPath, ParameterGradient
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.subject import make_subject, program_subject
from tests.verify.gradient_models import BIAS, DENSE, SUM, facts, model
from tests.verify.gradient_mutants import changed, only, own
from tests.verify.programs import errors, mutated


def test_tokens_of_every_data_rank_are_counted():
    """10, 12 and 8 tokens: a third of a mean over one's own is right on the first rank alone."""
    given = facts(BIAS, token_counts=((10,), (12,), (8,)))
    text = "0F0{scale=1/step_tokens/dp} 0B0 0REDUCE_GRAD:dp{@dp} 0STEP"
    found = only(model(text, given, dp=3), "PP606")
    assert "counts 1/36" in found.message
    assert "declared 1/30" in found.message
    equal = facts(BIAS, token_counts=((10,), (10,), (10,)))
    assert own(model(text, equal, dp=3)) == set()


@pytest.mark.parametrize(
    ("counts", "fits"),
    [
        (((1, 3), (4, 1)), True),
        (((0, 3), (4, 1)), False),
        (((1, 3), (4, 1, 2)), False),
        (((1, 3),), False),
        (((1, 3), (4, 1), (2, 2)), False),
    ],
)
def test_token_counts_are_one_positive_number_for_each_micro_batch_of_each_data_rank(counts, fits):
    one = model("0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp{@dp} 0STEP", facts(BIAS, token_counts=counts), dp=2)
    if fits:
        assert own(one) == set()
    else:
        with pytest.raises(ValueError, match="token_counts has"):
            own(one)


def test_the_micro_batches_of_a_step_are_those_that_are_computed():
    """A row of another micro-batch, which other rules report, makes the step no longer."""
    scale = "num_micro_batches/2/global_tokens"
    text = f"0F0{{scale={scale}}} 0F1{{scale={scale}}} 0B0 0B1 0SCALE_GRAD7{{scale=1}} 0STEP"
    assert own(model(text, facts(BIAS), dp=1)) == set()


def test_another_rank_s_group_is_not_the_rank_s_own():
    """Rank 0 sums with the ranks 1 and 3, which are a line of the mesh, but not its own line."""
    text = "0F0 0B0 0REDUCE_GRAD:dp{@dp} 0STEP"
    lines = [text.replace("@dp", "group=3"), text, text, text]
    one = model("\n".join(lines), facts(DENSE), tp=2, dp=2)
    assert own(one) == {"PP601", "PP603"}  # the other one of its line sums alone
    found = next(finding for finding in errors(one) if finding.code == "PP603")
    assert "0REDUCE_GRAD:dp sums over ranks 1, 3, which is not the dp group of rank 0" in found.message


EACH, TWO = "1/micro_batch_tokens", "0F0{scale=1} 0F1{scale=1} 0B0 0B1"
OF_STEP = "0SCALE_GRAD{scale=1/step_tokens}"


@pytest.mark.parametrize(
    ("text", "scale", "sizes", "expected"),
    [
        # A row of the step may use the tokens of the only micro-batch, a row of a micro-batch its own tokens.
        (f"0F0{{scale=1}} 0B0 0SCALE_GRAD{{scale={EACH}}}", EACH, {"dp": 1}, set()),
        (f"0F0{{scale=1}} 0F1 0B0 0SCALE_GRAD0{{scale={EACH}}} 0B1", EACH, {"dp": 1}, set()),
        (f"0F0{{scale=1}} 0F1 0B0 0SCALE_GRAD1{{scale={EACH}}} 0B1", EACH, {"dp": 1}, {"PP606"}),
        # After a sum over dp one rank's tokens do not fit the others; the tokens of all ranks do.
        (f"{TWO} 0REDUCE_GRAD:dp{{@dp}} 0SCALE_GRAD{{scale={SUM}}}", SUM, {"dp": 2}, set()),
        (f"{TWO} 0REDUCE_GRAD:dp{{@dp}} {OF_STEP}", "1/step_tokens", {"dp": 2}, {"PP606"}),
        (f"{TWO} {OF_STEP} 0REDUCE_GRAD:dp{{@dp}}", "1/step_tokens", {"dp": 2}, set()),
        (f"{TWO} 0REDUCE_GRAD:cp{{@cp}} {OF_STEP}", "1/step_tokens", {"cp": 2}, set()),
        # Two splits of each of two sequences.
        ("0F0.s0 0F0.s1 0F1.s0 0F1.s1 0B0.s1 0B0.s0 0B1.s1 0B1.s0 0SCALE_GRAD{scale=num_micro_batches/2}",
         SUM, {"dp": 1}, set()),
    ],
)  # fmt: skip
def test_sizes_that_rows_may_use(text, scale, sizes, expected):
    assert own(model(f"{text} 0STEP", facts(BIAS, losses=(Loss("main", 0, scale),)), **sizes)) == expected


def test_a_program_that_only_adds_is_not_checked():
    """It has no reduction, scale or step: it does not show the use of its gradients."""
    assert own(model("0F0 0F1 0B0 0B1", facts(BIAS), dp=2)) == set()
    assert own(model("0F0 0F1 0B0 0B1{reduction=overwrite}", facts(BIAS), dp=1)) == {"PP605"}


def test_losses_are_guessed_from_the_scales_of_forwards():
    """A scale that cannot be read hides no loss of another; a scale of anything else names none."""
    text = "rank 0: 0F0{scale=1/0} 0F1{scale=1,aux:2} 0B0 0B1 0STEP"
    assert [problem.cause.value for problem in diagnose(program_subject(text))] == ["PP610", "PP607"]
    text = "rank 0: 0F0 1F0 2F0{scale=1,aux:2} 2B0 1B0 0B0 0STEP 1STEP 2STEP"
    assert own(program_subject(text)) == set()
    text = "rank 0: 0F0 0F1 0B0 0SCALE_GRAD{scale=2} 0B1 0STEP\nrank 1: 1F0 1F1 1B0 1B1 1STEP"
    (found,) = diagnose(program_subject(text))
    assert (found.count.loss, found.count.stage) == ("main", 1)


def test_a_loss_reaches_the_parameters_of_its_stage_and_of_those_before():
    given = facts(
        ParameterGradient("first", (0,)), ParameterGradient("last", (1,)),
        losses=(Loss("main", 1, SUM), Loss("aux", 0, SUM)),
    )  # fmt: skip
    text = "0F0{scale=aux:2/global_tokens} 1F0 1B0 0B0 0STEP 1STEP"
    found = diagnose(model(text, given, dp=1))
    assert [(one.cause.value, one.parameter) for one in found] == [("PP607", "first")]
    paths = dataclasses.replace(given, parameters=tuple(
        dataclasses.replace(one, losses=(LossPath("main"),)) for one in given.parameters
    ))  # fmt: skip
    assert diagnose(model(text, paths, dp=1)) == ()


def test_the_loss_of_custom_layers_is_behind_the_last_of_them():
    layers = [
        {"name": "stem", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [3, 4]}]},
        {"name": "head", "parameters": [{"name": "weight", "shape": [4, 4]}]},
    ]
    plan = {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": layers},
        "topology": {"pp": 2, "dp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2},
        "loss": {"normalization": "mean_of_micro_batches"},
    }
    one = make_subject(plan_from_dict(plan))
    assert own(one) == set()
    found = diagnose(mutated(one, changed("1F", scale="1/micro_batch_tokens")))
    assert {(problem.cause.value, problem.count.stage) for problem in found} == {("PP606", 1)}
    assert {problem.parameter for problem in found} == {"stem.weight", "head.weight"}
