"""Choice among several possible causes, and the rows that are shown for it."""

import pytest

from tests.verify.gradient_models import BIAS, facts, model
from tests.verify.gradient_mutants import only, own
from tests.verify.programs import codes


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
