"""The mathematics: adjoints, finite differences, and a forward pass written without Paddle."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import initial_weight, loss_scale, micro_batch
from pipeproof.stages.paddle.collectives import TensorParallelRegion
from pipeproof.stages.paddle.functional import rms_norm, rotary_tables, rotate, swiglu
from pipeproof.stages.paddle.vocabulary import token_losses
from pipeproof.stages.reference.uncut import UncutModel, run_uncut
from tests.stages.staged_run import StagedRun, make_plan
from tests.stages.tensor_parallel import InMemoryWorld

pytestmark = pytest.mark.needs_paddle

STEP = 1e-5
"""Of central differences in float64: their error is about 1e-10 of the third derivative, their rounding 1e-11."""


@pytest.fixture
def generic():
    """A source of values with no symmetry that could hide a mistake."""
    generator = np.random.default_rng(5)
    return lambda *shape: generator.standard_normal(shape)


def assert_adjoint(function, inputs, directions, y):
    """<J x, y> by central differences of ``function`` equals <x, J^T y> by its backward."""
    leaves = [paddle.to_tensor(value, stop_gradient=False) for value in inputs]
    paddle.autograd.backward([function(*leaves)], [paddle.to_tensor(y)])
    pulled = sum((leaf.grad.numpy() * x).sum() for leaf, x in zip(leaves, directions, strict=True))
    sides = [
        function(*[paddle.to_tensor(value + sign * STEP * x) for value, x in zip(inputs, directions, strict=True)])
        for sign in (1.0, -1.0)
    ]
    pushed = ((sides[0] - sides[1]).numpy() / (2 * STEP) * y).sum()
    assert abs(pushed) > 1e-3, "the test would not see a gradient of zero"
    assert pulled == pytest.approx(pushed, rel=1e-7)


def test_rotary_adjoint_with_generic_tables(generic):
    """The halves of the sines differ here, as no real table's do: a backward that swaps them is seen."""
    cos, sin = paddle.to_tensor(generic(5, 6)), paddle.to_tensor(generic(5, 6))
    assert_adjoint(lambda x: rotate(x, cos, sin), [generic(2, 3, 5, 6)], [generic(2, 3, 5, 6)], generic(2, 3, 5, 6))


def test_rotary_uses_each_half_of_its_tables(generic):
    x, cos, sin = generic(5, 6), generic(5, 6), generic(5, 6)
    half_turned = np.concatenate([-x[:, 3:], x[:, :3]], axis=1)
    turned = rotate(*[paddle.to_tensor(value) for value in (x, cos, sin)]).numpy()
    np.testing.assert_allclose(turned, x * cos + half_turned * sin, rtol=1e-14)


def test_rms_norm_adjoint(generic):
    inputs, directions = [[generic(3, 4, 8)] for _ in range(2)]
    assert_adjoint(rms_norm, inputs, directions, generic(3, 4, 8))


def test_swiglu_adjoint(generic):
    inputs, directions = [[generic(3, 8), generic(3, 8)] for _ in range(2)]
    assert_adjoint(swiglu, inputs, directions, generic(3, 8))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vocabulary_parallel_loss_adjoint_and_value(generic, num_ranks):
    """Each token's loss with a weight of its own, the vocabulary on several ranks, some tokens not counted."""
    num_words = 12
    logits, x, y = 3 * generic(4, 2, num_words), generic(4, 2, num_words), generic(4, 2)
    labels = np.array([[0, 11], [5, -100], [6, 7], [-100, 2]])

    def losses_and_pulled(values):
        world = InMemoryWorld(num_ranks)

        def on_rank(rank):
            region = TensorParallelRegion(rank, num_ranks, None, world.ranks[rank])
            shard = np.split(values, num_ranks, axis=-1)[rank].copy()
            own = paddle.to_tensor(shard, stop_gradient=False)
            losses = token_losses(own, paddle.to_tensor(labels), region)
            paddle.autograd.backward([losses], [paddle.to_tensor(y)])
            return losses.numpy(), (own.grad.numpy() * np.split(x, num_ranks, axis=-1)[rank]).sum()

        every = world.run(on_rank)
        return every[0][0], sum(pulled for _, pulled in every)

    values, pulled = losses_and_pulled(logits)
    pushed = (losses_and_pulled(logits + STEP * x)[0] - losses_and_pulled(logits - STEP * x)[0]) / (2 * STEP)
    assert pulled == pytest.approx((pushed * y).sum(), rel=1e-7)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, np.maximum(labels, 0)[..., None], -1)[..., 0])
    np.testing.assert_allclose(values, np.where(labels == -100, 0.0, expected), rtol=1e-12)


