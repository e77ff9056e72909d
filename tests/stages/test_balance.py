"""Router losses against their formulas, and biases that follow the load; gradients are in ``adjoints/experts.py``."""

import numpy as np
import paddle
import pytest

from pipeproof.specs.model import MoeSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.paddle.experts import PaddleBalance, choose
from pipeproof.stages.reference import experts as reference
from tests.stages.references import make_plan

pytestmark = pytest.mark.needs_paddle

NUM_TOKENS, NUM_EXPERTS, TOP_K = 7, 12, 3
SIZES = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "ffn_size": 8}
WEIGHT = 1 / 3
"""Weight of a work item: there are three micro-batches."""


def stage_balance(*, adds_losses=True, **moe):
    plan = make_plan(
        model={"moe": {**SIZES, **moe}, "num_layers": 1}, run={"dtype": "float64"}, schedule={"num_micro_batches": 3}
    )
    return PaddleBalance(plan, describe_gpt(plan), adds_losses=adds_losses)


def outputs(seed=0):
    return np.random.default_rng(seed).standard_normal((NUM_TOKENS, NUM_EXPERTS))


def by_formula(logits, score, aux, z):
    """The paper's sums, written out."""
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-scores, axis=1)[:, :TOP_K]
    total = 0.0
    for expert in range(NUM_EXPERTS):
        share = sum(expert in row for row in chosen) / (NUM_TOKENS * TOP_K)
        probability = sum(row[expert] / row.sum() for row in scores) / NUM_TOKENS
        total += NUM_EXPERTS * share * probability
    squares = np.log(np.exp(logits).sum(axis=1)) ** 2
    return aux * total, z * squares.mean()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_are_those_of_the_formulas(score):
    balance = stage_balance(aux_loss=0.1, z_loss=0.01, score=score)
    balance.of("layer.0.mlp", 2, 0).enter(paddle.to_tensor(outputs()))
    aux, z = by_formula(outputs(), score, 0.1, 0.01)
    values = balance.values()
    assert values["aux/layer.0.mlp/2/0"] == pytest.approx(aux * WEIGHT, rel=1e-14)
    assert values["z/layer.0.mlp/2/0"] == pytest.approx(z * WEIGHT, rel=1e-14)
    moe = MoeSpec(**SIZES, score=score)
    assert float(reference.balance_loss(paddle.to_tensor(outputs()), moe)) == pytest.approx(aux / 0.1, rel=1e-14)
    assert float(reference.z_loss(paddle.to_tensor(outputs()))) == pytest.approx(z / 0.01, rel=1e-14)


def test_even_loads_have_a_loss_of_one():
    rows = np.stack([np.roll(np.arange(NUM_EXPERTS) < TOP_K, TOP_K * i) * 4.0 for i in range(4)])
    balance = stage_balance(aux_loss=1.0)
    balance.of("layer.0.mlp", 0, 0).enter(paddle.to_tensor(rows))
    assert balance.values()["aux/layer.0.mlp/0/0"] == pytest.approx(WEIGHT, rel=1e-14)


def test_one_of_the_tensor_parallel_ranks_puts_the_losses_in():
    balance = stage_balance(adds_losses=False, aux_loss=0.1)
    logits = paddle.to_tensor(outputs(), stop_gradient=False)
    paddle.autograd.backward([balance.of("layer.0.mlp", 0, 0).enter(logits)], [paddle.zeros_like(logits)])
    assert not logits.grad.numpy().any()
    assert balance.values() == {}


def test_a_bias_moves_against_the_load_and_only_the_choice_knows_it():
    balance = stage_balance(expert_bias_rate=0.5)
    moe = MoeSpec(**SIZES)
    router = balance.of("layer.0.mlp", 0, 0)
    chosen, gains = choose(paddle.to_tensor(outputs()), moe, router.bias)
    visits = np.bincount(chosen.reshape(-1), minlength=NUM_EXPERTS)
    router.count(visits)
    router.count(visits)  # recomputed: the same visits
    load = balance.load("layer.0.mlp").numpy()
    assert load.sum() == NUM_TOKENS * TOP_K
    balance.move_biases()
    mean = NUM_TOKENS * TOP_K / NUM_EXPERTS
    assert {0.5, -0.5} == set(balance.biases["layer.0.mlp"].tolist())
    assert ((balance.biases["layer.0.mlp"] > 0) == (load < mean)).all()
    forced = np.zeros(NUM_EXPERTS)
    forced[[0, 5, 11]] = 100.0
    chosen, gains = choose(paddle.to_tensor(outputs()), moe, forced)
    assert all(set(row) == {0, 5, 11} for row in chosen.tolist())
    exact = np.exp(np.take_along_axis(outputs(), chosen, axis=1))
    assert np.allclose(gains.numpy(), exact / exact.sum(axis=1, keepdims=True), rtol=1e-13)


def test_an_expert_with_the_mean_load_keeps_its_bias():
    balance = stage_balance(expert_bias_rate=0.5)
    balance.set_load("layer.0.mlp", paddle.to_tensor([2] * 10 + [1, 3]))
    balance.move_biases()
    assert balance.biases["layer.0.mlp"].tolist() == [0.0] * 10 + [0.5, -0.5]


def test_biases_do_not_change_which_experts_the_loss_calls_chosen():
    """As arXiv:2412.19437, equation 18: the largest scores, not the largest of scores and biases."""
    plain, biased = stage_balance(aux_loss=1.0), stage_balance(aux_loss=1.0, expert_bias_rate=0.5)
    biased.biases["layer.0.mlp"][:] = np.linspace(5, -5, NUM_EXPERTS)
    for balance in (plain, biased):
        balance.of("layer.0.mlp", 0, 0).enter(paddle.to_tensor(outputs()))
    assert plain.values()["aux/layer.0.mlp/0/0"] == biased.values()["aux/layer.0.mlp/0/0"]
