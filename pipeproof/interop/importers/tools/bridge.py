"""Megatron-Bridge: a ``ConfigContainer``, in its process or as YAML (commit 067f987: training/config.py).

Bridge writes the YAML with each checkpoint, as ``run_config.yaml``.
"""

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.tools.job import BATCH, Job
from pipeproof.interop.importers.tools.tool import Tool


def _adapt(job: Job) -> None:
    job.take("--seq-length", "dataset.sequence_length")
    job.take("--seq-length", "dataset.seq_length")
    if job.tree.value("model.share_embeddings_and_output_weights") is False:
        job.switch("--untie-embeddings-and-output-weights")
    precision, fp16 = job.tree.value("mixed_precision"), job.tree.value("mixed_precision.fp16")
    job.switch("--fp16" if fp16 is True or (isinstance(precision, str) and "fp16" in precision) else "--bf16")


BRIDGE: Final = Tool(
    name="Megatron-Bridge",
    kind="megatron-bridge",
    names="bridge",
    marks=("ddp._target_", "model._target_"),
    sections=("model", "comm_overlap"),
    elsewhere=frozenset({"bf16", "fp16", "share_embeddings_and_output_weights", "seq_length"}),
    values=MappingProxyType(
        {
            "model.seq_length": "--seq-length",
            "train.global_batch_size": BATCH,
            "train.micro_batch_size": "--micro-batch-size",
            "ddp.use_distributed_optimizer": "--use-distributed-optimizer",
            "ddp.overlap_grad_reduce": "--overlap-grad-reduce",
            "ddp.overlap_param_gather": "--overlap-param-gather",
            "ddp.bucket_size": "--ddp-bucket-size",
        }
    ),
    without=re.compile(r"\w+"),
    adapt=_adapt,
)
