"""What a real program does: recorded on each rank, then judged by the rules that judge plans.

``record_torch`` and ``record_paddle`` write a log while a program runs; they
need nothing but the framework. ``judge_log`` (``pipeproof check --log``) reads
the logs of all ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.interop.record.asked import record_if_asked
    from pipeproof.interop.record.judge import judge_log
    from pipeproof.interop.record.paddle_calls import record_paddle
    from pipeproof.interop.record.recorder import Recorder
    from pipeproof.interop.record.torch_calls import record_torch

__all__ = ["Recorder", "judge_log", "record_if_asked", "record_paddle", "record_torch"]

_HOMES = {
    "Recorder": "recorder",
    "judge_log": "judge",
    "record_if_asked": "asked",
    "record_paddle": "paddle_calls",
    "record_torch": "torch_calls",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeproof.interop.record' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeproof.interop.record.{_HOMES[name]}"), name)
