"""NeMo-RL: the training of the policy on Megatron-Core (commit 7ea279a: nemo_rl/models/megatron/setup.py).

The processes that train are those of ``cluster`` without the nodes that generate, the reward model's and the teachers'
(nemo_rl/algorithms/grpo.py).
"""

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.tools.job import BATCH, Job
from pipeproof.interop.importers.tools.nemo_nodes import training_processes
from pipeproof.interop.importers.tools.tool import Tool

_MEGATRON: Final = "policy.megatron_cfg"
_RECOMPUTE: Final = ("recompute_granularity", "recompute_modules")


def _adapt(job: Job) -> None:
    tree = job.tree
    enabled, place = tree.get(_MEGATRON, "enabled"), job.place(f"{_MEGATRON}.enabled")
    if enabled is None or enabled.value is not True:
        job.refuse(f"`{_MEGATRON}.enabled` is not true: the policy trains without a pipeline", place)
    if tree.value(_MEGATRON, "activation_checkpointing") is True:
        job.read(_MEGATRON, values={key: v for key, v in tree.section(_MEGATRON).items() if key in _RECOMPUTE})
        job.default("--recompute-granularity", "full", job.place(f"{_MEGATRON}.activation_checkpointing"))
    for name in ("sequence_packing", "dynamic_batching"):
        if tree.value("policy", name, "enabled") is True:
            why = f"not the number of micro-batches: with `policy.{name}`, they depend on the data"
            job.unknown(BATCH, why, job.place(f"policy.{name}.enabled"))
    half = {"bfloat16": "--bf16", "float16": "--fp16"}.get(str(tree.value("policy", "precision")))
    job.switch(*([half] if half else []), "--calculate-per-token-loss")
    for name in ("value", "teacher"):
        pp = tree.get(name, "megatron_cfg.pipeline_model_parallel_size")
        if pp is not None and pp.value != 1 and tree.value(name, "megatron_cfg.enabled") is True:
            job.notes.append((f"the pipeline of `{name}` ({pp.value} ranks) is not checked", pp.location))
    if tree.value(_MEGATRON, "peft.enabled") is True:
        job.notes.append(("adapters are not described: all weights train here", job.place(f"{_MEGATRON}.peft.enabled")))
    job.world_size = training_processes(job)


NEMO_RL: Final = Tool(
    name="NeMo-RL", kind="nemo-rl", names="nemo_rl", marks=(_MEGATRON,),
    sections=(_MEGATRON, f"{_MEGATRON}.model_overrides"),
    elsewhere=frozenset({"enabled", "activation_checkpointing", *_RECOMPUTE}),
    values=MappingProxyType(
        {
            "policy.train_global_batch_size": BATCH,
            "policy.train_micro_batch_size": "--micro-batch-size",
            "policy.max_total_sequence_length": "--seq-length",
            f"{_MEGATRON}.optimizer.use_distributed_optimizer": "--use-distributed-optimizer",
            f"{_MEGATRON}.optimizer.clip_grad": "--clip-grad",
            f"{_MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce": "--overlap-grad-reduce",
        }
    ),
    models=("policy.model_name",),
    without=re.compile(r"\w*(router|offload|checkpoint|dtype|empty_unused)\w*"),
    adapt=_adapt,
)  # fmt: skip
