"""Rows to blame for a token's wrong weight: the fewest scales that multiply to the error, on their ranks."""

from fractions import Fraction

import pytest

from pipeproof.verify.gradients.coefficient import ONE, Coefficient
from pipeproof.verify.gradients.verdict_of_update import rows_to_blame, rows_to_blame_for_both
from tests.verify.gradient_models import BIAS, facts, model
from tests.verify.gradient_mutants import only

TWO, THREE, FIVE = map(Coefficient.of, (2, 3, 5))
HALF = TWO.inverse
SUM = ONE + Coefficient.named("step_tokens")


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
        (TWO, [(1, TWO)], SUM, [(2, SUM)], (1, 2)),
        (TWO, [(1, TWO)], ONE, [(2, SUM)], (1, 2)),
        (TWO, [(1, TWO)], ONE, [(2, ONE), (3, SUM)], (1, 2, 3)),
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
