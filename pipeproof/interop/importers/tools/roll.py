"""ROLL: the training of the actor on its mcore_adapter (commit 8eb27cc: examples with ``megatron_train``)."""

import re
from typing import Final

from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import Tool

_TRAIN: Final = "actor_train"
_ARGUMENTS: Final = f"{_TRAIN}.training_args"
_RANGE: Final = re.compile(r"list\(range\((?:(\d{1,6}),\s*)?(\d{1,6})\)\)")


def _adapt(job: Job) -> None:
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
    adapt=_adapt,
)
