"""Recorder of real programs, and the check of its logs with the rules that check plans.

``record_torch`` and ``record_paddle`` write a log while a program runs; they
need only the framework. ``check_log`` (``pipeproof check``) reads the
logs of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeproof.interop.traces.check_traces import check_log
    from pipeproof.interop.traces.paddle_calls import record_paddle
    from pipeproof.interop.traces.recorder import Recorder
    from pipeproof.interop.traces.torch_calls import record_torch

__all__ = ["Recorder", "check_log", "record_paddle", "record_torch"]

_MODULES = {
    "Recorder": "recorder",
    "check_log": "check_traces",
    "record_paddle": "paddle_calls",
    "record_torch": "torch_calls",
}

__getattr__ = lazy_exports(__name__, _MODULES, __name__)
