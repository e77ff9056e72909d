"""PyTorch's stages and its unpartitioned model at sizes so small that tensor layouts are ambiguous."""

import itertools

import pytest

from pipeproof.exec.compare.compare_gradients import is_checked_by_bound
from tests.plans import subject

pytestmark = pytest.mark.needs_torch

HEADS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)]
"""Heads of queries, and of keys and values."""

LATENT = {"kv_rank": 3, "nope_head_size": 1, "rope_head_size": 2}


def differing(rows, **model):
    """Gradients of one step with this number of rows per micro-batch that differ from the unpartitioned model."""
    from tests.exec.in_memory import compared_with_torch

    plan = subject(
        topology={"pp": 2},
        schedule={"num_micro_batches": 2, "micro_batch_size": rows},
        model={"num_layers": 2, "hidden_size": 4, "ffn_size": 3, "vocab_size": 8, **model},
        run={"backend": "torch", "dtype": "float64", "steps": 1},
    ).plan
    assert not is_checked_by_bound(plan)
    (result,) = compared_with_torch(plan)
    return [one.name for one in result.gradients if not one.bitwise]


@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_small_heads_and_short_sequences_have_the_bits_of_the_unpartitioned_model(size, rows, order):
    wrong = {}
    for length, (heads, kv_heads) in itertools.product(range(1, 6), HEADS):
        model = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "seq_length": length}
        wrong[length, heads, kv_heads] = differing(rows, activation_order=order, **model)
    assert {case: names for case, names in wrong.items() if names} == {}


@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize("value_size", [1, 3])
def test_small_latent_heads_have_the_bits_of_the_unpartitioned_model(value_size, order):
    wrong = {}
    for length, heads in itertools.product([1, 2, 3], [1, 2, 4]):
        model = {"num_heads": heads, "seq_length": length, "mla": {**LATENT, "value_head_size": value_size}}
        wrong[length, heads] = differing(1, activation_order=order, **model)
    assert {case: names for case, names in wrong.items() if names} == {}
