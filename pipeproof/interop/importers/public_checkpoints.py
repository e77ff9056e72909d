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


def depth_of(name: str) -> int | None:
    """Return the number of blocks of a public checkpoint, by its name or by a path that ends with it; else None.

    Variants that are trained further have as many blocks: their endings, such as ``-Instruct``, do not matter.
    """
    depths = names_of("public_checkpoints")
    base = _VARIANT.sub("", name).rstrip("/")
    last = base.rpartition("/")[2]
    known = base if base in depths else next((one for one in depths if last and one.rpartition("/")[2] == last), None)
    return None if known is None else int(depths[known])


def is_public(name: str) -> bool:
    """Return True for the name of a public checkpoint itself, not of a directory."""
    return _VARIANT.sub("", name) in names_of("public_checkpoints")
