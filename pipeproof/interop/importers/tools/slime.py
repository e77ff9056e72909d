"""slime: reinforcement learning on Megatron-LM's own flags (slime, commit 624b824: slime/utils/arguments.py).

A step trains on the samples of a rollout, and all nodes of the actor train.
"""

import re
from typing import Final

from pipeproof.interop.importers.tools.job import BATCH, Job
from pipeproof.interop.importers.tools.tool import Tool

_SAMPLES: Final = ("rollout_batch_size", "n_samples_per_prompt")


def _adapt(job: Job) -> None:
    if job.tree.has("actor_num_nodes") or job.tree.has("actor_num_gpus_per_node"):
        job.world_size = job.product(("actor_num_nodes", 1), ("actor_num_gpus_per_node", 8))
    steps = job.tree.number("num_steps_per_rollout", default=0)
    samples = job.product((_SAMPLES[0], 0), (_SAMPLES[1], 1))
    if steps is None or (steps and samples is None):
        job.unknown(BATCH, "that of a rollout, which only a run determines", job.place("num_steps_per_rollout"))
    elif steps and samples:
        job.flags.pop(BATCH, None)
        job.default(BATCH, samples // steps, job.place(*_SAMPLES))
    if job.tree.has("use_dynamic_batch_size"):
        why = "not the number of micro-batches: with --use-dynamic-batch-size, it depends on the lengths of the data"
        job.unknown(BATCH, why, job.place("use_dynamic_batch_size"))
    job.switch("--use-distributed-optimizer", "--variable-seq-lengths")
    if "--fp16" not in job.flags:
        job.switch("--bf16")
    if "--num-experts" in job.flags:
        job.default("--moe-token-dispatcher-type", "alltoall")
    job.default("--seq-length", 4096)
    job.public_depth("hf_checkpoint")


SLIME: Final = Tool(
    name="slime",
    names="slime",
    entry=re.compile(r"(^|/)train(_async)?\.py$"),
    decides=re.compile(r"megatron_config_path|custom_megatron_\w+|custom_model_provider_path|spec|train_backend"),
    without=re.compile(
        r"(no_)?sglang_\w+|rollout_\w+|actor_\w+|critic_\w+|ref_\w+|over_sampling_\w+|(no_)?offload_\w+|\w*batch_size"
        r"|use_dynamic_batch_size|(log_probs_)?max_tokens_per_gpu|micro_\w+|\w*_path|\w*layernorm\w*|mtp_\w*|\w*routing\w*"
        r"|only_train_params_\w+|freeze_\w+|enable_mtp_training|num_gpus\w*"
    ),
    adapt=_adapt,
)
