"""``run.main_grad_dtype`` in checks, memory, costs and the digest."""

import numpy as np
import pytest

from pipeproof.cost.plan_times import link_times
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.stage_memory import optimizer_bytes, state_of
from pipeproof.verify.certificate import graph_digest
from tests.plans import plan_spec, subject

NETWORK = {"network": {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 300}}}


@pytest.mark.parametrize(
    ("sections", "gradients", "optimizer"),
    [
        ({}, 4, 8),
        ({"run": {"main_grad_dtype": "float64"}}, 8, 8 + 16),
        ({"run": {"main_grad_dtype": "float64", "optimizer": "sgd"}}, 8, 8),
        ({"run": {"main_grad_dtype": "float32"}}, 4, 8),
        ({"run": {"main_grad_dtype": "float32"}, "memory": {"dtype": "bfloat16"}}, 4, 4 + 8),
        ({"memory": {"dtype": "bfloat16", "gradient_dtype": "bfloat16"}}, 2, 4 + 8),
    ],
)
def test_gradients_moments_and_the_copy_have_their_type(sections, gradients, optimizer):
    spec = plan_spec(**sections)
    layers = describe_gpt(spec)
    numel = sum(int(np.prod(weight.shape)) for layer in layers for weight in layer.parameters)
    assert state_of(spec, layers).gradients == gradients * numel
    assert optimizer_bytes(spec) == optimizer


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({}, "float32"),
        ({"run": {"main_grad_dtype": "float64"}}, "float64"),
        ({"memory": {"gradient_dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_reductions_cost_the_bytes_of_their_type(sections, dtype):
    links = link_times(plan_spec(topology={"dp": 2}, cost=NETWORK, **sections))
    assert links is not None
    assert links.gradient_dtype == dtype
    assert links.dtype == "float32"


def test_a_certificate_is_of_one_type_of_weights():
    """Two that mean the same type have one digest."""
    digests = [
        graph_digest(subject(run=run)) for run in ({}, {"main_grad_dtype": "float32"}, {"main_grad_dtype": "float64"})
    ]
    assert digests[0] == digests[1] != digests[2]
