"""Hyper-connections: the mathematics, loops without Paddle, slopes, W, and every partition of the model."""

import math

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeproof.specs.model import HyperConnectionsSpec
from pipeproof.stages.common.stage import contract_streams, expand_streams, sinkhorn, with_streams
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.stage import PaddleStage
from pipeproof.stages.paddle.weights import SplitWeights
from pipeproof.stages.reference.unpartitioned import run_unpartitioned
from tests.stages.adjoints.world import STEP
from tests.stages.slopes import assert_adjoint, big_weights, whole_model
from tests.stages.staged_run import StagedRun, make_plan, same_bits
from tests.stages.test_recompute import allocated

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


@pytest.mark.parametrize("iterations", [1, 4, 20])
def test_adjoint_of_sinkhorn(generic, iterations):
    shape = (2, 3, 4, 4)
    assert_adjoint(lambda x: sinkhorn(OPS, x, iterations), [generic(*shape)], [generic(*shape)], generic(*shape))


def own_weights(generic):
    return {"weight": generic(3 * HIDDEN, GATES), "scale": generic(3), "bias": generic(GATES)}


def leaves(own):
    return {end: paddle.to_tensor(value, stop_gradient=False) for end, value in own.items()}


def test_adjoint_around_a_sub_layer(generic):
    own, x = own_weights(generic), (4, 2, 3 * HIDDEN)
    weights = SplitWeights()

    def behind(streams):
        return with_streams(OPS, streams, lambda read: paddle.tanh(read) * 0.5, OF, weights, leaves(own))

    assert_adjoint(behind, [generic(*x)], [generic(*x)], generic(*x))


def test_adjoint_of_the_ends(generic):
    both = (4, 2, HIDDEN), (4, 2, 3 * HIDDEN)
    assert_adjoint(lambda x: expand_streams(OPS, x, 3), [generic(*both[0])], [generic(*both[0])], generic(*both[1]))
    assert_adjoint(lambda x: contract_streams(OPS, x, 3), [generic(*both[1])], [generic(*both[1])], generic(*both[0]))


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


def test_w_computes_the_gradients_of_weights_and_i_none(generic):
    x, own, y = generic(4, 2, GATES), {"scale": generic(3), "bias": generic(GATES)}, generic(4, 2, GATES)
    given_, parts, uses = paddle.to_tensor(x, stop_gradient=False), leaves(own), SplitWeights()
    made = uses.scaled_and_shifted(given_, parts["scale"], parts["bias"], [3, 3, 9])
    np.testing.assert_allclose(made.numpy(), x * np.repeat(own["scale"], [3, 3, 9]) + own["bias"], rtol=1e-14)
    later = uses.backward(made, paddle.to_tensor(y))
    assert parts["scale"].grad is None
    assert parts["bias"].grad is None
    np.testing.assert_allclose(given_.grad.numpy(), y * np.repeat(own["scale"], [3, 3, 9]), rtol=1e-14)
    later.accumulate()
    columns = (x * y).sum(axis=(0, 1))
    sums = [columns[:3].sum(), columns[3:6].sum(), columns[6:].sum()]
    np.testing.assert_allclose(parts["scale"].grad.numpy(), sums, rtol=1e-12)
    np.testing.assert_allclose(parts["bias"].grad.numpy(), y.sum(axis=(0, 1)), rtol=1e-12)


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_gradients_are_the_slopes_of_the_loss(order):
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2, **STREAMS},
        run={"dtype": "float64"}, schedule={"num_micro_batches": 1},
    )  # fmt: skip
    generator = np.random.default_rng(4)
    weights = {name: whole + 0.3 * generator.standard_normal(whole.shape) for name, whole in big_weights(plan).items()}
    batch, scale = micro_batch(plan, 0, 0), loss_scale(plan, 0, 0)
    model = whole_model(plan, weights)
    (model.losses([batch])[0][0] * scale).backward()
    own = [name for name in weights if "_streams." in name]
    assert len(own) == 2 * 2 * 3
    for name in [*own, "embed.weight", "layer.1.mlp_norm.weight"]:
        grad = model.weights[name][0].grad.numpy()
        place = np.unravel_index(int(np.abs(grad).argmax()), grad.shape)
        assert abs(grad[place]) > 1e-4, "the test would not see a gradient of zero"
        sides = []
        for sign in (1.0, -1.0):
            moved = weights[name].copy()
            moved[place] += sign * STEP
            sides.append(float(whole_model(plan, {**weights, name: moved}).losses([batch])[0][0] * scale))
        assert grad[place] == pytest.approx((sides[0] - sides[1]) / (2 * STEP), rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("num_layers", "cut"), [(4, ()), (4, (1,)), (4, (2, 4)), (4, (5, 6)), (1, (1, 2))])
def test_any_cut_is_bitwise_the_unpartitioned_model(num_layers, cut, dtype):
    """Also between the embedding and the first block, between the last block and the norm, around a block alone."""
    plan = make_plan(model={"num_layers": num_layers, **STREAMS}, run={"dtype": dtype, "steps": 2})
    for ours, reference in zip(StagedRun(plan, cut).steps(), run_unpartitioned(plan), strict=True):
        assert ours.loss.tobytes() == reference.loss.tobytes()
        assert same_bits(ours.gradients, reference.gradients) == []
        assert all(gradient.any() for gradient in reference.gradients.values())


@pytest.mark.usefixtures("few_objects")
def test_recomputation_keeps_the_streams_alone_and_changes_no_bit():
    kept, *again = (gone_through(recompute) for recompute in ("none", "selective", "full"))
    assert all(gradient.any() for gradient in kept.values())
    for gradients in again:
        assert same_bits(gradients, kept) == []


def gone_through(recompute):
    """The gradients of two blocks that get and give three streams, after counting their saved bytes."""
    plan = make_plan(model=STREAMS, memory={"recompute": recompute})
    stage = PaddleStage(plan, describe_gpt(plan)[2:4])
    for weight in stage.parameters.values():
        weight.grad = paddle.zeros_like(weight)
    given_ = paddle.to_tensor(np.random.default_rng(1).standard_normal((8, 2, 48)).astype("float32"))
    given_.stop_gradient = False
    before = allocated()
    output = stage.forward(given_, micro_batch(plan, 0, 0), step=0, index=0)
    of_streams = 4 * 8 * 2 * 48
    if recompute == "full":
        assert allocated() - before == of_streams + of_streams  # of the second block, and the output
    else:
        assert allocated() - before > 8 * of_streams
    stage.backward_input(output, paddle.ones_like(output)).accumulate()
    gradients = {name: weight.grad.numpy() for name, weight in stage.parameters.items()}
    return {"given": given_.grad.numpy(), **gradients}
