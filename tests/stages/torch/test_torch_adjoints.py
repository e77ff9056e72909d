"""The backward of every operation is the adjoint of its forward's derivative: the rows of both frameworks' table."""

import pytest
import torch

from pipeproof.stages.torch.weights import SplitWeights, Weight
from tests.stages.adjoints.experts import require_gradient_of_router
from tests.stages.adjoints.on_torch import TORCH, all_cases
from tests.stages.adjoints.world import agrees
from tests.stages.torch.staged_run import CPU

pytestmark = pytest.mark.needs_torch

TABLE = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("name", TABLE)
def test_backward_is_the_adjoint(name):
    assert agrees(TORCH, TABLE[name])


def test_a_row_that_nobody_looks_up_has_no_gradient():
    split, weight = SplitWeights(CPU), Weight(torch.ones(4, 3, dtype=torch.float64))
    split.backward(split.rows(torch.tensor([[1, 0], [3, 1], [1, 1]]), weight).sum(), None).accumulate()
    assert weight.gradient[:, 0].tolist() == [1.0, 4.0, 0.0, 1.0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_of_a_router_is_that_of_what_it_feeds_and_of_its_losses(score):
    require_gradient_of_router(TORCH, score)
