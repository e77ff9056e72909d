"""The mathematics: adjoints, finite differences, and a forward pass written without Paddle."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.functional import rotary_tables, rotate
from pipeproof.stages.paddle.vocabulary import token_losses
from pipeproof.stages.reference.unpartitioned import run_unpartitioned
from tests.stages.slopes import assert_slopes, big_weights
from tests.stages.staged_run import StagedRun, make_plan
from tests.stages.tensor_parallel import InMemoryWorld

pytestmark = pytest.mark.needs_paddle


@pytest.fixture
def generic():
    """A source of values with no symmetry that could hide a mistake."""
    generator = np.random.default_rng(5)
    return lambda *shape: generator.standard_normal(shape)


def test_rotary_uses_each_half_of_its_tables(generic):
    x, cos, sin = generic(5, 6), generic(5, 6), generic(5, 6)
    half_turned = np.concatenate([-x[:, 3:], x[:, :3]], axis=1)
    turned = rotate(*[paddle.to_tensor(value) for value in (x, cos, sin)]).numpy()
    np.testing.assert_allclose(turned, x * cos + half_turned * sin, rtol=1e-14)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vocabulary_parallel_losses_are_what_one_rank_would_compute(generic, num_ranks):
    """The vocabulary on several ranks, some tokens not counted."""
    logits, labels = 3 * generic(4, 2, 12), np.array([[0, 11], [5, -100], [6, 7], [-100, 2]])
    world = InMemoryWorld(num_ranks)

    def on_rank(rank):
        region = TensorParallelRegion(OPS, rank, num_ranks, None, world.ranks[rank])
        own = paddle.to_tensor(np.split(logits, num_ranks, axis=-1)[rank].copy())
        return token_losses([own], [paddle.to_tensor(labels)], region, 1)[0].numpy()

    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, np.maximum(labels, 0)[..., None], -1)[..., 0])
    np.testing.assert_allclose(world.run(on_rank)[0], np.where(labels == -100, 0.0, expected), rtol=1e-12)


def test_vocabulary_parallel_loss_survives_logits_that_overflow_exp():
    world = InMemoryWorld(2)

    def on_rank(rank):
        region = TensorParallelRegion(OPS, rank, 2, None, world.ranks[rank])
        logits = paddle.to_tensor([[1000.0, 999.0]] if rank else [[-1000.0, 998.0]], dtype="float32")
        return token_losses([logits], [paddle.to_tensor([1])], region, 0)[0].numpy()

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
    (reference,) = run_unpartitioned(plan)
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


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_gradients_are_the_slopes_of_the_loss(order):
    schedule = {"num_micro_batches": 1}
    assert_slopes(
        make_plan(model={"activation_order": order, "num_layers": 2}, run={"dtype": "float64"}, schedule=schedule)
    )


@pytest.mark.parametrize("recipe", [{"dropout": 0.2}, {"swiglu_limit": 0.7}])
def test_gradients_are_the_slopes_of_the_loss_with_dropout_and_clamps(recipe):
    model = {"num_layers": 2, "num_kv_heads": 2, **recipe}
    assert_slopes(make_plan(model=model, run={"dtype": "float64"}, schedule={"num_micro_batches": 1}))
