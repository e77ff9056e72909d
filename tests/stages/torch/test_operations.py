"""Operations that a block dispatches: as in a plain module, with fewer passes for rotations and weight gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.torch.functional import causal_attention, rotary_tables, rotate, rotated_heads
from pipeproof.stages.torch.stage import TorchStage
from tests.plans import plan_spec

SIZE = 8
ORDERS = {"bsh": (0, 2, 3, 1, 4), "sbh": (1, 2, 3, 0, 4)}


def plainly(heads, cos, sin):
    turned, value = heads.split([heads.shape[2] - 1, 1], dim=2)
    query, key = rotate(turned, cos, sin).split([heads.shape[2] - 2, 1], dim=2)
    return query, key.squeeze(2), value.squeeze(2)


def computed(function, fused, group, order):
    fused = fused.clone().requires_grad_()
    heads = fused.unflatten(-1, (-1, group + 2, SIZE)).permute(ORDERS[order])
    made = function(heads, *rotary_tables(heads.shape[3], SIZE, fused.dtype, fused.device))
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(made, [torch.randn(one.shape, generator=generator).to(fused.dtype) for one in made])
    return made, fused.grad


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_plain_autograd(dtype, num_kv_heads, group, order):
    fused = torch.randn(5, 2, num_kv_heads * (group + 2) * SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, of_plain = computed(plainly, fused, group, order)
    made, gradient = computed(rotated_heads, fused, group, order)
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    assert [one.stride() for one in made[:2]] == [one.stride() for one in expected[:2]]
    assert made[2].is_contiguous(), "a view would keep its whole base for backward"
    assert torch.equal(gradient, of_plain)
    assert gradient.is_contiguous()


pytestmark = pytest.mark.needs_torch

HIDDEN, HEADS, FFN, LENGTH = 32, 2, 64, 8
VIEWS = {
    "view",
    "t",
    "_unsafe_view",
    "detach",
    "permute",
    "split",
    "squeeze",
    "unsqueeze",
    "transpose",
    "slice",
    "alias",
}
VIEWS |= {"narrow", "empty_like", "expand", "select", "as_strided", "reshape", "_reshape_alias", "split_with_sizes"}


class Counted(TorchDispatchMode):
    """Operations that compute or copy, by name."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def counted(act):
    with Counted() as mode:
        made = act()
    return made, mode.seen


def changed(seen, by):
    """With so many more of some operations, or fewer; none is counted below zero."""
    sums = {name: seen.get(name, 0) + by.get(name, 0) for name in seen.keys() | by.keys()}
    assert min(sums.values()) >= 0
    return {name: number for name, number in sums.items() if number}


def plain_block():
    """As a person would write it; weights of both sides need not be the same."""
    sizes = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "gate": (HIDDEN, FFN), "up": (HIDDEN, FFN)}
    shapes = {**sizes, "down": (FFN, HIDDEN), "norm": (HIDDEN,), "mlp_norm": (HIDDEN,)}
    weights = {name: torch.ones(shape).requires_grad_() for name, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    cos, sin = rotary_tables(LENGTH, HIDDEN // HEADS, torch.float32, torch.device("cpu"))

    def norm(x, name):
        return F.rms_norm(x, (HIDDEN,), weights[name], 1e-6)

    def forward(x):
        heads = (norm(x, "norm") @ weights["qkv"]).unflatten(-1, (HEADS, 3, HIDDEN // HEADS)).permute(0, 2, 3, 1, 4)
        turned, value = heads.split([2, 1], dim=2)
        query, key = rotate(turned, cos, sin).split([1, 1], dim=2)
        mixed = causal_attention(query, key.squeeze(2), value.squeeze(2))
        x = x + mixed.permute(0, 3, 1, 2, 4).flatten(2) @ weights["out"]
        y = norm(x, "mlp_norm")
        return x + (F.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]

    return forward


def test_a_block_dispatches_what_a_plain_one_does():
    model = {"hidden_size": HIDDEN, "num_heads": HEADS, "ffn_size": FFN, "seq_length": LENGTH, "num_layers": 2}
    model["activation_order"] = "bsh"
    plan = plan_spec(model=model, run={"backend": "torch"})
    block = [layer for layer in describe_gpt(plan) if layer.name == "layer.1"]
    stage, plain = TorchStage(plan, block, torch.device("cpu")), plain_block()
    x, given = torch.randn(1, LENGTH, HIDDEN), torch.randn(1, LENGTH, HIDDEN)
    theirs, forward = counted(lambda: plain(x.requires_grad_()))
    _, backward = counted(lambda: theirs.backward(given))
    ours, our_forward = counted(lambda: stage.forward(x.detach().requires_grad_(), None, step=0, index=0))
    defer, our_input = counted(lambda: stage.backward_input(ours, given))
    _, our_weight = counted(defer.accumulate)
    assert our_forward == changed(forward, {"roll": -1, "add": -1, "mul": 1, "add_": 1, "clone": 1})
    assert our_weight == {"addmm_": 5, "add_": 2}
    joined = {"roll": -1, "add": -1, "cat": -1, "clone": -1, "mul": 1, "add_": 1, "copy_": 1}
    silu_again = {"silu": 1, "mul": -1, "mul_": 1}  # in place of keeping it
    assert our_input == changed(changed(changed(backward, {"mm": -5, "add_": -7}), joined), silu_again)
