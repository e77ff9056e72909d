"""Gradients of router losses, which the forward computes without autograd."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from pipeproof.stages.torch.experts import TorchBalance

pytestmark = pytest.mark.needs_torch

EXPERTS, TOP_K = 7, 3


def by_autograd(logits, score, weights):
    """The losses by their formulas, and the gradient of their sum."""
    leaf = logits.detach().requires_grad_()
    scores = leaf.softmax(-1) if score == "softmax" else leaf.sigmoid() / leaf.sigmoid().sum(-1, keepdim=True)
    visits = F.one_hot(leaf.topk(TOP_K).indices, EXPERTS).sum((0, 1)).double() / (len(leaf) * TOP_K)
    losses = {"aux": EXPERTS * (scores.mean(0) * visits).sum(), "z": leaf.logsumexp(-1).square().mean()}
    losses = {name: losses[name] * weight for name, weight in weights.items()}
    (gradient,) = torch.autograd.grad(sum(losses.values()), leaf)
    return losses, gradient


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
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
