"""Every feature on PyTorch: near Paddle's results, and stages with the bits of the unpartitioned model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned, unpartitioned_step
from pipeproof.stages.torch.experts import TorchBalance
from tests.features import GPT3, QWEN3
from tests.stages.torch.features import EVEN, FEATURES, MLA, MOE, TWO_AHEAD, assert_kept, golden_of, kept_of, make_plan
from tests.stages.torch.staged_run import StagedRun

EXPERTS, TOP_K = 7, 3


def by_autograd(logits, score, weights):
    """The losses by their formulas, and the gradient of their sum."""
    leaf = logits.detach().requires_grad_()
    plain = {"softmax": leaf.softmax(-1), "sigmoid": leaf.sigmoid(), "sqrtsoftplus": leaf.exp().log1p() ** 0.5}[score]
    scores = plain / plain.sum(-1, keepdim=True)
    visits = F.one_hot(leaf.topk(TOP_K).indices, EXPERTS).sum((0, 1)).double() / (len(leaf) * TOP_K)
    losses = {"aux": EXPERTS * (scores.mean(0) * visits).sum(), "z": leaf.logsumexp(-1).square().mean()}
    losses = {name: losses[name] * weight for name, weight in weights.items()}
    (gradient,) = torch.autograd.grad(sum(losses.values()), leaf)
    return losses, gradient


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("weights", [{"aux": 0.3}, {"z": 0.2}, {"aux": 0.3, "z": 0.2}], ids=["aux", "z", "both"])
def test_gradients_of_losses_are_those_of_their_formulas_and_need_no_thread_of_autograd(score, weights, monkeypatch):
    logits = torch.randn(11, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected, gradient = by_autograd(logits, score, weights)

    def refused(*_, **__):
        raise AssertionError("the thread of a GPU may hold the backward of an overlapped pair")

    for name in ("backward", "grad"):
        monkeypatch.setattr(torch.autograd, name, refused)
    moe = SimpleNamespace(score=score, top_k=TOP_K, num_experts=EXPERTS)
    losses, found = TorchBalance._losses_of(SimpleNamespace(_moe=moe, _weights=weights), logits)
    assert {name: float(x) for name, x in losses.items()} == pytest.approx({n: float(x) for n, x in expected.items()})
    assert torch.allclose(found, gradient, rtol=1e-12, atol=1e-15)
    assert TorchBalance._losses_of(SimpleNamespace(_moe=moe, _weights=weights), logits.detach())[1] is None


pytestmark = pytest.mark.needs_torch


def golden(feature):
    with np.load(golden_of(feature)) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_unpartitioned_model_is_near_paddles(feature):
    """To 1e-12 of each gradient's norm, in float64, after a step of 0.5 that moves all of them."""
    assert_kept(kept_of(run_unpartitioned(make_plan(feature))), golden(feature))


@pytest.mark.parametrize("feature", FEATURES)
def test_stages_are_paddle_s(feature):
    assert_kept(kept_of(StagedRun(make_plan(feature), cut=(1, 3)).steps()), golden(feature))


def assert_same_bits(ours, reference):
    assert ours.loss.tobytes() == reference.loss.tobytes()
    for of_ours, of_reference in ((ours.gradients, reference.gradients), (ours.weights, without_routers(reference))):
        assert set(of_ours) == set(of_reference)
        assert [n for n, array in of_ours.items() if array.tobytes() != of_reference[n].tobytes()] == []
    assert {k: v.tobytes() for k, v in ours.routers.items()} == {k: v.tobytes() for k, v in reference.routers.items()}


def without_routers(result):
    return {name: weight for name, weight in result.weights.items() if not name.startswith("bias/")}


FAST = {"dtype": "float32", "optimizer": "adamw", "learning_rate": 0.01}


SEVERAL_RANKS = ("data ranks", "ranks of experts", "ranks of experts, gathered", "ranks of experts by token id")


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in SEVERAL_RANKS])
def test_stages_have_the_bits_of_the_unpartitioned_model(feature):
    """Gradients of weights at once, and after all backwards."""
    plan = make_plan(feature, run={**FAST, "steps": 3})
    reference = list(run_unpartitioned(plan))
    assert not any(np.array_equal(reference[0].gradients[n], g) for n, g in reference[1].gradients.items() if g.any())
    # Where both modules and the head borrow the embedding, a stage that has them all makes one addend of theirs.
    cut = () if feature == "ahead, embedded again, tied" else (1, 2, 3)
    for delayed in (False, True):
        ours = list(StagedRun(plan, cut, delayed=delayed).steps())
        for one, other in zip(ours, reference, strict=True):
            assert_same_bits(one, other)


