"""Forwards, tokens and ranks that a gradient finding names, and the micro-batches of a step."""

import pytest

from pipeproof.stages.describe.gradient_facts import ParameterGradient
from tests.verify.gradient_models import BIAS, DENSE, facts, model
from tests.verify.gradient_mutants import only, own
from tests.verify.programs import errors

OWN_PLACES = """
    0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp{@dp} 0SCALE_GRAD{scale=1/2} 0SCALE_GRAD{scale=2} 0STEP
    0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp{@dp scale=1/2} 0SCALE_GRAD{scale=2} 0STEP
"""


def test_the_forward_with_the_wrong_scale_is_the_one_that_is_shown():
    """Ranks that scale in different places, so that each is checked for itself: one forward of one rank is wrong."""
    base = OWN_PLACES.strip().splitlines()
    assert own(model("\n".join(base), facts(BIAS), dp=2)) == set()
    wrong = [base[0].replace("0F0", "0F0{scale=1/global_tokens}"), base[1].replace("0F1", "0F1{scale=1/tp}")]
    found = only(model("\n".join(wrong), facts(BIAS), dp=2), "PP606")
    assert "each token of micro-batch 1 on dp 1 counts 1, declared 1/global_tokens" in found.message.replace(
        " in the update of `bias`", ""
    )
    assert (found.witness.ops[0].rank, found.witness.ops[0].op) == (1, "0F1")


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


@pytest.mark.parametrize(
    ("names", "named"),
    [("a", "`a`: "), ("abc", "`a`, `b`, `c`: "), ("abcd", "`a`, `b`, `c` and 1 more: "), ("abcde", "and 2 more: ")],
)
@pytest.mark.parametrize(("dp", "ranks"), [(2, "rank 0 and 1 more, "), (3, "rank 0 and 2 more, ")])
def test_a_finding_names_three_parameters_and_counts_ranks_and_the_rest(names, named, dp, ranks):
    given = facts(*(ParameterGradient(name, (0,)) for name in names))
    found = only(model("0F0 0B0 0STEP", given, dp=dp), "PP601")
    assert found.message.startswith(f"{ranks}gradient of ")
    assert named in found.message


def test_one_rank_is_named_alone():
    found = only(model("0F0 0F1 0B0 0STEP 0B1", facts(BIAS), dp=1), "PP604")
    assert found.message.startswith("rank 0, gradient of `bias`: ")


def test_what_counts_a_sum_of_unlike_things_is_to_be_scaled_once():
    text = """
        0F0 0B0 0SCALE_GRAD{scale=global_tokens} 0REDUCE_GRAD:tp{@tp reduction=avg writes=grad[bias]} 0STEP
        0F0 0B0 0REDUCE_GRAD:tp{@tp reduction=avg writes=grad[bias]} 0STEP
    """
    found = only(model(text, facts(BIAS), tp=2), "PP606")
    assert found.help == "scale what is added once, after the last micro-batch"
    assert "counts 1/2 + 1/(2*micro_batch_tokens) in" in found.message
