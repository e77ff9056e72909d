"""The backward of every operation is the adjoint of its forward's derivative, and the test detects wrong ones."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.paddle.experts import PaddleBalance
from pipeproof.stages.paddle.functional import rotate
from tests.stages.adjoints.coverage import EXCUSED, operations
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.table import all_cases
from tests.stages.adjoints.world import STEP, agrees
from tests.stages.staged_run import make_plan

pytestmark = pytest.mark.needs_paddle

TABLE = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("name", TABLE)
def test_backward_is_the_adjoint(name):
    assert agrees(TABLE[name])


def test_every_operation_has_a_row():
    assert len(TABLE) == len(all_cases()), "two rows have one name"
    covered = {name for case in TABLE.values() for name in case.covers}
    assert operations() - covered - set(EXCUSED) == set()
    assert covered - operations() == set(), "rows of what is there no more"
    assert set(EXCUSED) - operations() == set()
    assert set(EXCUSED) & covered == set()


class TurnedTooEarly(paddle.autograd.PyLayer):
    """The rotary embedding with R(g) * sin for R(g * sin) on its way back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.cos, ctx.sin = cos, sin
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient):
        first, second = paddle.chunk(gradient, 2, axis=-1)
        return gradient * ctx.cos + paddle.concat([second, -first], axis=-1) * ctx.sin


def test_a_gradient_that_is_turned_too_early_is_seen_where_the_halves_of_sines_differ():
    """And only there: tables of equal halves, which all real ones are, hide it."""
    generator = np.random.default_rng(1)
    cos, generic, half = (generator.standard_normal(shape) for shape in ((5, 6), (5, 6), (5, 3)))
    found = []
    for sin in (generic, np.tile(half, 2)):
        tables = paddle.to_tensor(cos), paddle.to_tensor(sin)
        wrong = plain("wrong", "rotate", lambda x, tables=tables: TurnedTooEarly.apply(x, *tables), (2, 3, 5, 6))
        right = plain("right", "rotate", lambda x, tables=tables: rotate(x, *tables), (2, 3, 5, 6))
        assert agrees(right)
        found.append(not agrees(wrong))
    assert found == [True, False]


def test_gradients_of_alike_tensors_that_differ_between_ranks_are_seen():
    """Entering without the sum on the way back: each rank has the gradient of its own use alone."""
    from dataclasses import replace

    row = TABLE["enter, 2 ranks"]
    with pytest.raises(AssertionError, match="ranks disagree about a gradient"):
        agrees(replace(row, function=lambda rank, x: x * 2.0))


def test_a_missing_sum_over_parts_is_seen():
    """Leaving without the other rank's addends, which it still takes on the way back."""
    from dataclasses import replace

    row = TABLE["leave, 2 ranks"]
    assert not agrees(replace(row, function=lambda rank, x: x + 0.5 * rank.region.leave(x, "out")))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_of_a_router_is_that_of_what_it_feeds_and_of_its_losses(score):
    moe = {"num_experts": 6, "top_k": 2, "ffn_size": 8, "score": score, "aux_loss": 0.7, "z_loss": 0.3}
    plan = make_plan(model={"moe": moe}, run={"dtype": "float64"})
    logits, along, y = np.random.default_rng(4).standard_normal((3, 9, 6))

    def entered(values):
        balance = PaddleBalance(plan, (), adds_losses=True)
        leaf = paddle.to_tensor(values, stop_gradient=False)
        return leaf, balance.of("mlp", 0, 0).enter(leaf), sum(balance.values().values())

    leaf, made, _ = entered(logits)
    paddle.autograd.backward([made], [paddle.to_tensor(y)])
    (_, _, ahead), (_, _, behind) = entered(logits + STEP * along), entered(logits - STEP * along)
    slope = (ahead - behind) / (2 * STEP)
    assert abs(slope) > 1e-3
    assert (leaf.grad.numpy() * along).sum() == pytest.approx((along * y).sum() + slope, rel=1e-7)
