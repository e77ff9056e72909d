"""Experts, query groups and latent attention: loops without Paddle, slopes, choices, and W."""

import numpy as np
import paddle
import pytest

from pipeproof.specs.model import MoeSpec
from pipeproof.stages.common.experts import ExpertRegion
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.experts import PaddleBalance, PaddleExperts, choose, reorder
from pipeproof.stages.paddle.functional import causal_attention, fork, swiglu
from pipeproof.stages.paddle.weights import SplitWeights
from pipeproof.stages.reference.experts import route
from tests.stages.references import make_plan
from tests.stages.slopes import assert_slopes, big_weights, whole_model

pytestmark = pytest.mark.needs_paddle

MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 6, "num_shared_experts": 1}
MLA = {"q_rank": 6, "kv_rank": 4, "nope_head_size": 2, "rope_head_size": 4, "value_head_size": 3}
HIDDEN = 8


@pytest.fixture
def generic():
    generator = np.random.default_rng(7)
    return lambda *shape: generator.standard_normal(shape)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_are_what_a_loop_over_tokens_computes(generic, score, normalize):
    moe = MoeSpec(**MOE, score=score, normalize=normalize)
    shapes = {
        "router": (HIDDEN, 12), "experts.gate": (12, HIDDEN, 6), "experts.up": (12, HIDDEN, 6),
        "experts.down": (12, 6, HIDDEN), "shared.gate": (HIDDEN, 6), "shared.up": (HIDDEN, 6),
        "shared.down": (6, HIDDEN),
    }  # fmt: skip
    arrays = {f"mlp.{name}.weight": generic(*shape) for name, shape in shapes.items()}
    tokens = generic(5, 2, HIDDEN)
    weights = {name: paddle.to_tensor(array, stop_gradient=False) for name, array in arrays.items()}
    entered = paddle.to_tensor(tokens, stop_gradient=False)
    router = PaddleBalance(make_plan(), (), adds_losses=True).of("mlp", 0, 0)
    experts = PaddleExperts(
        moe, "mlp", SplitWeights(), weights.__getitem__, ExpertRegion(OPS, 0, 1, None), swiglu, recomputes_shared=False
    )
    made = experts.forward(entered, router)
    gate, up, down = (arrays[f"mlp.experts.{part}.weight"] for part in ("gate", "up", "down"))
    shared = [arrays[f"mlp.shared.{part}.weight"] for part in ("gate", "up", "down")]
    for place in np.ndindex(5, 2):
        x = tokens[place]
        logits = x @ arrays["mlp.router.weight"]
        scores = np.exp(logits) / np.exp(logits).sum() if score == "softmax" else 1 / (1 + np.exp(-logits))
        best = sorted(range(12), key=lambda e: scores[e])[-3:]
        total = sum(scores[e] for e in best) if normalize else 1.0
        expected = (silu(x @ shared[0]) * (x @ shared[1])) @ shared[2]
        for e in best:
            expected = expected + scores[e] / total * ((silu(x @ gate[e]) * (x @ up[e])) @ down[e])
        np.testing.assert_allclose(made.numpy()[place], expected, rtol=1e-11)


def test_of_equal_scores_the_lower_experts_are_chosen():
    moe = MoeSpec(num_experts=12, top_k=3, ffn_size=1)
    logits = np.zeros((3, 12), dtype="float32")
    logits[1, [11, 4]] = 1.0
    logits[2, [2, 10]] = [-1.0, 1.0]
    expected = [[0, 1, 2], [4, 11, 0], [10, 0, 1]]
    assert choose(paddle.to_tensor(logits), moe)[0].tolist() == expected
    assert route(paddle.to_tensor(logits), moe).experts.tolist() == expected


@pytest.mark.slow(but=["attention0-softmax-sbh", "attention0-sigmoid-bsh", "attention1-sigmoid-bsh"])
@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("attention", [{"num_kv_heads": 2, "head_size": 6}, {"mla": MLA}])
def test_gradients_of_all_parts_are_the_slopes_of_the_loss(attention, score, order):
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2, **attention,
               "moe": {**MOE, "dense_layers": 1, "score": score}},
        run={"dtype": "float64"}, schedule={"num_micro_batches": 1},
    )  # fmt: skip
    assert_slopes(plan)


