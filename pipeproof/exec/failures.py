"""What ended a worker: where it was raised, and whether memory ran out, told by a process that knows no other."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.exec.codes import DIED, OUT_OF_MEMORY
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, OpKind
from pipeproof.schedule.optable import OpGraph

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate|alloc memory of|bad_alloc", re.IGNORECASE
)
"""What frameworks say beside their own exceptions: PyTorch's and Paddle's allocators of host memory."""
_ASKED = re.compile(r"(?:tried to allocate|alloc memory of|cannot allocate) ([\d.]+) ?([KMGT]i?B)?", re.IGNORECASE)
"""The size that could not be had, with its unit, else in bytes."""
_LONGEST = 400
"""Characters of an error that are shown: PyTorch's on memory goes on with advice on fragments."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of one worker. ``memory`` says what it held and asked for, where there was no more."""

    message: str
    at_ns: int
    memory: str | None = None
    place: str | None = None

    @property
    def code(self) -> str:
        """The code of the finding."""
        return DIED.code if self.memory is None else OUT_OF_MEMORY.code

    @property
    def text(self) -> str:
        """What happened, behind the name of the rank."""
        place = f" ({self.place})" if self.place else ""
        if self.memory is None:
            return f"raised: {self.message}{place}"
        return f"ran out of memory{place}: {self.memory}"

    @property
    def help(self) -> str:
        """What to do."""
        kept = "the other ranks were stopped; `--logs DIR` keeps what each worker printed"
        if self.memory is None:
            return kept
        return (
            "`pipeproof simulate PLAN --memory` shows what each rank holds when; less is held with memory.recompute, "
            f"memory.shard_optimizer, smaller micro-batches or another schedule. {kept[0].upper()}{kept[1:]}"
        )


def event_of(error: BaseException) -> dict[str, Any]:
    """What a worker says of the error that ends it, as the content of an event."""
    text, first = f"{type(error).__name__}: {error}", error
    while first.__cause__ is not None:  # ours say what a person's code raised
        first = first.__cause__
    return {
        "message": text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..",
        "at_ns": time.monotonic_ns(),
        "memory": _memory_of(first) if is_out_of_memory(first) else None,
        "place": _place_of(first),
    }


def failure_from(event: dict[str, Any]) -> Failure:
    """Read what ``event_of`` said."""
    return Failure(event["message"], event["at_ns"], event.get("memory"), event.get("place"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory, of the host or of a GPU, without an import of any framework."""
    named = isinstance(error, MemoryError) or any(one.__name__ == "OutOfMemoryError" for one in type(error).__mro__)
    return named or (isinstance(error, RuntimeError | OSError) and _OUT_OF_MEMORY.search(str(error)) is not None)


def _memory_of(error: BaseException) -> str:
    """What was held, and asked for as far as the error says."""
    asked = _ASKED.search(str(error))
    if asked is None:
        return f"{_held()}, and more was asked for"
    number, unit = asked.groups()
    return f"{_held()}, and {f'{number} {unit}' if unit else _gib(int(float(number)))} more were asked for"


def _held() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return f"its tensors held {_gib(held)} of the GPU, in {_gib(reserved)} that PyTorch had taken"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"the process held {_gib(pages * os.sysconf('SC_PAGE_SIZE'))} of the host"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _place_of(error: BaseException) -> str | None:
    """The innermost line of a person's own code: neither ours, nor that of an installed package."""
    ours = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, sys.prefix, sys.base_prefix, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return None


def received_before(graph: OpGraph, op_id: int) -> str:
    """What a computation works on: where it stands in the plan, and the message that brought its input."""
    op = graph.ops[op_id]
    if op.kind not in COMPUTE_KINDS or op.micro_batch is None:
        return ""
    text = f"it computes micro-batch {op.micro_batch} on stage {op.stage}"
    wanted = OpKind.RECV_FORWARD if op.kind is OpKind.FORWARD else OpKind.RECV_BACKWARD
    unit = (op.stage, op.micro_batch, op.split)
    for earlier in range(op_id - 1, int(graph.offsets[int(graph.rank[op_id])]) - 1, -1):
        received = graph.ops[earlier]
        if received.kind is wanted and (received.stage, received.micro_batch, received.split) == unit:
            assert received.kind in RECV_KINDS
            return f"{text}, of what {received} brought from rank {int(graph.peer[earlier])}"
    return text
