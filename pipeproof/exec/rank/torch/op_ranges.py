"""Names of operations in traces of PyTorch's profiler, and as NVTX ranges, for `pipeproof import profile`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from pipeproof.schedule.ops import TRACE_PREFIX

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def op_range(text: str) -> AbstractContextManager[object]:
    """Return the range of one operation while a profiler runs, else a context that does nothing."""
    if torch.autograd._profiler_enabled():  # noqa: SLF001 - a name is not worth recording for nobody
        named: AbstractContextManager[object] = record_function(f"{TRACE_PREFIX}{text}")
        return named
    return _NO_RANGE
