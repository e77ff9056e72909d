"""Model FLOPs utilization: the rule of six FLOPs for each weight and token."""

from fractions import Fraction

import pytest

from pipeproof.cost.devices import model_flops_utilization, peak_tflops
from pipeproof.specs.cost import AnalyticSpec
from pipeproof.specs.load_plan import plan_from_dict

HIDDEN, LAYERS, TOKENS, VOCAB = 4096, 8, 16, 64
PEAK = 989.4e12
"""FLOP/s of an H100 in bfloat16, by its data sheet."""


def plan_of(*, tp=1, pp=2, micro_batches=4, **cost):
    return plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt",
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "num_heads": 32,
                "ffn_size": 4 * HIDDEN,
                "vocab_size": VOCAB,
                "seq_length": TOKENS,
            },
            "topology": {"pp": pp, "tp": tp},
            "schedule": {"kind": "1f1b", "num_micro_batches": micro_batches, "micro_batch_size": 1},
            "cost": cost or {"analytic": {"device": "h100", "dtype": "bfloat16"}},
        }
    ).spec


@pytest.mark.parametrize(("tp", "pp", "micro_batches"), [(1, 1, 1), (1, 2, 4), (4, 2, 4), (2, 4, 8)])
def test_six_flops_for_each_weight_and_token_where_attention_is_small(tp, pp, micro_batches):
    makespan_us = Fraction(1000)
    weights = LAYERS * (4 + 3 * 4) * HIDDEN**2 + VOCAB * HIDDEN
    flops = 6 * weights * TOKENS * micro_batches
    expected = flops / (PEAK * float(makespan_us) * 1e-6 * tp * pp)
    mfu = model_flops_utilization(plan_of(tp=tp, pp=pp, micro_batches=micro_batches), makespan_us)
    assert mfu == pytest.approx(expected, rel=5e-3)


def test_products_in_eight_bits_are_compared_with_their_own_peak():
    plain = model_flops_utilization(plan_of(), Fraction(1000))
    cost = {"analytic": {"device": "h100", "dtype": "bfloat16", "matmul_dtype": "float8"}}
    assert model_flops_utilization(plan_of(**cost), Fraction(1000)) == pytest.approx(plain / 2, rel=1e-3)


def test_without_a_device_there_is_no_peak():
    assert model_flops_utilization(plan_of(forward_us=100), Fraction(1000)) is None


@pytest.mark.parametrize(
    ("keys", "run_dtype", "peak"),
    [
        ({}, "bfloat16", 989.4), ({}, "float32", 66.9), ({"dtype": "bfloat16"}, "float32", 989.4),
        ({"dtype": "float32"}, "bfloat16", 66.9), ({"matmul_dtype": "float8"}, "float32", 1978.9),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_type_of_products(keys, run_dtype, peak):
    """`tune` and the step's MFU have one function."""
    assert peak_tflops(AnalyticSpec(device="h100", **keys), run_dtype) == peak
