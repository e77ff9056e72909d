"""Training arguments of PaddleFormers for a plan."""

from __future__ import annotations

from typing import Any

import yaml

from pipeproof.interop.launch_arguments.model_config import model_config
from pipeproof.specs.plan import PlanSpec


def paddle_arguments(spec: PlanSpec) -> str:
    """The arguments as YAML; what the trainer has no settings for is left out, which its import shows."""
    topology, schedule = spec.topology, spec.schedule
    replicas = topology.dp * topology.ep
    settings: dict[str, Any] = {
        **model_config(spec),
        "max_seq_len": spec.gpt.seq_length,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "sharding_parallel_size": replicas if spec.memory.shard_optimizer == "dp" else 1,
        "data_parallel_size": 1 if spec.memory.shard_optimizer == "dp" else replicas,
        "hybrid_parallel_topo_order": "pp_first",
        "sequence_parallel": topology.sequence_parallel,
        "gradient_accumulation_steps": schedule.num_micro_batches,
        "per_device_train_batch_size": schedule.micro_batch_size,
        "bf16": True,
        "overlap_p2p_comm": True,
        "partial_send_recv": False,
    }
    if spec.memory.shard_optimizer == "dp":
        settings["sharding"] = "stage1"
    if spec.gpt.mtp is not None and spec.gpt.mtp.magic_send:
        settings["enable_mtp_magic_send"] = True
    if spec.memory.recompute == "full":
        settings["recompute_granularity"] = "full"
    if schedule.kind == "dualpipe_v":
        settings["use_dualpipev"] = True
    elif schedule.num_chunks > 1:
        settings["virtual_pipeline_model_parallel_size"] = schedule.num_chunks
        settings["best_unbalanced_scheduler"] = schedule.variant == "fleet_balanced"
    return yaml.safe_dump(settings, sort_keys=False)
