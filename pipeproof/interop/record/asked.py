"""Recording that an environment variable switches on, so that a program need not be changed for each run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipeproof.interop.record.recorder import Recorder

VARIABLE = "PIPEPROOF_RECORD"
"""Names the directory of the logs."""


@contextmanager
def record_if_asked(framework: Literal["torch", "paddle"]) -> Iterator[Recorder | None]:
    """Record into the directory that ``PIPEPROOF_RECORD`` names; without the variable, do nothing and yield None.

    Raises:
        ValueError: ``framework`` is neither of the two, or what ``record_torch`` and ``record_paddle`` raise.
    """
    directory = os.environ.get(VARIABLE)
    if framework not in ("torch", "paddle"):
        raise ValueError(f"framework is torch or paddle, not {framework!r}")
    if not directory:
        yield None
        return
    if framework == "torch":
        from pipeproof.interop.record.torch_calls import record_torch as record
    else:
        from pipeproof.interop.record.paddle_calls import record_paddle as record
    with record(directory) as recorder:
        yield recorder
