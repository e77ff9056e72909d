"""FLOPs of modules: products, attention, compiled modules and tensors that wrap others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeproof.exec.train.torch.product_counter import ProductCounter

pytestmark = pytest.mark.needs_torch

ROWS, WIDTH, INNER = 6, 16, 32


def counted(work):
    counter = ProductCounter()
    with counter.counting():
        work()
    return counter


def test_forward_and_backward_of_two_matrices():
    module = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    counter = ProductCounter()
    product = 2 * ROWS * WIDTH * INNER
    with counter.counting():
        output = module(torch.randn(ROWS, WIDTH))
        assert counter.total == 2 * product
        output.sum().backward()
    assert counter.total == 2 * product + 3 * product  # the input has no gradient


@pytest.mark.parametrize("num_heads", [4, 2], ids=["all heads", "grouped heads"])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["explicit", "flash"])
def test_attention_counts_all_pairs(backend, num_heads):
    query = torch.randn(2, 4, 8, WIDTH, requires_grad=True)
    key = torch.randn(2, num_heads, 8, WIDTH, requires_grad=True)
    counter = ProductCounter()
    product = 2 * 2 * 4 * 8 * 8 * WIDTH
    with sdpa_kernel(backend), counter.counting():
        output = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=num_heads < 4)
        assert counter.total == 2 * product
        output.sum().backward()
    assert counter.total == (2 + (4 if backend is SDPBackend.MATH else 5)) * product  # flash computes scores again


def test_a_compiled_module_counts_as_it_is():
    module = nn.Linear(WIDTH, INNER)
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend)
    inputs = torch.randn(ROWS, WIDTH)
    compiled(inputs)
    assert len(calls) == 1
    assert counted(lambda: compiled(inputs)).total == 2 * ROWS * WIDTH * INNER


def test_a_wrapped_tensor_counts_once():
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    assert counted(lambda: pair @ torch.randn(WIDTH, INNER)).total == 2 * (2 * ROWS * WIDTH * INNER)