class Products(TorchDispatchMode):
    """The products that are computed, with the shapes, types and strides of their factors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
            self.seen.append((name, [(x.dtype, x.shape, x.stride()) for x in args if isinstance(x, torch.Tensor)]))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in (*SEVERAL_RANKS, "clipped")])
def test_stages_and_the_unpartitioned_model_choose_the_same_kernels(feature, monkeypatch):
    """On a GPU the last bits of a product depend on the shapes and memory layouts of its factors."""
    plan = make_plan(feature, run={"backend": "torch", "dtype": "bfloat16", "steps": 1})
    ours, reference = Products(), Products()
    run_rank = StagedRun._rank

    def traced(self, place, step):
        with ours:
            return run_rank(self, place, step)

    monkeypatch.setattr(StagedRun, "_rank", traced)
    list(StagedRun(plan).steps())
    with reference:
        next(run_unpartitioned(plan))
    assert sorted(map(str, ours.seen)) == sorted(map(str, reference.seen))


def test_one_step_from_given_weights_is_that_of_the_run():
    plan = make_plan("even experts", run={"steps": 3})
    *_, last = run_unpartitioned(plan)
    alone = unpartitioned_step(plan, last.weights, 2)
    assert alone.loss == last.loss
    assert {n: g.tobytes() for n, g in alone.gradients.items()} == {n: g.tobytes() for n, g in last.gradients.items()}
    assert {k: v.tobytes() for k, v in alone.routers.items()} == {k: v.tobytes() for k, v in last.routers.items()}


SP = {"tp": 2, "sequence_parallel": True}
REGATHER = {"memory": {"sequence_parallel_activations": "regather"}}
SPLITS = {"kind": "seq1f1b", "num_sequence_splits": 2}
MESHES = {
    "tp": ({"tp": 2}, {}, {"tied_embedding": True, "num_kv_heads": 2}),
    "sp": (SP, {}, {"activation_order": "bsh"}),
    "sp, gathered again": (SP, REGATHER, {"moe": {**MOE, **EVEN}, **TWO_AHEAD}),
    "sp, latent, gathered again": (SP, REGATHER, {"mla": {**MLA, "q_rank": 6}}),
    "sp, ahead, dropout": (SP, {}, {**TWO_AHEAD, "dropout": 0.2}),
    "sp, embedded again": (SP, {}, {"mtp": {"num_modules": 2, "magic_send": True}}),
    "sp, streams": (SP, {}, {"hyper_connections": {"streams": 2}}),
    "ep": ({"ep": 2}, {}, {"moe": {**MOE, **EVEN}}),
    "ep, sp": ({**SP, "ep": 2}, {}, {"moe": {**MOE, **EVEN}, "swiglu_limit": 0.05}),
    "ep, dp": ({"ep": 2, "dp": 2}, {}, {"moe": {**MOE, **EVEN}}),
    "experts over tp, sp": ({**SP, "experts_over_tp": True}, {}, {"moe": {**MOE, **EVEN}}),
    "cp": ({"cp": 2}, {}, {"num_kv_heads": 2}),
    "cp, dropout": ({"cp": 4}, {}, {"num_kv_heads": 2, "dropout": 0.2, "activation_order": "bsh"}),
    "cp, sp": ({**SP, "cp": 2}, {}, TWO_AHEAD),
    "again": (SP, {"memory": {"recompute": "full"}}, {"moe": {**MOE, **EVEN}, "dropout": 0.1, **TWO_AHEAD}),
    "embedded again, again": (
        {}, {"memory": {"recompute": "full"}}, {"mtp": {"num_modules": 1, "magic_send": True}, "tied_embedding": True},
    ),
    "core again": ({"tp": 2}, {"memory": {"recompute": "selective"}}, {"dropout": 0.1}),
    "experts again": (
        {**SP, "ep": 2},
        {"memory": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp", "moe"]}},
        {"moe": {**MOE, **EVEN}, "dropout": 0.1},
    ),
    "Qwen3": (SP, REGATHER, QWEN3),
    "GPT-3": (SP, {}, GPT3),
    "LayerNorm of heads": (
        {"cp": 2, "tp": 2}, {"memory": {"recompute": "full"}}, {**QWEN3, "norm": "layer", "biases": "all"},
    ),
    "splits": (SP, {"schedule": SPLITS}, {"moe": {**MOE, **EVEN}, "dropout": 0.1}),
    "splits, recomputed": ({}, {"schedule": SPLITS, "memory": {"recompute": "full"}}, {"mla": MLA}),
}  # fmt: skip


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_has_the_sums_of_the_unpartitioned_model(name):
    topology, sections, model = MESHES[name]
    plan = make_plan("plain", topology=topology, model=model, run={"steps": 2}, **sections)
    assert_kept(kept_of(StagedRun(plan, cut=(2,)).steps()), kept_of(run_unpartitioned(plan)))


@pytest.mark.parametrize(
    "memory",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_modules": ["mlp", "moe"]},
        {"recompute": "selective", "recompute_modules": ["core_attn", "shared_experts"]},
    ],
)
def test_what_is_computed_again_has_the_same_bits(memory):
    plan = make_plan("even experts", model={"dropout": 0.1}, memory=memory, run=FAST)
    assert plan.model.moe.num_shared_experts > 0
    for ours, reference in zip(StagedRun(plan, cut=(2,)).steps(), run_unpartitioned(plan), strict=True):
        assert_same_bits(ours, reference)
