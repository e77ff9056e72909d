"""Training that is saved and resumed has the bits of training in one run: losses, gradients, weights, moments."""

import pytest

from tests.state.runs import MOE, require_same_on_resume

SP = {"tp": 2, "sequence_parallel": True}
BOTH = {
    "zb_v, tied": {"schedule": {"kind": "zb_v", "num_chunks": 2}, "model": {"tied_embedding": True}},
    "dualpipe_v": {"schedule": {"kind": "dualpipe_v", "num_chunks": 2}},
    "sequence parallel, dropout": {"topology": SP, "model": {"dropout": {"hidden": 0.3, "attention": 0.2}}},
    "experts, biases": {"topology": {"ep": 2}, "model": {"moe": MOE}},
    "sharded optimizer, tied": {
        "topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"}, "model": {"tied_embedding": True},
    },
    "sgd, clip": {"run": {"optimizer": "sgd", "clip_norm": 0.5}},
}  # fmt: skip
SIXTEEN = {
    "bfloat16": {"run": {"dtype": "bfloat16"}},
    "bfloat16, main gradients, sharded": {
        "topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"},
        "run": {"dtype": "bfloat16", "main_grad_dtype": "float32"},
    },
    "float16, main gradients, experts": {
        "topology": {"ep": 2}, "model": {"moe": MOE}, "run": {"dtype": "float16", "main_grad_dtype": "float32"},
    },
}  # fmt: skip


@pytest.mark.slow(but=["zb_v, tied", "dualpipe_v", "sgd, clip", "sharded optimizer, tied"])
@pytest.mark.needs_paddle
@pytest.mark.parametrize("changes", BOTH.values(), ids=BOTH)
def test_resumed_training_has_the_bits_of_training_in_one_go(tmp_path, changes):
    require_same_on_resume(tmp_path, **changes)


@pytest.mark.needs_paddle
def test_main_gradients_of_float64_come_back(tmp_path):
    require_same_on_resume(tmp_path, run={"main_grad_dtype": "float64"}, topology={"tp": 2})


@pytest.mark.needs_torch
@pytest.mark.parametrize("changes", (BOTH | SIXTEEN).values(), ids=BOTH | SIXTEEN)
def test_resumed_training_has_the_bits_of_training_in_one_go_on_torch(tmp_path, changes):
    require_same_on_resume(tmp_path, backend="torch", **changes)
