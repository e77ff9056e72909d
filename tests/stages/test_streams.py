"""Hyper-connections: the mathematics, loops without Paddle, slopes."""

import math

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeproof.specs.model import HyperConnectionsSpec
from pipeproof.stages.common.stage import sinkhorn, with_streams
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.weights import SplitWeights
from tests.stages.references import make_plan
from tests.stages.slopes import assert_slopes

pytestmark = pytest.mark.needs_paddle

STREAMS = {"hyper_connections": {"streams": 3, "sinkhorn_iterations": 4}}
OF = HyperConnectionsSpec(streams=3, sinkhorn_iterations=4)
HIDDEN, GATES = 5, 15


@pytest.fixture
def generic():
    generator = np.random.default_rng(11)
    return lambda *shape: generator.standard_normal(shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def balanced(matrix, iterations):
    """Sinkhorn-Knopp by its definition: the exponential, columns over their sums, rows over theirs."""
    matrix = np.exp(matrix)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(axis=0)
        matrix = matrix / matrix.sum(axis=1)[:, None]
    return matrix


@settings(max_examples=100, deadline=None)
@given(
    matrix=st.integers(2, 5).flatmap(lambda n: arrays.arrays(np.float64, (n, n), elements=st.floats(-2, 2))),
    iterations=st.integers(1, 25),
)
def test_rows_and_columns_add_up_to_one_within_the_stated_bounds(matrix, iterations):
    """Rows up to rounding; columns by Birkhoff's contraction of Hilbert's metric (``layers/layer_operations.py``)."""
    made = sinkhorn(OPS, paddle.to_tensor(matrix), iterations).numpy()
    np.testing.assert_allclose(made, balanced(matrix, iterations), rtol=1e-11)
    assert (made > 0).all()
    assert np.abs(made.sum(axis=1) - 1).max() <= 1e-13
    spread = np.ptp(matrix)
    bound = math.expm1(spread * math.tanh(spread / 2) ** (2 * iterations - 1))
    assert np.abs(made.sum(axis=0) - 1).max() <= bound + 1e-12


def test_large_numbers_neither_vanish_nor_overflow():
    matrix = paddle.to_tensor([[500.0, -500.0], [-500.0, 500.0]], dtype="float32", stop_gradient=False)
    made = sinkhorn(OPS, matrix, 20)
    assert made.numpy().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    paddle.autograd.backward([made], [paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]])])
    assert np.isfinite(matrix.grad.numpy()).all()


def own_weights(generic):
    return {"weight": generic(3 * HIDDEN, GATES), "scale": generic(3), "bias": generic(GATES)}


def leaves(own):
    return {end: paddle.to_tensor(value, stop_gradient=False) for end, value in own.items()}


def test_streams_around_a_sub_layer_are_what_a_loop_over_tokens_computes(generic):
    own, x, turn = own_weights(generic), generic(4, 2, 3 * HIDDEN), generic(HIDDEN, HIDDEN)

    def sub_layer(read):
        return paddle.matmul(read, paddle.to_tensor(turn))

    made = with_streams(OPS, paddle.to_tensor(x), sub_layer, OF, SplitWeights(), leaves(own)).numpy()
    scale = np.repeat(own["scale"], [3, 3, 9])
    for place in np.ndindex(4, 2):
        token = x[place]
        gates = scale * (token / np.sqrt((token @ token) / len(token) + 1e-6) @ own["weight"]) + own["bias"]
        streams = token.reshape(3, HIDDEN)
        read = sigmoid(gates[:3]) @ streams
        expected = balanced(gates[6:].reshape(3, 3), 4) @ streams + np.outer(2 * sigmoid(gates[3:6]), read @ turn)
        np.testing.assert_allclose(made[place], expected.reshape(-1), rtol=1e-10)


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_gradients_are_the_slopes_of_the_loss(order):
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2, **STREAMS},
        run={"dtype": "float64"}, schedule={"num_micro_batches": 1},
    )  # fmt: skip
    assert_slopes(plan, shift=0.3)
