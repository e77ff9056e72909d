"""verl with its Megatron backend: overrides such as ``a.b.c=value`` (verl, commit b178a3c: verl/trainer/config)."""

import re
from typing import Final

from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.tools.job import BATCH, PP, Job
from pipeproof.interop.importers.tools.tool import Tool

_ACTOR, _ENGINE, _MTP = "actor_rollout_ref.actor.megatron", "engine", "actor_rollout_ref.model.mtp.enable"
_OVERRIDES: Final = ("override_transformer_config", "override_ddp_config", "override_mcore_model_config")
_OTHER_MODELS: Final = ("actor_rollout_ref.ref.megatron", "critic.megatron")
_LENGTHS: Final = (("data.max_length",), ("data.max_prompt_length", "data.max_response_length"))
_DEFAULT_LENGTH, _DEFAULT_BATCH = 512, 256
_AXES: Final = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")


def _adapt(job: Job) -> None:
    tree, is_actor = job.tree, job.tree.has(_ACTOR)
    section = _ACTOR if is_actor else _ENGINE
    job.switch("--fp16" if tree.value(section, "dtype") == "float16" else "--bf16")
    for name in ("sequence_parallel", "use_distributed_optimizer"):
        if not tree.has(f"{section}.{name}"):
            job.switch(f"--{name.replace('_', '-')}")
    lengths = _LENGTHS[is_actor]
    if is_actor:
        actor = "actor_rollout_ref.actor"
        size, dynamic = f"{actor}.ppo_mini_batch_size", f"{actor}.use_dynamic_bsz"
        batch = job.product((size, _DEFAULT_BATCH), ("actor_rollout_ref.rollout.n", 1))
        job.world_size = job.product(("trainer.nnodes", 1), ("trainer.n_gpus_per_node", 8))
        job.take("--micro-batch-size", f"{actor}.ppo_micro_batch_size_per_gpu")
    else:
        size, dynamic = "data.train_batch_size", "data.use_dynamic_bsz"
        batch = job.product((size, _DEFAULT_BATCH))
        job.world_size = job.product(("launcher.nnodes", 1), ("launcher.nproc_per_node", None))
        job.take("--micro-batch-size", "data.micro_batch_size_per_gpu")
    known = [tree.number(name, default=_DEFAULT_LENGTH * (3 - len(lengths))) for name in lengths]
    if None not in known:
        job.default("--seq-length", sum(length or 0 for length in known))
    if tree.value(dynamic) is True:
        why = "not the number of micro-batches: with `use_dynamic_bsz`, it depends on the lengths of the data"
        job.unknown(BATCH, why, job.place(dynamic))
    elif batch:
        job.default(BATCH, batch, job.place(size))
    if tree.value(_MTP) is True:
        job.open.append(IgnoredSetting(_MTP, "multi-token prediction is not read", job.place(_MTP)))
    for other in _OTHER_MODELS:
        pp = tree.get(other, PP[2:].replace("-", "_"))
        if pp is not None and pp.value != 1:
            job.notes.append((f"the pipeline of `{other}` is not checked", pp.location))


VERL: Final = Tool(
    name="verl", kind="verl", names="verl", form="overrides",
    entry=re.compile(
        r".*\bactor_rollout_ref\.actor\.megatron\.\w*parallel_size=|\S*verl[./]\S* .*\bengine\.\w*parallel_size="
    ),
    marks=(_ACTOR, *(f"{_ENGINE}.{axis}_parallel_size" for axis in _AXES)), adapt=_adapt,
    sections=tuple(f"{top}.{below}".strip(".") for top in (_ACTOR, _ENGINE) for below in ("", *_OVERRIDES)),
    switches=("--variable-seq-lengths",),
    models=("actor_rollout_ref.model.path", "model.path"),
    without=re.compile(r"use_\w+|\w*offload|dist_checkpointing_\w+|vanilla_mbridge|forward_only|strategy|\w*dtype"),
)  # fmt: skip
