"""The adapter with PyTorch, all ranks in one process: equal bits where the order of sums is equal, else the bound."""

import pytest

from pipeproof.exec.compare.compare_gradients import is_checked_by_bound
from pipeproof.stages.reference.bound import parallel_bound
from tests.features import GPT3, QWEN3
from tests.plans import subject

pytestmark = pytest.mark.needs_torch

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "aux_loss": 0.1, "z_loss": 0.01}
SP = {"tp": 2, "sequence_parallel": True}


def plan_of(topology=(), schedule=(), model=(), run=(), **more):
    return subject(
        topology={"pp": 2, **dict(topology)},
        schedule={"num_micro_batches": 4, **dict(schedule)},
        model={"num_layers": 4, **dict(model)},
        run={"backend": "torch", "steps": 3, "optimizer": "adamw", **dict(run)},
        **more,
    ).plan


IN_ORDER = {
    "1f1b": {},
    "zb_v": {"schedule": {"kind": "zb_v", "num_chunks": 2}},
    "interleaved": {"schedule": {"kind": "interleaved", "num_chunks": 2}},
    "one rank": {"topology": {"pp": 1}},
    "clip": {"run": {"clip_norm": 0.5}},
    "sgd": {"run": {"optimizer": "sgd"}},
    "experts": {"model": {"moe": {**MOE, "expert_bias_rate": 0.01}}},
    "modules": {"model": {"mtp": {"num_modules": 1, "loss_weight": 0.3}}},
    "bsh": {"model": {"activation_order": "bsh"}},
    "bfloat16": {"run": {"dtype": "bfloat16"}},
    "bfloat16, main gradients": {"run": {"dtype": "bfloat16", "main_grad_dtype": "float32"}},
    "float16, main gradients": {"run": {"dtype": "float16", "main_grad_dtype": "float32"}},
    "float64": {"run": {"dtype": "float64"}},
    "Qwen3": {"model": QWEN3, "schedule": {"kind": "zb_v", "num_chunks": 2}},
    "GPT-3": {"model": {**GPT3, "tied_embedding": False}, "schedule": {"kind": "zb_v", "num_chunks": 2}},
    "LayerNorm of heads, bfloat16": {
        "model": {**GPT3, **QWEN3, "tied_embedding": False, "activation_order": "bsh", "dropout": 0.1},
        "run": {"dtype": "bfloat16", "main_grad_dtype": "float32"},
    },
    "LayerNorm, modules": {"model": {"norm": "layer", "biases": "all", "mtp": {"num_modules": 2}}},
    "GPT-3, recomputed": {
        "model": {**GPT3, "tied_embedding": False},
        "memory": {"recompute": "full"},
        "buffers": {"free_output": "after_send_done"},
    },
    "slots and freed outputs": {
        "buffers": {"receive_slots": 4, "send_slots": 4, "free_output": "after_send_done"},
        "schedule": {"num_micro_batches": 6},
    },
}


@pytest.mark.parametrize("changes", IN_ORDER.values(), ids=IN_ORDER)
def test_pipeline_parallelism_alone_has_the_bits_of_the_unpartitioned_model(changes):
    from tests.exec.in_memory import compared_with_torch

    plan = plan_of(**changes)
    assert not is_checked_by_bound(plan)
    results = compared_with_torch(plan)
    assert len(results) == 3
    for result in results:
        assert result.loss_is_bitwise, result
        assert [one.name for one in result.gradients if not one.bitwise] == []
        assert result.routers is None or result.routers.differing == ()


OTHER_ORDERS = {
    "tp": {"topology": {"tp": 2}},
    "tp and sequence parallel": {"topology": SP},
    "partial": {"topology": {"tp": 2}, "transport": "partial"},
    "gathered again": {"topology": SP, "memory": {"sequence_parallel_activations": "regather"}},
    "Qwen3, sequence parallel": {"topology": SP, "model": QWEN3, "schedule": {"kind": "zb_h1"}},
    "Qwen3, cp": {"topology": {"cp": 2}, "model": QWEN3, "memory": {"recompute": "selective"}},
    "GPT-3, gathered again": {
        "topology": SP, "model": GPT3, "memory": {"sequence_parallel_activations": "regather"},
    },
    "LayerNorm of heads, pieces": {
        "topology": {"tp": 2}, "model": {**GPT3, **QWEN3}, "schedule": {"kind": "seq1f1b", "num_sequence_splits": 2},
    },
    "LayerNorm of heads, cp": {"topology": {"cp": 2, **SP}, "model": {**GPT3, **QWEN3, "mlp": "gelu_tanh"}},
    "dp": {"topology": {"dp": 2}},
    "sharded optimizer": {"topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"}},
    "ep": {"topology": {"ep": 2}, "model": {"moe": MOE}},
    "cp": {"topology": {"cp": 2}},
    "dualpipe": {"schedule": {"kind": "dualpipe"}},
    "pieces": {"schedule": {"kind": "seq1f1b", "num_sequence_splits": 2}},
    "tied": {"model": {"tied_embedding": True}},
    "tied, tp, dp, clip": {
        "topology": {"tp": 2, "dp": 2}, "model": {"tied_embedding": True}, "run": {"clip_norm": 0.5},
    },
    "16 bits, sequence parallel": {"topology": SP, "run": {"dtype": "bfloat16", "main_grad_dtype": "float32"}},
    "breadth first": {"schedule": {"kind": "looped_bfs", "num_chunks": 2}},
}  # fmt: skip


@pytest.mark.parametrize("changes", OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_plans_that_add_in_another_order_are_within_the_bound(changes):
    from tests.exec.in_memory import compared_with_torch

    plan = plan_of(**{**changes, "run": {"steps": 1, **changes.get("run", {})}})
    assert is_checked_by_bound(plan)
    (result,) = compared_with_torch(plan)
    bound = parallel_bound(plan.spec)
    assert result.agrees(bound)
    assert {
        one.name: one.unpartitioned_max_rel_diff for one in result.gradients if one.unpartitioned_max_rel_diff > bound
    } == {}
