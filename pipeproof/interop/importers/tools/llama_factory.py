"""LLaMA-Factory with Megatron-Core: YAML of its trainer (commit ff6d4d1, with ROLL's mcore_adapter)."""

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import Tool


def _adapt(job: Job) -> None:
    job.accumulate("per_device_train_batch_size", "gradient_accumulation_steps", default_size=8)


LLAMA_FACTORY: Final = Tool(
    name="LLaMA-Factory",
    kind="llama-factory",
    names="llama_factory",
    entry=re.compile(r"\S*llamafactory-cli train "),
    form="file",
    marks=("finetuning_type", "cutoff_len"),
    renamed=MappingProxyType({"cutoff_len": "seq_length"}),
    models=("model_name_or_path",),
    decides=re.compile(r"additional_configs|extra_config|mixture_of_depths|use_mca|pure_bf16_pp"),
    without=re.compile(r"(?!additional_configs|extra_config)\w+"),
    adapt=_adapt,
)