def head_by_head(x, weights, mla, num_heads):
    """Latent attention of one row, [S, H]: heads and positions one after another, rotary as pairs turned by angles."""
    nope, rope, value = mla["nope_head_size"], mla["rope_head_size"], mla["value_head_size"]

    def norm(rows, name):
        return np.array([row / np.sqrt((row @ row) / len(row) + 1e-6) for row in rows]) * weights[f"{name}.weight"]

    def turned(rows):
        pairs = rows[:, : rope // 2] + 1j * rows[:, rope // 2 :]
        angles = [[p / 10000 ** (2 * i / rope) for i in range(rope // 2)] for p in range(len(rows))]
        pairs = pairs * np.exp(1j * np.array(angles))
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    if mla["q_rank"] is None:
        q = x @ weights["q.weight"]
    else:
        q = norm(x @ weights["q_down.weight"], "q_norm") @ weights["q_up.weight"]
    down = x @ weights["kv_down.weight"]
    kv, shared = norm(down[:, : mla["kv_rank"]], "kv_norm") @ weights["kv_up.weight"], turned(down[:, mla["kv_rank"] :])
    mixed = []
    for head in range(num_heads):
        own_q = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
        own_q = np.concatenate([own_q[:, :nope], turned(own_q[:, nope:])], axis=1)
        own_kv = kv[:, head * (nope + value) : (head + 1) * (nope + value)]
        keys = np.concatenate([own_kv[:, :nope], shared], axis=1)
        rows = []
        for position in range(len(x)):
            seen = np.exp(keys[: position + 1] @ own_q[position] / np.sqrt(nope + rope))
            rows.append(seen / seen.sum() @ own_kv[: position + 1, nope:])
        mixed.append(rows)
    return np.concatenate(mixed, axis=1) @ weights["out.weight"]


@pytest.mark.parametrize("q_rank", [6, None])
@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_latent_attention_is_what_a_loop_over_heads_computes(generic, order, q_rank):
    mla = {**MLA, "q_rank": q_rank}
    plan = make_plan(model={"activation_order": order, "num_layers": 1, "mla": mla}, run={"dtype": "float64"})
    model = whole_model(plan, {name: generic(*whole.shape) for name, whole in big_weights(plan).items()})
    x = generic(*((8, 3, 16) if order == "sbh" else (3, 8, 16)))
    made = model.attention([paddle.to_tensor(x)], "layer.0.attn")[0].numpy()
    weights = {n.removeprefix("layer.0.attn."): w.numpy() for n, (w,) in model.weights.items() if ".attn." in n}
    for row in range(3):
        own = (slice(None), row) if order == "sbh" else row
        np.testing.assert_allclose(made[own], head_by_head(x[own], weights, mla, 4), rtol=1e-9, atol=1e-12)


def test_moved_and_forked_gradients_keep_the_sign_of_zero():
    rows = paddle.to_tensor([[1.0], [2.0], [3.0]], stop_gradient=False)
    moved = reorder(rows, np.array([2, 0, 1]))
    assert moved.numpy().tolist() == [[3.0], [1.0], [2.0]]
    paddle.autograd.backward([moved], [paddle.to_tensor([[-0.0], [5.0], [0.0]])])
    assert str(rows.grad.numpy().tolist()) == "[[5.0], [0.0], [-0.0]]"


def test_gradients_of_readers_are_added_in_their_order():
    x = paddle.to_tensor([1.0], dtype="float32", stop_gradient=False)
    readers = fork(x, 3)
    paddle.autograd.backward(readers[::-1], [paddle.to_tensor([g], dtype="float32") for g in (1.0, -1e8, 1e8)])
    assert x.grad.numpy().tolist() == [1.0], "(1e8 - 1e8) + 1"


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 1), (0, 2)])
def test_a_region_refuses_ranks_that_it_cannot_serve(rank, num_ranks):
    with pytest.raises(ValueError, match="expert-parallel rank"):
        ExpertRegion(OPS, rank, num_ranks, None)


def test_a_group_of_queries_sees_its_own_head_of_keys(generic):
    """Query by query: [B, K, G, S, D] with more keys than queries, which are then the last positions."""
    query, key, value = generic(2, 2, 3, 4, 6), generic(2, 2, 5, 6), generic(2, 2, 5, 6)
    mixed = causal_attention(*map(paddle.to_tensor, (query, key, value))).numpy()
    for b, k, g, s in np.ndindex(2, 2, 3, 4):
        seen = np.exp(key[b, k, : s + 2] @ query[b, k, g, s] / np.sqrt(6))
        np.testing.assert_allclose(mixed[b, k, g, s], seen / seen.sum() @ value[b, k, : s + 2], rtol=1e-12)
