"""ms-swift's Megatron trainer: ``megatron sft``, ``pt`` and ``rlhf`` (commit 3602360: megatron_args.py), and YAML."""

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import Tool


def _adapt(job: Job) -> None:
    recompute = job.tree.get("recompute_granularity") or job.tree.get("train.recompute_granularity")
    if recompute is not None and recompute.value == "none":
        job.flags.pop("--recompute-granularity", None)
    else:
        job.default("--recompute-granularity", "selective")
    for name, flag in (("use_distributed_optimizer", "--use-distributed-optimizer"),
                       ("padding_free", "--variable-seq-lengths")):  # fmt: skip
        placed = job.tree.get(name) or job.tree.get("train", name)
        if placed is None or placed.value is not False:
            job.switch(flag)
    if "--fp16" not in job.flags:
        job.switch("--bf16")
    job.world_size = job.tree.number("train.gpus") or job.product(
        ("environment.NNODES", 1), ("environment.NPROC_PER_NODE", 1)
    )


MS_SWIFT: Final = Tool(
    name="ms-swift",
    kind="ms-swift",
    names="ms_swift",
    entry=re.compile(r"\S*\bmegatron (sft|pt|rlhf) |\S*cli/_megatron/(sft|pt|rlhf)\.py "),
    marks=("micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "train.gpus", "model"),
    sections=("", "train"),
    elsewhere=frozenset({"gpus"}),
    renamed=MappingProxyType({"max_length": "seq_length"}),
    defaults=MappingProxyType(
        {
            "--micro-batch-size": 1,
            "--global-batch-size": 16,
            "--attention-backend": "flash",
            "--expert-tensor-parallel-size": 1,
        }
    ),
    models=("model", "train.model", "mcore_model", "load"),
    without=re.compile(
        r"\w*(vllm|lora|offload|dataset|dataloader|streaming|packing|router|tuner|freeze|vit)\w*|deepspeed"
    ),
    adapt=_adapt,
)