def test_vocabulary_parallel_loss_survives_logits_that_overflow_exp():
    world = InMemoryWorld(2)

    def on_rank(rank):
        region = TensorParallelRegion(rank, 2, None, world.ranks[rank])
        logits = paddle.to_tensor([[1000.0, 999.0]] if rank else [[-1000.0, 998.0]], dtype="float32")
        return token_losses(logits, paddle.to_tensor([1]), region).numpy()

    expected = 2.0 + np.log1p(np.exp(-1.0) + np.exp(-2.0))
    np.testing.assert_allclose(world.run(on_rank)[0], [expected], rtol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone(generic):
    cos, sin = rotary_tables(9, 6, "float64")
    query, key = [paddle.to_tensor(np.tile(generic(6), (9, 1))) for _ in range(2)]
    scores = paddle.matmul(rotate(query, cos, sin), rotate(key, cos, sin), transpose_y=True).numpy()
    for offset in range(-8, 9):
        np.testing.assert_allclose(np.diagonal(scores, offset), np.diagonal(scores, offset)[0], rtol=1e-12)
    assert np.ptp(scores) > 0.1


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_loss_is_that_of_a_forward_pass_written_without_paddle(order):
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2},
        run={"dtype": "float64", "steps": 1},
        schedule={"micro_batch_size": 3},
    )
    num = plan.schedule.num_micro_batches
    expected = sum(numpy_loss(plan, micro_batch(plan, 0, i)) * loss_scale(plan, 0, i) for i in range(num))
    (reference,) = run_uncut(plan)
    (ours,) = StagedRun(plan).steps()
    assert float(reference.loss) == pytest.approx(expected, rel=1e-13)
    assert float(ours.loss) == pytest.approx(expected, rel=1e-13)


def numpy_loss(plan, batch):
    """The summed cross-entropy, one row, head and position after another."""
    weights = big_weights(plan)
    model = plan.model
    size = model.hidden_size // model.num_heads

    def norm(x, name):
        return np.array([row / np.sqrt((row @ row) / len(row) + 1e-6) for row in x]) * weights[name]

    def turned(head):
        """Rotary as what it is: pairs as complex numbers, turned by an angle."""
        pairs = head[:, : size // 2] + 1j * head[:, size // 2 :]
        angles = [[p / 10000 ** (2 * i / size) for i in range(size // 2)] for p in range(len(head))]
        pairs = pairs * np.exp(1j * np.array(angles))
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    def attention(x, name):
        qkv = x @ weights[f"{name}.qkv.weight"]
        mixed = []
        for head in range(model.num_heads):
            q, k, v = (qkv[:, (3 * head + part) * size : (3 * head + part + 1) * size] for part in range(3))
            q, k = turned(q), turned(k)
            rows = []
            for position in range(len(x)):
                seen = np.exp(k[: position + 1] @ q[position] / np.sqrt(size))
                rows.append(seen / seen.sum() @ v[: position + 1])
            mixed.append(rows)
        return np.concatenate(mixed, axis=1) @ weights[f"{name}.out.weight"]

    total = 0.0
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        x = weights["embed.weight"][tokens]
        for i in range(model.num_layers):
            x = x + attention(norm(x, f"layer.{i}.attn_norm.weight"), f"layer.{i}.attn")
            inner = norm(x, f"layer.{i}.mlp_norm.weight")
            gate, up = inner @ weights[f"layer.{i}.mlp.gate.weight"], inner @ weights[f"layer.{i}.mlp.up.weight"]
            x = x + gate / (1 + np.exp(-gate)) * up @ weights[f"layer.{i}.mlp.down.weight"]
        logits = norm(x, "norm.weight") @ weights["head.weight"]
        for row, label in zip(logits, labels, strict=True):
            if label != -100:
                total += np.log(np.exp(row).sum()) - row[label]
    return total


def big_weights(plan):
    return {
        p.name: initial_weight(p, plan.run.seed, plan.run.dtype)
        for layer in describe_gpt(plan)
        for p in layer.parameters
    }


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_gradients_are_the_slopes_of_the_loss(order):
    """Central differences in a few entries of every weight, the weights enlarged so that all of them matter."""
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2}, run={"dtype": "float64"}, schedule={"num_micro_batches": 1}
    )
    generator = np.random.default_rng(2)
    weights = {
        name: whole * (1.0 + 0.3 * generator.standard_normal(whole.shape)) * (1.0 if whole.ndim == 1 else 10.0)
        for name, whole in big_weights(plan).items()
    }
    batch, scale = micro_batch(plan, 0, 0), loss_scale(plan, 0, 0)
    model = UncutModel(plan, weights)
    (model.loss(batch) * scale).backward()
    for name, whole in weights.items():
        grad = model.weights[name].grad.numpy()
        for flat in (int(np.abs(grad).argmax()), int(generator.integers(grad.size))):
            place = np.unravel_index(flat, grad.shape)
            sides = []
            for sign in (1.0, -1.0):
                moved = whole.copy()
                moved[place] += sign * STEP
                sides.append(float(UncutModel(plan, {**weights, name: moved}).loss(batch) * scale))
            slope = (sides[0] - sides[1]) / (2 * STEP)
            assert grad[place] == pytest.approx(slope, rel=1e-6, abs=1e-9), f"{name}{place}"
