"""Heads rotated in few passes have the bits of slices, rotations and joins under plain autograd."""

import pytest
import torch

from pipeproof.stages.torch.functional import rotary_tables, rotate, rotated_heads

pytestmark = pytest.mark.needs_torch

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
    assert made[2].is_contiguous(), "a part of what it is cut from would keep all of that for backward"
    assert torch.equal(gradient, of_plain)
    assert gradient.is_contiguous()
