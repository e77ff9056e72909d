"""Primus with Megatron-LM: the overrides of an experiment over its model (commit fd1eeab: primus/configs)."""

import re
from pathlib import Path
from typing import Final

from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import Tool
from pipeproof.interop.importers.tree import read_tree

_TRAINER: Final = "modules.pre_trainer"
_MODELS: Final = "primus/configs/models/megatron"


def _adapt(job: Job) -> None:
    framework = job.tree.get(_TRAINER, "framework")
    if framework is None or framework.value != "megatron":
        job.refuse(
            f"`{_TRAINER}.framework` is not megatron, whose pipelines are read", job.place(f"{_TRAINER}.framework")
        )
    model = job.tree.get(_TRAINER, "model")
    name = str(model.value) if model is not None else ""
    above = Path(job.tree.source.file).resolve().parents
    file = next((found for folder in above if (found := folder / _MODELS / name).is_file()), None) if name else None
    if file is not None:
        own = dict(job.flags)
        job.read("", values=read_tree(file).section())
        job.flags.update(own)
    elif "--num-layers" not in job.flags:
        job.unread = (f"{_MODELS}/{name}",)
    job.switch("--bf16")


PRIMUS: Final = Tool(
    name="Primus",
    kind="primus",
    names="primus",
    marks=("modules.pre_trainer", "modules.post_trainer"),
    sections=(f"{_TRAINER}.overrides",),
    decides=re.compile(
        r"patch_zero_bubble|enable_zero_bubble|zero_bubble\w*|pp_algorithm|patch_primus_pipeline|\w*pipeline_(schedule|algo)\w*"
        r"|pp_max_mem|offload_\w*pipeline|dump_pp_data_schedule|decoder_pipeline_manual_split_list"
    ),
    without=re.compile(
        r"\w*(turbo|log|sink|stderr|profile|wandb|ckpt|router|recompute_layer_ids|fsdp|moe|trainable)\w*"
    ),
    adapt=_adapt,
)
