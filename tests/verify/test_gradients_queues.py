"""A sum over copies and the other sums of its gradient on several queues."""

import pytest

from tests.verify.gradient_models import BIAS, TIED_TEXT, facts, model, tied
from tests.verify.gradient_mutants import own

PP = "REDUCE_GRAD:pp{@pp writes=grad[embedding]}"
DP = "REDUCE_GRAD:dp{@dp}"
SIDE = "REDUCE_GRAD:pp{@pp queue=side reduction=avg writes=grad[embedding]}"


def with_sums(*sums):
    """The tied model whose stages do these sums before the step, in this order."""
    text = TIED_TEXT
    for stage in "01":
        old = f"{stage}{PP} {stage}{DP}"
        assert old in text
        text = text.replace(old, " ".join(one.replace("STAGE", stage) for one in sums))
    return tied(text)


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ((f"STAGE{PP}", f"STAGE{DP}"), set()),
        ((f"STAGE{DP}", "STAGEREDUCE_GRAD:dp{@dp reduction=avg}", f"STAGE{PP}"), set()),
        ((f"STAGE{PP}", f"STAGE{DP}", f"STAGE{SIDE}"), {"PP608"}),  # the first two are in order, the last is not
        (
            (f"STAGE{DP}", "STAGEREDUCE_GRAD:dp{@dp reduction=avg}", f"STAGE{PP.replace('@pp', '@pp queue=side')}"),
            {"PP608"},
        ),
        ((f"STAGE{PP.replace('@pp', '@pp queue=side')}", "WAIT(STAGEREDUCE_GRAD:pp)", f"STAGE{DP}"), set()),
    ],
)
def test_a_sum_over_copies_is_done_before_or_after_each_of_the_others(sums, expected):
    assert own(with_sums(*sums)) == expected


def test_an_order_may_go_through_other_rows_on_other_queues():
    between = "STAGESCALE_GRAD{scale=1 queue=third writes=grad[embedding]}"
    sums = [f"STAGE{PP.replace('@pp', '@pp queue=side')}", between, "STAGEREDUCE_GRAD:dp{@dp queue=fourth}"]
    assert own(with_sums(*sums)) == {"PP608"}
    first_wait, second_wait = "WAIT(STAGEREDUCE_GRAD:pp){queue=third}", "WAIT(STAGESCALE_GRAD){queue=fourth}"
    assert own(with_sums(sums[0], first_wait, *sums[1:])) == {"PP608"}
    assert own(with_sums(sums[0], first_wait, sums[1], second_wait, sums[2])) == set()


def test_sums_over_two_axes_without_copies_are_left_to_the_rules_on_races():
    text = "0F0 0B0 0REDUCE_GRAD:cp{@cp queue=side} 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert own(model(text, facts(BIAS), cp=2, dp=2)) == set()
