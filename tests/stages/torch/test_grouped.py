"""Products of all experts in one kernel equal a loop over experts, without the host reading group sizes."""

import pytest
import torch

from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned
from pipeproof.stages.torch import functional as grouped
from pipeproof.stages.torch.experts import inverse, reorder, visits
from pipeproof.stages.torch.functional import Groups, grouped_product, is_one_kernel
from pipeproof.stages.torch.weights import SplitWeights, Weight
from tests.stages.torch.features import EVEN, MOE
from tests.stages.torch.staged_run import StagedRun
from tests.stages.torch.test_torch_features import assert_same_bits
from tests.stages.torch.test_torch_types import plan_in

pytestmark = pytest.mark.needs_torch

SIZES = [10, 0, 25, 15]
WHOLE = {**MOE, **EVEN, "num_shared_experts": 1, "ffn_size": 16}


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("main", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "is_one"), [(48, True), (20, False)])
def test_groups_are_multiplied_as_one_by_one(columns, is_one, main):
    weights, groups = SplitWeights(torch.device("cpu")), Groups(torch.tensor(SIZES))
    weight = Weight(drawn(4, 32, columns).to(main), torch.bfloat16)
    weight.gradient.fill_(1.0)
    rows, given = drawn(sum(SIZES), 32).requires_grad_(), drawn(sum(SIZES), columns)
    assert is_one_kernel(rows, weight.value) is is_one
    made = weights.grouped(rows, weight, groups)
    weights.backward(made, given).accumulate()
    inputs, outputs = rows.detach().split(SIZES), given.split(SIZES)
    assert torch.equal(made, torch.cat([x @ w for x, w in zip(inputs, weight.value, strict=True)]))
    assert torch.equal(rows.grad, torch.cat([g @ w.t() for g, w in zip(outputs, weight.value, strict=True)]))
    for buffer, x, g in zip(weight.gradient, inputs, outputs, strict=True):
        one = torch.ones(32, columns, dtype=main)
        is_rounded_twice = is_one and main is torch.bfloat16
        expected = one + x.t() @ g if is_rounded_twice else one.addmm(x.t().to(main), g.to(main))
        assert torch.equal(buffer, expected)


def test_no_rows_are_no_kernel():
    """A rank whose experts nobody visits."""
    empty = Groups(torch.zeros(4, dtype=torch.int64))
    assert grouped_product(drawn(0, 32), drawn(4, 32, 48), empty).shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_types_are_multiplied_one_by_one(dtype):
    rows, matrices = drawn(sum(SIZES), 32, dtype=dtype), drawn(4, 32, 48, dtype=dtype)
    assert not is_one_kernel(rows, matrices)


def test_the_bits_of_16_bits_are_those_of_the_unpartitioned_model():
    plan = plan_in("bfloat16", moe=WHOLE)
    for ours, reference in zip(StagedRun(plan, cut=(2,)).steps(), run_unpartitioned(plan), strict=True):
        assert_same_bits(ours, reference)


def test_with_one_rank_of_experts_the_host_asks_for_no_sizes(monkeypatch):
    asked = []
    sizes = grouped.Groups.sizes.func
    monkeypatch.setattr(grouped.Groups, "sizes", property(lambda self: asked.append(1) or sizes(self)))
    for _ in StagedRun(plan_in("bfloat16", moe=WHOLE), cut=(2,)).steps():
        pass
    assert not asked
    for _ in StagedRun(plan_in("float32", moe=WHOLE), cut=(2,)).steps():
        pass
    assert asked


def test_visits_move_tokens_once_and_add_their_gradients():
    tokens, order = drawn(5, 3, dtype=torch.float32).requires_grad_(), torch.randperm(10)
    back = inverse(order)
    assert torch.equal(order[back], torch.arange(10))
    rows = visits(tokens, order, back)
    assert torch.equal(rows, tokens.detach().repeat_interleave(2, 0)[order])
    again = reorder(rows, back, order)
    given = drawn(10, 3, dtype=torch.float32)
    again.backward(given)
    assert torch.equal(tokens.grad, given.reshape(5, 2, 3).sum(1))
