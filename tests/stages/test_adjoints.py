"""The backward of every operation is the adjoint of its forward's derivative, and the test detects wrong ones."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.paddle.experts import PaddleBalance
from tests.stages.adjoints.coverage import EXCUSED, operations
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
