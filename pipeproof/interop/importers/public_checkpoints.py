"""Numbers of blocks of public checkpoints, by their names on Hugging Face, for files that name a checkpoint only.

They are data with a date (``names/public_checkpoints.txt``). Multimodal models have the number of their text part.
Other sizes change times and bytes alone, and ``--model-config`` supplies them.
"""

from __future__ import annotations

import re
from typing import Final

from pipeproof.interop.importers.names import names_of

_VARIANT: Final = re.compile(
    r"(?:[-_](?:Instruct|Base|Chat|Thinking|base|chat|it|hf|PT|Paddle|FP8|fp8|BF16|bf16|torch_dist|\d{4}))+/?$",
    re.ASCII,
)
"""Names of trainings and formats of one architecture, at the end of a checkpoint's name."""


_OTHER_PARTS: Final = (
    (re.compile(r"VL\b|Vision|Omni|GLM-4\.\dV|Kimi-K2\.5|llava|gemma-3-(?!1b)", re.IGNORECASE),
     "its encoder of images or sound is not described"),
    (re.compile(r"Qwen3-(Coder-)?Next|Qwen3\.[5-9]|Kimi-(Linear|K3)|Nemotron-(H|3|Nano)|mamba|hybrid", re.IGNORECASE),
     "blocks with linear attention or a state space are not described"),
    (re.compile(r"DeepSeek-V(3\.2|4)|GLM-5", re.IGNORECASE), "sparse attention is not described"),
)  # fmt: skip
"""Names of checkpoints with parts that a plan does not have."""


def depth_of(name: str) -> int | None:
    """Return the number of blocks of a public checkpoint, by its name or by a path that ends with it; else None.

    Variants that are trained further have as many blocks: their endings, such as ``-Instruct``, do not matter.
    """
    depths = names_of("public_checkpoints")
    base = _VARIANT.sub("", name).rstrip("/")
    last = base.rpartition("/")[2]
    known = base if base in depths else next((one for one in depths if last and one.rpartition("/")[2] == last), None)
    return None if known is None else int(depths[known])


def other_parts(name: str) -> str | None:
    """Return why a plan does not describe a checkpoint of this name: its encoder, or its attention; else None."""
    last = name.rstrip("/").rpartition("/")[2]
    return next((why for pattern, why in _OTHER_PARTS if pattern.search(last)), None)


def is_public(name: str) -> bool:
    """Return True for the name of a public checkpoint itself, not of a directory."""
    return _VARIANT.sub("", name) in names_of("public_checkpoints")
