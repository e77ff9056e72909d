"""Recording that an environment variable switches on, without a change of the program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipeproof.interop.traces.recorder import Recorder

VARIABLE = "PIPEPROOF_RECORD"
"""Environment variable with the directory of the logs."""


@contextmanager
def record_if_requested(framework: Literal["torch", "paddle"]) -> Iterator[Recorder | None]:
    """Record into the directory that ``PIPEPROOF_RECORD`` names; without the variable, do nothing and yield None.

    Raises:
        ValueError: ``framework`` is neither of the two, or ``record_torch`` or ``record_paddle`` raises it.
    """
    directory = os.environ.get(VARIABLE)
    if framework not in ("torch", "paddle"):
        raise ValueError(f"framework is torch or paddle, not {framework!r}")
    if not directory:
        yield None
        return
    if framework == "torch":
        from pipeproof.interop.traces.torch_calls import record_torch as record
    else:
        from pipeproof.interop.traces.paddle_calls import record_paddle as record
    with record(directory) as recorder:
        yield recorder
