"""The mathematics: adjoints, finite differences, and a forward pass written without Paddle."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest

from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.optimizer import StageOptimizer
from pipeproof.stages.paddle.stage import token_losses
from pipeproof.stages.reference.unpartitioned import run_unpartitioned
from tests.features import GPT3, QWEN3
from tests.stages.references import make_plan
from tests.stages.slopes import assert_slopes
from tests.stages.world import World

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


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
    )


def test_threads_are_pinned_whatever_the_environment_asks_for_and_nothing_is_printed():
    code = (
        "from pipeproof.stages.paddle.runtime import num_math_threads, start_paddle; start_paddle(); start_paddle(); "
        "import sys; sys.exit(10 + num_math_threads())"
    )
    done = run_python(code, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")
    assert (done.returncode, done.stdout, done.stderr) == (11, "", "")


def test_paddle_that_has_computed_with_more_threads_is_refused():
    code = (
        "import paddle; paddle.ones([64, 64]) @ paddle.ones([64, 64])\n"
        "from pipeproof.stages.paddle.runtime import start_paddle; start_paddle()"
    )
    done = run_python(code, OMP_NUM_THREADS="2")
    assert done.returncode == 1
    assert "Paddle computes with 2 threads" in done.stderr
    assert "OMP_NUM_THREADS=1" in done.stderr


def test_what_was_swallowed_is_shown_when_the_start_fails():
    code = (
        "import sys; from pipeproof.stages.paddle.runtime import quiet_python\n"
        "with quiet_python():\n    print('the cause', file=sys.stderr)\n    raise RuntimeError('no start')"
    )
    done = run_python(code)
    assert "the cause" in done.stderr
    assert "no start" in done.stderr


pytestmark = pytest.mark.needs_paddle


@pytest.fixture
def generic():
    """A source of values with no symmetry that could hide a mistake."""
    generator = np.random.default_rng(5)
    return lambda *shape: generator.standard_normal(shape)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vocabulary_parallel_losses_are_what_one_rank_would_compute(generic, num_ranks):
    """The vocabulary on several ranks, some tokens not counted."""
    logits, labels = 3 * generic(4, 2, 12), np.array([[0, 11], [5, -100], [6, 7], [-100, 2]])
    world = World(paddle, tp=num_ranks)

    def on_rank(rank):
        region = TensorParallelRegion(OPS, rank, num_ranks, None, world.ranks[rank])
        own = paddle.to_tensor(np.split(logits, num_ranks, axis=-1)[rank].copy())
        return token_losses([own], [paddle.to_tensor(labels)], region, 1)[0].numpy()

    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, np.maximum(labels, 0)[..., None], -1)[..., 0])
    np.testing.assert_allclose(world.run(on_rank)[0], np.where(labels == -100, 0.0, expected), rtol=1e-12)


def test_vocabulary_parallel_loss_survives_logits_that_overflow_exp():
    world = World(paddle, tp=2)

    def on_rank(rank):
        region = TensorParallelRegion(OPS, rank, 2, None, world.ranks[rank])
        logits = paddle.to_tensor([[1000.0, 999.0]] if rank else [[-1000.0, 998.0]], dtype="float32")
        return token_losses([logits], [paddle.to_tensor([1])], region, 0)[0].numpy()

    expected = 2.0 + np.log1p(np.exp(-1.0) + np.exp(-2.0))
    np.testing.assert_allclose(world.run(on_rank)[0], [expected], rtol=1e-6)


PARTS = {
    "Llama": {},
    "Qwen3": QWEN3,
    "GPT-3": {**GPT3, "tied_embedding": False},
    "Qwen2": {"biases": "qkv", "num_kv_heads": 2},
    "LayerNorm of heads": {**QWEN3, "norm": "layer", "biases": "all", "mlp": "gelu_tanh"},
    "biases of SwiGLU": {"biases": "all", "swiglu_limit": 0.05},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_loss_is_that_of_a_forward_pass_written_without_paddle(order, parts):
    """In the second step, when biases are not zero and weights of norms differ."""
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2, **parts},
        run={"dtype": "float64", "steps": 2, "optimizer": "adamw", "learning_rate": 0.1},
        schedule={"micro_batch_size": 3},
    )
    num = plan.schedule.num_micro_batches
    _, reference = run_unpartitioned(plan)
    losses = (numpy_loss(plan, reference.weights, micro_batch(plan, 1, i)) * loss_scale(plan, 1, i) for i in range(num))
    expected = sum(losses)
    assert all(np.ptp(weight) > 0.01 for weight in reference.weights.values())
    assert float(reference.loss) == pytest.approx(expected, rel=1e-13)


def numpy_loss(plan, weights, batch):
    """The summed cross-entropy, one row, head and position after another."""
    model, size, group = plan.model, plan.model.size_of_head, plan.model.num_heads // plan.model.kv_heads

    def norm(x, name):
        x = x - x.mean(axis=1, keepdims=True) if model.norm == "layer" else x
        normed = np.array([row / np.sqrt((row @ row) / len(row) + 1e-6) for row in x]) * weights[f"{name}.weight"]
        return normed + weights[f"{name}.bias"] if model.norm == "layer" else normed

    def product(x, name):
        return x @ weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)

    def turned(head):
        """Rotary by its definition: pairs as complex numbers, turned by an angle."""
        pairs = head[:, : size // 2] + 1j * head[:, size // 2 :]
        angles = [[p / 10000 ** (2 * i / size) for i in range(size // 2)] for p in range(len(head))]
        pairs = pairs * np.exp(1j * np.array(angles))
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    def attention(x, name):
        of_groups = np.split(product(x, f"{name}.qkv"), model.kv_heads, axis=1)
        mixed = []
        for head in range(model.num_heads):
            own, number = of_groups[head // group], head % group
            q, k, v = (own[:, part * size : (part + 1) * size] for part in (number, group, group + 1))
            if model.qk_norm:
                q, k = norm(q, f"{name}.q_head_norm"), norm(k, f"{name}.k_head_norm")
            if model.positions == "rotary":
                q, k = turned(q), turned(k)
            rows = []
            for position in range(len(x)):
                seen = np.exp(k[: position + 1] @ q[position] / np.sqrt(size))
                rows.append(seen / seen.sum() @ v[: position + 1])
            mixed.append(rows)
        return product(np.concatenate(mixed, axis=1), f"{name}.out")

    def mlp(x, name):
        up = product(x, f"{name}.up")
        if model.mlp == "gelu":
            inner = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
        elif model.mlp == "gelu_tanh":
            inner = up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))) / 2
        elif model.swiglu_limit is None:
            gate = product(x, f"{name}.gate")
            inner = gate / (1 + np.exp(-gate)) * up
        else:
            limit, gate = model.swiglu_limit, np.minimum(product(x, f"{name}.gate"), model.swiglu_limit)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -limit, limit) + 1)
        return product(inner, f"{name}.down")

    total = 0.0
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        x = weights["embed.weight"][tokens]
        if model.positions == "learned":
            x = x + weights["embed.positions.weight"][: len(x)]
        for i in range(model.num_layers):
            x = x + attention(norm(x, f"layer.{i}.attn_norm"), f"layer.{i}.attn")
            x = x + mlp(norm(x, f"layer.{i}.mlp_norm"), f"layer.{i}.mlp")
        logits = norm(x, "norm") @ (weights["embed.weight"].T if model.tied_embedding else weights["head.weight"])
        for row, label in zip(logits, labels, strict=True):
            if label != -100:
                total += np.log(np.exp(row).sum()) - row[label]
    return total


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"activation_order": "bsh"},
        *({"num_kv_heads": 2, **recipe} for recipe in (
            {"dropout": 0.2}, {"swiglu_limit": 0.7}, {**QWEN3, "norm": "layer", "biases": "all"}, GPT3,
        )),
    ],
)  # fmt: skip
def test_gradients_are_the_slopes_of_the_loss(recipe):
    model = {"num_layers": 2, **recipe}
    assert_slopes(make_plan(model=model, run={"dtype": "float64"}, schedule={"num_micro_batches": 1}))
