"""NeMo-RL: the training of the policy on Megatron-Core (commit 7ea279a: nemo_rl/models/megatron/setup.py).

The processes that train are those of ``cluster`` without the nodes that generate, the reward model's and the teachers'
(nemo_rl/algorithms/grpo.py).
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.tools.job import BATCH, Job
from pipeproof.interop.importers.tools.tool import Tool
from pipeproof.interop.importers.tree import Tree

_RESOURCES: Final = "policy.generation.colocated.resources"
_TEACHERS: Final = "on_policy_distillation.non_colocated_teachers"


def training_processes(job: Job) -> int | None:
    """Return the processes that train the policy; None if the file does not have their number.

    Raises:
        PlanFileError: PP170, no node is left for the training.
    """
    tree = job.tree
    nodes, gpus = tree.number("cluster.num_nodes"), tree.number("cluster.gpus_per_node")
    if nodes is None or gpus is None:
        return None
    reward = _reward_model(tree)
    if nodes > 1:
        nodes -= reward[0]
    else:
        gpus -= reward[1]
    nodes -= _teacher_nodes(tree)
    if tree.value("policy.generation.colocated.enabled") is False:
        if nodes == 1:
            gpus -= tree.number(_RESOURCES, "gpus_per_node") or 0
        else:
            nodes -= tree.number(_RESOURCES, "num_nodes") or 0
    if nodes < 1 or gpus < 1:
        job.refuse(
            f"no process is left for training: {max(nodes, 0)} nodes with {max(gpus, 0)} GPUs after those that "
            "generate and score", job.place("cluster.num_nodes"), "raise `cluster.num_nodes`, or give `--world-size N`",
        )  # fmt: skip
    return nodes * gpus


def _reward_model(tree: Tree) -> tuple[int, int]:
    """Return the nodes, and the GPUs of a node, of a reward model that is an environment of the data."""
    names = [tree.value("data", part, "env_name") for part in ("", "train", "default", "validation")]
    resources = "env.reward_model.resources"
    if "reward_model" not in names:
        return 0, 0
    return tree.number(resources, "num_nodes") or 0, tree.number(resources, "gpus_per_node") or 0


def _teacher_nodes(tree: Tree) -> int:
    """Return the nodes of teachers that do not share those of the policy; one checkpoint is one teacher."""
    if tree.value(_TEACHERS, "enabled") is not True:
        return 0
    named = tree.section("on_policy_distillation.teacher_model_by_agent_name")
    teachers = {model.value: alias for alias, model in named.items()}
    default = tree.number(_TEACHERS, "default_teacher_cfg.num_nodes", default=1)
    own = (
        tree.number(_TEACHERS, "teacher_overrides", alias, "num_nodes", default=default) for alias in teachers.values()
    )
    return sum(number or 1 for number in own)


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
