"""A TOML job of torchtitan and the ``config.json`` of its model."""

from __future__ import annotations

import json
from typing import Any

from pipeproof.interop.importers.torch_pipelining import SCHEDULES
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.model_family import stage_layers

_MODULES = {"embed": "tok_embeddings", "norm": "norm", "head": "output"}


def torchtitan_job(spec: PlanSpec) -> str:
    """The job; what torchtitan has no keys for is left out, which its import shows."""
    topology, schedule = spec.topology, spec.schedule
    local = schedule.num_micro_batches * schedule.micro_batch_size
    replicas = topology.dp * topology.ep
    is_sharded = spec.memory.shard_optimizer == "dp" or topology.ep > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if is_sharded else replicas,
        "data_parallel_shard_degree": replicas if is_sharded else 1,
        "tensor_parallel_degree": topology.tp,
        "context_parallel_degree": topology.cp,
        "expert_parallel_degree": topology.ep,
        "pipeline_parallel_degree": topology.pp,
        "pipeline_parallel_microbatch_size": schedule.micro_batch_size,
    }
    if topology.pp > 1:
        names = {kind: name for name, (kind, _) in SCHEDULES.items()}
        parallelism["pipeline_parallel_schedule"] = names.get(schedule.kind, schedule.kind)
        parallelism["module_fqns_per_model_part"] = [[_module(name) for name in stage] for stage in stage_layers(spec)]
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "seq_len": spec.gpt.seq_length,
            "local_batch_size": local,
            "global_batch_size": local * replicas,
            "max_norm": spec.run.clip_norm or 0.0,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": spec.memory.recompute},
    }
    lines = []
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items()), ""]
    return "\n".join(lines)


def _module(name: str) -> str:
    prefix, _, number = name.partition(".")
    return f"layers.{number}" if prefix == "layer" else _MODULES.get(name, name)
