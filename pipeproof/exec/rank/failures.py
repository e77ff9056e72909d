"""Failure of a worker: its error, and the memory that it held if memory ran out."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.units import size_text
from pipeproof.exec.store.run_codes import DIED, OUT_OF_MEMORY
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, OpKind

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate|alloc memory of|bad_alloc", re.IGNORECASE
)
"""Messages of allocators of host memory, PyTorch's and Paddle's, which raise no exception of their own."""
_REQUESTED = re.compile(r"(?:tried to allocate|alloc memory of|cannot allocate) ([\d.]+) ?([KMGT]i?B)?", re.IGNORECASE)
"""Requested size, with its unit, else in bytes."""
_LONGEST = 400
"""Characters of an error that are shown: PyTorch's message on memory ends with advice on fragmentation."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of one worker. ``memory`` has the held and requested memory if it ran out."""

    message: str
    at_ns: int
    memory: str | None = None

    @property
    def code(self) -> str:
        """Code of the finding."""
        return DIED.code if self.memory is None else OUT_OF_MEMORY.code

    @property
    def text(self) -> str:
        """Predicate of the message, which follows the name of the rank."""
        return f"raised: {self.message}" if self.memory is None else f"ran out of memory: {self.memory}"

    @property
    def help(self) -> str:
        """Next step for the user."""
        logs = "the other ranks were stopped; `--logs DIR` keeps the output of each worker"
        if self.memory is None:
            return logs
        return (
            "`pipeproof simulate PLAN --memory` shows each rank's memory over time; memory.recompute, "
            "memory.shard_optimizer, smaller micro-batches or another schedule reduce it. "
            f"{logs[0].upper()}{logs[1:]}"
        )


def event_of(error: BaseException) -> dict[str, Any]:
    """Content of the event with which a worker reports the error that ends it."""
    text, first = f"{type(error).__name__}: {error}", error
    while first.__cause__ is not None:
        first = first.__cause__
    return {
        "message": text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..",
        "at_ns": time.monotonic_ns(),
        "memory": _memory_of(first) if is_out_of_memory(first) else None,
    }


def failure_from(event: dict[str, Any]) -> Failure:
    """Read the event that ``event_of`` made."""
    return Failure(event["message"], event["at_ns"], event.get("memory"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error is about memory of the host or a GPU; imports no framework."""
    is_typed = isinstance(error, MemoryError) or any(t.__name__ == "OutOfMemoryError" for t in type(error).__mro__)
    return is_typed or (isinstance(error, RuntimeError | OSError) and _OUT_OF_MEMORY.search(str(error)) is not None)


def _memory_of(error: BaseException) -> str:
    """Text on the held memory, and the requested memory if the error states it."""
    requested = _REQUESTED.search(str(error))
    if requested is None:
        return f"{_held()}, and it requested more"
    number, unit = requested.groups()
    return f"{_held()}, and it requested {f'{number} {unit}' if unit else size_text(int(float(number)))} more"


def _held() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return f"its tensors held {size_text(held)} of the GPU, in {size_text(reserved)} that PyTorch had reserved"
    if sys.platform != "linux":
        return "the memory that the process held is unknown"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"the process held {size_text(pages * os.sysconf('SC_PAGE_SIZE'))} of the host"


def received_before(graph: OpGraph, op_id: int) -> str:
    """Text on a computation's input: its micro-batch and stage, and the message that brought the input."""
    op = graph.ops[op_id]
    if op.kind not in COMPUTE_KINDS or op.micro_batch is None:
        return ""
    text = f"it computes micro-batch {op.micro_batch} on stage {op.stage}"
    kind = OpKind.RECV_FORWARD if op.kind is OpKind.FORWARD else OpKind.RECV_BACKWARD
    work_item = (op.stage, op.micro_batch, op.split)
    for earlier in range(op_id - 1, int(graph.offsets[int(graph.rank[op_id])]) - 1, -1):
        receive = graph.ops[earlier]
        if receive.kind is kind and (receive.stage, receive.micro_batch, receive.split) == work_item:
            assert receive.kind in RECV_KINDS
            return f"{text}, with the input that {receive} brought from rank {int(graph.peer[earlier])}"
    return text
