"""Types: gradient sums in a wider type than the layers, and 16-bit types near float32."""

import numpy as np
import pytest
import torch

from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned
from pipeproof.stages.torch.functional import clip
from pipeproof.stages.torch.weights import Weight, add_product
from tests.stages.torch.features import BY_TOKEN, EVEN, MLA, MOE, TWO_AHEAD, make_plan
from tests.stages.torch.staged_run import StagedRun
from tests.stages.torch.test_torch_features import assert_same_bits

pytestmark = pytest.mark.needs_torch

MODELS = {
    "plain": {},
    "latent, tied": {"mla": MLA, "tied_embedding": True},
    "experts, ahead": {"moe": {**MOE, **EVEN}, **TWO_AHEAD},
    "router in float64": {"moe": {**MOE, **EVEN, "router_dtype": "float64"}},
    "router in float32 by token id": BY_TOKEN,
    "streams, dropout": {"hyper_connections": {"streams": 2}, "dropout": 0.1, "swiglu_limit": 0.05},
}
SIXTEEN = ("bfloat16", "float16")


def plan_in(dtype, main=None, **model):
    run = {"backend": "torch", "dtype": dtype, **({} if main is None else {"main_grad_dtype": main})}
    run["optimizer"] = "sgd" if main is None else "adamw"  # whose epsilon is nothing in float16
    return make_plan("plain", model=model, run={**run, "learning_rate": 0.01, "steps": 3})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "main"), [("float32", "float64"), *((dtype, "float32") for dtype in SIXTEEN)])
def test_wider_gradients_have_the_bits_of_the_unpartitioned_model(dtype, main, name):
    plan = plan_in(dtype, main, **MODELS[name])
    for ours, reference in zip(StagedRun(plan, cut=(2,)).steps(), run_unpartitioned(plan), strict=True):
        assert_same_bits(ours, reference)
        assert {gradient.dtype.name for gradient in ours.gradients.values()} == {main}
        assert {weight.dtype.name for weight in ours.weights.values()} == {main}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("main", [None, "float32"])
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_sixteen_bits_are_near_float32(dtype, bits, main, name):
    """All gradients together within a few units in the last place; losses and gradients differ from float32."""
    single, other = (
        next(StagedRun(plan_in(*types, **MODELS[name]), cut=(2,)).steps()) for types in (("float32",), (dtype, main))
    )
    assert other.loss.dtype == np.float32
    assert 0 < np.max(np.abs(other.loss - single.loss) / np.abs(single.loss)) < 2.0**-bits
    ours, expected = (
        np.concatenate([array.reshape(-1) for _, array in sorted(one.gradients.items())]) for one in (other, single)
    )
    assert 0 < np.linalg.norm(ours - expected) < 8 * 2.0**-bits * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_at_a_limit_is_the_one_from_inside(dtype):
    """``torch.clip`` had it until PyTorch 2.14. A limit is rounded to the type of the tensor."""
    x = torch.tensor([-0.06, -0.05, 0.01, 0.05, 0.06], dtype=dtype, requires_grad=True)
    assert torch.equal(clip(x, min=-0.05, max=0.05), x.detach().clip(-0.05, 0.05))
    clip(x, min=-0.05, max=0.05).sum().backward()
    clip(x, max=0.05).sum().backward()
    assert x.grad.tolist() == [1, 2, 2, 2, 0]


def test_layers_compute_with_rounded_weights_that_follow_the_main_ones():
    weight = Weight(torch.tensor([1.0, 1.0 + 2.0**-12]), torch.bfloat16)
    assert weight.value.tolist() == [1.0, 1.0]
    assert (weight.value.dtype, weight.gradient.dtype) == (torch.bfloat16, torch.float32)
    weight.main.add_(1.0)
    weight.renew()
    assert weight.value.tolist() == [2.0, 2.0]
    assert Weight(weight.main).value is weight.main


def test_a_weight_that_is_lent_has_the_same_values_and_a_gradient_of_its_own():
    weight = Weight(torch.ones(2), torch.bfloat16)
    other = weight.lent()
    other.add(torch.ones(2))
    assert other.value is weight.value
    assert (weight.gradient.tolist(), other.gradient.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_narrow_factors_are_summed_in_the_type_of_the_buffer():
    """bfloat16 has no 4096 + 1, and 1 + 2^-9 is rounded to 1."""
    buffer = torch.tensor([[4096.0]])
    add_product(buffer, torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16))
    assert buffer.item() == 4097.0 + 2.0**-9
