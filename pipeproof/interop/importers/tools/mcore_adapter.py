"""Tools on ROLL's mcore_adapter: LLaMA-Factory's YAML (commit ff6d4d1), and ROLL's ``megatron_train`` (8eb27cc)."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import Tool


def _accumulate(job: Job) -> None:
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
    adapt=_accumulate,
)


_TRAIN: Final = "actor_train"
_ARGUMENTS: Final = f"{_TRAIN}.training_args"
_RANGE: Final = re.compile(r"list\(range\((?:(\d{1,6}),\s*)?(\d{1,6})\)\)")


def _train_actor(job: Job) -> None:
    strategy = job.tree.get(_TRAIN, "strategy_args.strategy_name")
    if strategy is None or strategy.value != "megatron_train":
        job.refuse(f"`{_TRAIN}.strategy_args.strategy_name` is not megatron_train: the actor trains without a pipeline",
                   job.place(f"{_TRAIN}.strategy_args.strategy_name"))  # fmt: skip
    job.accumulate(f"{_ARGUMENTS}.per_device_train_batch_size", f"{_ARGUMENTS}.gradient_accumulation_steps")
    lengths = [job.tree.number(name) for name in ("prompt_length", "response_length")]
    if None not in lengths:
        job.default("--seq-length", sum(length or 0 for length in lengths))
    devices = job.tree.value(_TRAIN, "device_mapping")
    match = _RANGE.fullmatch(str(devices).strip())
    if match is not None:
        job.world_size = int(match[2]) - int(match[1] or 0)
    elif isinstance(devices, list):
        job.world_size = len(devices)
    job.switch("--bf16", "--variable-seq-lengths")


ROLL: Final = Tool(
    name="ROLL",
    kind="roll",
    names="llama_factory",
    marks=(f"{_TRAIN}.strategy_args",),
    sections=(f"{_TRAIN}.strategy_args.strategy_config",),
    models=(f"{_TRAIN}.model_args.model_name_or_path", "pretrain"),
    decides=re.compile(r"additional_configs"),
    without=re.compile(r"(?!additional_configs)\w*(moe|offload|recompute|dtype|batch|expert|checkpoint)\w*"),
    adapt=_train_actor,
)
