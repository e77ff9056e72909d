"""The optimizers follow their definitions, and gradient buffers begin as +0.0."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.paddle.optimizer import StageOptimizer
from tests.stages.staged_run import make_plan

pytestmark = pytest.mark.needs_paddle

RATE = 0.03


def updated(optimizer, grads):
    """A weight after one update for each of ``grads``."""
    run = make_plan(run={"optimizer": optimizer, "learning_rate": RATE, "dtype": "float64"}).run
    weight = paddle.to_tensor(np.linspace(-1.0, 2.0, 6), stop_gradient=False)
    update = StageOptimizer(run, {"weight": weight})
    for grad in grads:
        update.zero_grad()
        (weight * paddle.to_tensor(grad)).sum().backward()
        update.step()
    return weight.numpy()


@pytest.fixture
def grads():
    return np.random.default_rng(1).standard_normal((3, 6))


def test_sgd(grads):
    expected = np.linspace(-1.0, 2.0, 6) - RATE * grads.sum(axis=0)
    np.testing.assert_allclose(updated("sgd", grads), expected, rtol=1e-14)


def test_adamw(grads):
    weight, first, second = np.linspace(-1.0, 2.0, 6), np.zeros(6), np.zeros(6)
    for count, grad in enumerate(grads, start=1):
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad**2
        step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
        weight = weight * (1 - RATE * 0.01) - RATE * step
    np.testing.assert_allclose(updated("adamw", grads), weight, rtol=1e-6)


def test_a_gradient_of_minus_zero_adds_up_to_plus_zero():
    weight = paddle.to_tensor(np.ones(2), stop_gradient=False)
    update = StageOptimizer(make_plan(run={"dtype": "float64"}).run, {"weight": weight})
    update.zero_grad()
    (weight * paddle.to_tensor(np.array([-0.0, 0.0]))).sum().backward()
    assert weight.grad.numpy().tobytes() == np.zeros(2).tobytes()


def test_buffers_begin_again():
    weight = paddle.to_tensor(np.ones(2), stop_gradient=False)
    update = StageOptimizer(make_plan(run={"dtype": "float64"}).run, {"weight": weight})
    for _ in range(2):
        update.zero_grad()
        (weight * 3.0).sum().backward()
        assert weight.grad.tolist() == [3.0, 3.0]
