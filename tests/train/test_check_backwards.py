"""``check_backwards``: the modules of a script against finite differences."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.needs_torch


class Scaled(torch.autograd.Function):
    """``tanh(x) * scale``; the factors are in the gradients, and are 1 where they are right."""

    @staticmethod
    def forward(ctx, x, scale, of_input, of_scale):
        y = torch.tanh(x)
        ctx.save_for_backward(y, scale)
        ctx.factors = of_input, of_scale
        return y * scale

    @staticmethod
    def backward(ctx, gradient):
        y, scale = ctx.saved_tensors
        of_input, of_scale = ctx.factors
        of_input = gradient * scale * (1 - y * y) * of_input
        return of_input, None if of_scale is None else (gradient * y).sum(0) * of_scale, None, None


class Layer(nn.Module):
    def __init__(self, of_input=1.0, of_scale=1.0):
        super().__init__()
        self.turn, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.factors = of_input, of_scale

    def forward(self, x):
        return Scaled.apply(self.drop(self.turn(x)), self.scale, *self.factors)


class Detached(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach(), self.bias)


def check(*layers, rows=3):
    from pipeproof.torch import check_backwards

    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    found = check_backwards(model, torch.randn(rows, 6))
    assert all(weight.grad is None and weight.dtype == torch.float32 for weight in model.parameters())
    return found


def test_right_backwards():
    frozen = Layer(of_scale=None)
    frozen.scale.requires_grad_(False)
    assert check(Layer(), nn.LayerNorm(6), nn.GELU(), frozen, nn.BatchNorm1d(6)) == ()


@pytest.mark.parametrize(
    ("layer", "tensor", "ratio"),
    [(Layer(of_scale=1.01), "scale", 1.01), (Layer(of_scale=None), "scale", 0.0), (Detached(6, 6), "weight", 0.0)],
)
def test_a_wrong_gradient_of_a_parameter(layer, tensor, ratio):
    (difference,) = check(Layer(), nn.Sequential(nn.Linear(6, 6), layer), nn.Linear(6, 6))
    assert (difference.layer, difference.tensor) == ("1.1", tensor)
    assert difference.by_backward == pytest.approx(ratio * difference.by_differences, rel=1e-6)
    assert abs(difference.by_backward - difference.by_differences) > 100 * difference.tolerance
    assert f"module `1.1`, element {list(difference.element)} of {tensor}: " in str(difference)


def test_a_wrong_gradient_of_an_input_is_at_the_inner_module():
    differences = check(nn.Linear(6, 6), Layer(of_input=0.99))
    assert {difference.layer for difference in differences} == {"1"}
    assert {difference.tensor for difference in differences} == {"input 0", "turn.weight", "turn.bias"}
