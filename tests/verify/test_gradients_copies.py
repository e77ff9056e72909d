"""Sums over the copies of a weight: who has to be in them, and who must not."""

import pytest

from pipeproof.stages.describe.gradient_facts import Loss, ParameterGradient
from tests.verify.gradient_models import SUM, facts, model, regrouped
from tests.verify.gradient_mutants import own

FACTS = facts(
    ParameterGradient("embedding", (0, 2)),
    *(ParameterGradient(f"own{stage}", (stage,)) for stage in range(3)),
    losses=(Loss("main", 2, SUM),),
)


def three_stages(middle="", group="@pp", how=""):
    """Three stages, of which the first and the last share a weight; transfers are left out."""
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
