"""Plans of ``results/reshard-matrix.md``: two models on up to thirteen topologies, and eight with their experts.

All plans of a model have the same training.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict

STEPS_BEFORE, NUM_STEPS = 2, 4
"""Steps before the state is saved; steps of the whole training."""
ROWS_A_STEP, ROWS = 8, 2
"""Sequences of a step over all data-parallel ranks; sequences of a micro-batch."""
_DENSE = {
    "kind": "gpt", "num_layers": 4, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 64,
    "vocab_size": 64, "seq_length": 16, "tied_embedding": True, "dropout": 0.1,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 12, "top_k": 3, "ffn_size": 16, "num_shared_experts": 1, "dense_layers": 1, "score": "sigmoid",
    "aux_loss": 0.1, "expert_bias_rate": 0.003,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dense": _DENSE,
        "experts": {**_DENSE, "moe": _EXPERTS, "mtp": {"num_modules": 1}},
        "flex": {**_DENSE, "moe": _EXPERTS, "mtp": {"num_modules": 1}},
    }
)
_SHARDED = {"memory": {"shard_optimizer": "dp"}}
_OVER_TP = {"tp": 2, "sequence_parallel": True, "experts_over_tp": True}
_TOPOLOGIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "dp2": {"topology": {"dp": 2}},
        "dp4": {"topology": {"dp": 4}},
        "sd2": {"topology": {"dp": 2}, **_SHARDED},
        "sd4": {"topology": {"dp": 4}, **_SHARDED},
        "tp2": {"topology": {"tp": 2}},
        "tp4": {"topology": {"tp": 4, "sequence_parallel": True}},
        "pp2": {"topology": {"pp": 2}},
        "pp4": {"topology": {"pp": 4}},
        "vpp": {"topology": {"pp": 2}, "schedule": {"kind": "interleaved", "num_chunks": 2}},
        "ep2": {"topology": {"ep": 2}},
        "tp2+pp2": {"topology": {"tp": 2, "pp": 2, "sequence_parallel": True}},
        "ep2+tp2": {"topology": {"ep": 2, "tp": 2}},
        "ep2+pp2": {"topology": {"ep": 2, "pp": 2}},
        "tp2(ep2)": {"topology": _OVER_TP},
        "sd2+tp2(ep2)": {"topology": {**_OVER_TP, "dp": 2}, **_SHARDED},
        "tp2(ep2)+pp2": {"topology": {**_OVER_TP, "pp": 2}},
    }
)
_OF_FLEX = ("dp2", "sd2", "tp2", "pp2", "ep2", "tp2(ep2)", "sd2+tp2(ep2)", "tp2(ep2)+pp2")
"""The rows and columns of the two matrices of FlexCheckpoint."""


def topologies(model: str) -> tuple[str, ...]:
    """Names of the topologies that can train the model: ``ep`` needs experts."""
    if model == "flex":
        return _OF_FLEX
    return tuple(name for name in _TOPOLOGIES if "(" not in name and (model == "experts" or "ep" not in name))


def plan_of(model: str, topology: str) -> dict[str, Any]:
    """Return the plan as data; all plans of a model train on the same tokens."""
    sections = _TOPOLOGIES[topology]
    data_ranks = sections["topology"].get("dp", 1) * sections["topology"].get("ep", 1)
    schedule = {
        "kind": "1f1b",
        "num_micro_batches": ROWS_A_STEP // ROWS // data_ranks,
        "micro_batch_size": ROWS,
        **sections.get("schedule", {}),
    }
    run = {"backend": "paddle", "steps": NUM_STEPS, "seed": 11, "optimizer": "adamw", "learning_rate": 0.01}
    return {"pipeproof": 1, "model": dict(MODELS[model]), **sections, "schedule": schedule, "run": run}


def loaded(model: str, topology: str) -> LoadedPlan:
    """Return the validated plan."""
    return plan_from_dict(plan_of(model, topology))
