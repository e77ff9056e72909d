"""Lists that are data: names of arguments by tool, and numbers of blocks of public checkpoints by name.

Multimodal checkpoints have the number of their text part. Other sizes change times and bytes alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

MEGATRON = "megatron"
VERSIONS = "2.0 to commit d98e8a6"
"""Versions of Megatron-LM whose arguments are in its list."""


@cache
def names_of(tool: str) -> Mapping[str, str]:
    """Return the names in a list, with underscores; Megatron-LM's with their first and last version."""
    lines = files(__name__).joinpath(f"{tool}.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.partition(" ") for line in lines if not line.startswith("#"))
    return {name: versions for name, _, versions in rows}


def plain(name: str) -> str:
    """Return a flag, or a key, as in the lists: ``--num-layers`` is ``num_layers``."""
    return name.rpartition(".")[2].removeprefix("--").replace("-", "_")


_VARIANT: Final = re.compile(
    r"(?:[-_](?:Instruct|Base|Chat|Thinking|base|chat|it|hf|PT|Paddle|FP8|fp8|BF16|bf16|torch_dist|\d{4}))+/?$",
    re.ASCII,
)
"""Names of trainings and formats of one architecture, at the end of a checkpoint's name."""


_OTHER_PARTS: Final = (
    (re.compile(r"VL(M|Model|\b)|Vision|Omni|multimodal|MIMO|GLM-4\.\dV|Kimi[-_]K2[._][5-9]|llava|gemma-3-(?!1b)",
                re.IGNORECASE), "its encoder of images or sound is not described"),
    (re.compile(r"Qwen3-(Coder-)?Next|Qwen3\.[5-9]|Kimi-(Linear|K3)|Nemotron-(H|3|Nano)|mamba|hybrid", re.IGNORECASE),
     "blocks with linear attention or a state space are not described"),
    (re.compile(r"DeepSeek-V(3\.2|4)|GLM-5", re.IGNORECASE), "sparse attention is not described"),
)  # fmt: skip
"""Names of checkpoints with parts that a plan does not have."""


def depth_of(name: str) -> int | None:
    """Return the number of blocks of a public checkpoint, by its name or by a path that ends with it; else None.

    Further trained variants have the same number of blocks: endings such as ``-Instruct`` do not matter.
    """
    depths = names_of("public_checkpoints")
    base = _VARIANT.sub("", name).rstrip("/")
    last = base.rpartition("/")[2]
    public_name = (
        base if base in depths else next((one for one in depths if last and one.rpartition("/")[2] == last), None)
    )
    return None if public_name is None else int(depths[public_name])


def other_parts(name: str) -> str | None:
    """Return why a plan does not describe a checkpoint of this name: its encoder, or its attention; else None."""
    last = name.rstrip("/").rpartition("/")[2]
    return next((why for pattern, why in _OTHER_PARTS if pattern.search(last)), None)


def is_public(name: str) -> bool:
    """Return True for the name of a public checkpoint itself, not of a directory."""
    return _VARIANT.sub("", name) in names_of("public_checkpoints")
