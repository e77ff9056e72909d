"""Faults planted into the layers of DeepSeek-V4: an alignment finds each one and names its layer."""

import numpy as np
import pytest

from pipeproof.stages.common import experts as common_experts
from pipeproof.stages.common import stage as common_stage
from pipeproof.stages.paddle.experts import PaddleExperts
from tests.align.planted import Planted, located
from tests.align.recorded_plan import reference_run
from tests.features import FEATURES
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

MODEL = {
    **FEATURES["compressed attention"]["model"], **FEATURES["hyper-connections of DeepSeek-V4"]["model"],
    **FEATURES["experts by token id"]["model"], "num_layers": 3,
}  # fmt: skip
"""The first block is dense, the second one has a table of experts, the last one a router."""


@pytest.fixture(scope="module")
def trained():
    plan = subject(
        model=MODEL, topology={"pp": 2, "ep": 2}, stages=[["embed", "layer.0"], ["layer.1", "layer.2", "norm", "head"]],
        schedule={"num_micro_batches": 2}, run={"steps": 1, "seed": 3},
    ).plan  # fmt: skip
    return plan, reference_run(plan)


def untransposed(patch):
    """Mix the streams by the matrix, and not by its transpose."""
    around = common_stage.with_streams

    def with_streams(ops, streams, sub_layer, spec, weights, parameters):
        return around(ops, streams, sub_layer, spec.model_copy(update={"transposed": False}), weights, parameters)

    patch.setattr(common_stage, "with_streams", with_streams)


def scaled_twice(patch):
    """Multiply the weights of a token's experts once more."""
    choose = PaddleExperts._choose

    def twice(logits, moe, *given):
        chosen, gains = choose(logits, moe, *given)
        return chosen, gains * moe.routed_scale

    patch.setattr(PaddleExperts, "_choose", staticmethod(twice))


def shifted_table(patch):
    """Look up the experts of the token before."""
    right = common_experts.hash_tables
    patch.setattr(
        common_experts, "hash_tables", lambda *given: {k: np.roll(v, 1, axis=0) for k, v in right(*given).items()}
    )


def at(layer):
    return {"layer": layer, "direction": "forward", "side": "output"}


FAULTS = {
    "untransposed residual matrix": (untransposed, at("layer.0")),
    "routed scale applied twice": (scaled_twice, at("layer.1")),
    "hash table off by one": (shifted_table, at("layer.1")),
}


def test_nothing_is_found_where_nothing_is_wrong(trained, tmp_path):
    status, printed, _ = located(*trained, tmp_path, None)
    assert status == 0, printed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_layer(trained, tmp_path, name):
    plant, tensor = FAULTS[name]
    status, _, found = located(*trained, tmp_path, Planted(name, plant, tensor, "computation"))
    assert status == 1
    first = found["tensors"]["first_difference"]
    assert first["tensor"].items() >= tensor.items()
    assert first["cause"]["family"] == "computation"
