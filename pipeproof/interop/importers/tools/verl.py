"""verl with its Megatron backend: overrides such as ``a.b.c=value`` (verl, commit b178a3c: verl/trainer/config)."""

import re
from typing import Final

from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.tools.job import BATCH, PP, Job
from pipeproof.interop.importers.tools.tool import Tool

_ACTOR, _ENGINE = "actor_rollout_ref.actor.megatron", "engine"
_OVERRIDES: Final = ("override_transformer_config", "override_ddp_config", "override_mcore_model_config")
_OTHER_MODELS: Final = ("actor_rollout_ref.ref.megatron", "critic.megatron")
_DEFAULT_LENGTH, _DEFAULT_BATCH = 512, 256


def _adapt(job: Job) -> None:
    tree, is_actor = job.tree, job.tree.has(_ACTOR)
    section = _ACTOR if is_actor else _ENGINE
    dtype = tree.get(section, "dtype")
    job.switch("--fp16" if dtype is not None and dtype.value == "float16" else "--bf16")
    for name in ("sequence_parallel", "use_distributed_optimizer"):
        if not tree.has(f"{section}.{name}"):
            job.switch(f"--{name.replace('_', '-')}")
    lengths: tuple[str, ...] = (
        ("data.max_prompt_length", "data.max_response_length") if is_actor else ("data.max_length",)
    )
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
    by_tokens = tree.get(dynamic)
    if by_tokens is not None and by_tokens.value is True:
        why = "not the number of micro-batches: with `use_dynamic_bsz`, it depends on the lengths of the data"
        job.unknown(BATCH, why, by_tokens.location)
    elif batch:
        job.default(BATCH, batch, job.place(size))
    if tree.value("actor_rollout_ref.model.mtp.enable") is True:
        why, place = "modules of multi-token prediction are not read", job.place("actor_rollout_ref.model.mtp.enable")
        job.open.append(IgnoredSetting("actor_rollout_ref.model.mtp.enable", why, place))
    for other in _OTHER_MODELS:
        pp = tree.get(other, PP[2:].replace("-", "_"))
        if pp is not None and pp.value != 1:
            job.notes.append((f"the pipeline of `{other}` is not checked", pp.location))


VERL: Final = Tool(
    name="verl", kind="verl", names="verl", form="overrides",
    entry=re.compile(r"\S*verl[./]\S* .*\b(actor_rollout_ref\.actor\.megatron|engine)\.\w*parallel_size="),
    marks=(_ACTOR, _ENGINE),
    sections=tuple(f"{top}.{below}".strip(".") for top in (_ACTOR, _ENGINE) for below in ("", *_OVERRIDES)),
    switches=("--variable-seq-lengths",),
    models=("actor_rollout_ref.model.path", "model.path"),
    without=re.compile(r"use_\w+|\w*offload|dist_checkpointing_\w+|vanilla_mbridge|forward_only|strategy|\w*dtype"),
    adapt=_adapt,
)  # fmt: skip
