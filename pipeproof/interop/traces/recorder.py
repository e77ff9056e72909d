"""Recorder of one rank: it writes calls, waits and marks as lines of a log. It needs no framework.

A line is one JSON object. It is written before the call that it describes, so
the log of a rank that hangs or is killed can be read completely.

``start``   rank, number of ranks, framework, format version
``create``  a group was made: its name and ranks; members and others see it
``group``   a group of the rank, when it is first used: its name, ranks, backend
``call``    an operation is issued: ``seq``, ``op``, ``group``, ``peer`` (a global rank: the other end, or the root),
            ``tag``, ``reduction``, ``inputs``, ``outputs``, ``batch``, ``blocks``, ``mark``, ``at``
``wait``    the host begins to wait for the operations ``of``; ``changed``: those whose memory was written meanwhile
``done``    the operations ``of`` have ended, by the wait or the blocking call; ``source`` of a receive from any rank
``failed``  a call or wait raised
``unread``  a call whose arguments the recorder does not know: it was issued, and is not in the log
``end``     the recording ended; ``error`` if the program raised
"""

from __future__ import annotations

import inspect
import json
import os
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, TextIO

VERSION = 1
"""Version of the log format."""

MarkKind = Literal["F", "B"]

_FRAMES_TO_SKIP = frozenset(
    {"torch", "paddle", "pipeproof", "contextlib", "functools", "threading", "typing_extensions"}
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a call: input or output.

    ``strides`` are in elements; ``start`` and ``stop`` are its first address
    and the one after its last, in bytes; ``tensor`` is the framework's tensor,
    and ``version`` its count of in-place writes.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    start: int
    stop: int
    version: int
    tensor: Any

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON data of the log."""
        return {
            "shape": list(self.shape), "dtype": self.dtype, "strides": list(self.strides),
            "start": self.start, "stop": self.stop,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that is about to be issued; the recorder knows its ``group``."""

    op: str
    group: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    peer: int | None = None
    tag: int = 0
    reduction: str = ""
    sent_splits: tuple[int, ...] = ()
    received_splits: tuple[int, ...] = ()
    blocks: bool = False
    """The call returns only when the operation has ended."""


class CallSink(ABC):
    """Receiver of the calls and waits that the hooks of a framework see: a log, or a ring."""

    def __init__(self) -> None:
        self._batch: list[int] | None = None
        self._next_batch = 0

    @abstractmethod
    def write(self, event: str, **values: Any) -> None:
        """Take an event that is not an operation."""

    @abstractmethod
    def group(self, name: str, ranks: Sequence[int], backend: str, about: str = "") -> None:
        """Take a group before its first call."""

    @abstractmethod
    def call(self, call: Call, mark: dict[str, Any] | None = None) -> int:
        """Take an operation that is about to be issued, and return its number."""

    @abstractmethod
    def issued(self, seq: int) -> None:
        """Take that the call of an operation has returned."""

    @abstractmethod
    def waits(self, seqs: Sequence[int]) -> None:
        """Take that the host begins to wait for operations, or sees that they have ended."""

    @abstractmethod
    def done(self, seqs: Sequence[int], source: int | None = None) -> None:
        """Take that operations have ended."""

    @abstractmethod
    def is_pending(self, seq: int) -> bool:
        """True if nothing has waited for an operation yet."""

    @abstractmethod
    def blocks(self, seq: int) -> bool:
        """True if an operation that is not done blocks its caller."""

    @abstractmethod
    def failed(self, seqs: Sequence[int], error: BaseException) -> None:
        """Take that a call or a wait raised an error."""

    @abstractmethod
    def unread(self, method: str, error: Exception) -> None:
        """Take that a call with unknown arguments is issued."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """End the recording."""

    @contextmanager
    def issuing(self, *seqs: int) -> Iterator[None]:
        """Take the error that the call of operations raises in the block."""
        try:
            yield
        except BaseException as error:
            self.failed(seqs, error)
            raise

    @contextmanager
    def waiting(self, seqs: Sequence[int]) -> Iterator[None]:
        """Take a wait in the block, and the error that it raises."""
        self.waits(seqs)
        with self.issuing(*seqs):
            yield

    @property
    def in_batch(self) -> bool:
        """True while calls are part of a batch."""
        return self._batch is not None

    def begin_batch(self) -> None:
        """Begin a batch: operations until ``end_batch`` are one call."""
        self._batch = []

    def end_batch(self) -> tuple[int, ...]:
        """End the batch, and return its operations."""
        batch, self._batch = tuple(self._batch or ()), None
        self._next_batch += 1
        return batch


class Recorder(CallSink):
    """Writes the log of one rank.

    Args:
        directory: directory of the file ``rank_N.jsonl``; created if it does not exist.
        version_of: function that returns a tensor's count of in-place writes.

    Raises:
        ValueError: the directory has a log of this rank already.
    """

    def __init__(self, directory: Path, rank: int, num_ranks: int, framework: str, version_of: Any) -> None:
        super().__init__()
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank_{rank}.jsonl"
        try:
            self._file: TextIO = self.path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ValueError(f"{self.path} exists: name another directory, or remove the file") from None
        self._lock = threading.RLock()
        self._version_of = version_of
        self._groups: set[str] = set()
        self._pending: dict[int, Call] = {}
        self._next_seq = 0
        self._marks: list[dict[str, Any]] = []
        self.write(
            "start", version=VERSION, rank=rank, num_ranks=num_ranks, framework=framework, epoch_ns=time.time_ns()
        )

    def write(self, event: str, **values: Any) -> None:
        """Append a line, without values that are None or empty."""
        kept = {key: value for key, value in values.items() if value not in (None, [], "", {})}
        with self._lock:
            if self._file.closed:
                return
            self._file.write(json.dumps({"event": event, **kept, "time_ns": time.monotonic_ns()}) + "\n")
            self._file.flush()

    @contextmanager
    def mark(self, *, stage: int, micro_batch: int, kind: MarkKind) -> Iterator[None]:
        """Mark the messages that are sent and received inside with their meaning.

        ``kind`` is F for an activation, B for the gradient of one. ``stage``
        is the stage that this rank sends or receives for: for a message from
        stage 0 to stage 1 it is 0 on the sender and 1 on the receiver.

        Raises:
            ValueError: a number is negative, or the kind is another one.
        """
        if stage < 0 or micro_batch < 0 or kind not in ("F", "B"):
            raise ValueError(f"a mark has a stage, a micro-batch and F or B, not {stage}, {micro_batch}, {kind!r}")
        self._marks.append({"stage": stage, "micro_batch": micro_batch, "kind": kind})
        try:
            yield
        finally:
            self._marks.pop()

    def group(self, name: str, ranks: Sequence[int], backend: str, about: str = "") -> None:
        """Write a group before its first call; later calls do nothing."""
        with self._lock:
            if name not in self._groups:
                self._groups.add(name)
                self.write("group", group=name, ranks=list(ranks), backend=backend, about=about)

    def call(self, call: Call, mark: dict[str, Any] | None = None) -> int:
        """Write that an operation is about to be issued, and return its number."""
        with self._lock:
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            self._pending[seq] = call
            if self._batch is not None:
                self._batch.append(seq)
            self.write(
                "call", seq=seq, op=call.op, group=call.group, peer=call.peer, tag=call.tag or None,
                reduction=call.reduction, inputs=[tensor.to_json() for tensor in call.inputs],
                outputs=[tensor.to_json() for tensor in call.outputs], sent_splits=list(call.sent_splits),
                received_splits=list(call.received_splits), blocks=call.blocks or None,
                batch=None if self._batch is None else self._next_batch,
                mark=mark or (self._marks[-1] if self._marks else None), at=user_position(),
            )  # fmt: skip
            return seq

    def issued(self, seq: int) -> None:
        """Note that an operation is in flight: later writes to its memory conflict with it."""
        call = self._pending.get(seq)
        if call is not None and not call.blocks:
            self._pending[seq] = _renewed(call, self._version_of)

    def waits(self, seqs: Sequence[int]) -> None:
        """Write that the host begins to wait for operations, or sees that they have ended."""
        pending = [(seq, self._pending[seq]) for seq in seqs if seq in self._pending]
        changed = [seq for seq, call in pending if _is_written(call, self._version_of)]
        self.write("wait", of=[seq for seq, _ in pending], changed=changed, at=user_position())

    def done(self, seqs: Sequence[int], source: int | None = None) -> None:
        """Write that operations have ended."""
        with self._lock:
            ended = [seq for seq in seqs if self._pending.pop(seq, None) is not None]
            if ended:
                self.write("done", of=ended, source=source)

    def is_pending(self, seq: int) -> bool:
        """True if nothing has waited for an operation yet."""
        return seq in self._pending

    def blocks(self, seq: int) -> bool:
        """True if an operation that is not done blocks its caller."""
        return seq in self._pending and self._pending[seq].blocks

    def failed(self, seqs: Sequence[int], error: BaseException) -> None:
        """Write that a call or a wait raised an error."""
        self.write("failed", of=list(seqs), error=f"{type(error).__name__}: {error}"[:2000])

    def unread(self, method: str, error: Exception) -> None:
        """Write that a call with unknown arguments is issued without a record."""
        self.write("unread", call=method, error=f"{type(error).__name__}: {error}"[:2000], at=user_position())

    def close(self, error: BaseException | None) -> None:
        """End the log; later calls write nothing."""
        self.write("end", error=None if error is None else f"{type(error).__name__}: {error}"[:2000])
        with self._lock:
            self._file.close()
            self._pending.clear()


def user_position() -> str:
    """``file:line`` of the innermost frame outside the framework and the recorder; empty if there is none.

    The name of a file in the working directory is relative to it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _FRAMES_TO_SKIP:
            return f"{frame.f_code.co_filename.removeprefix(str(Path.cwd()) + os.sep)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep
_SITE_PACKAGES: Final = ("site-packages", "dist-packages")


def is_library(frame: FrameType) -> bool:
    """True for a frame of a framework, of pipeproof, or of Python's standard library."""
    name = frame.f_globals.get("__name__", "")
    if name == "__main__":  # of python -m, as pipeproof starts its ranks
        name = getattr(frame.f_globals.get("__spec__"), "name", "")
    if name.partition(".")[0] in _FRAMES_TO_SKIP:
        return True
    file = frame.f_code.co_filename
    return file.startswith((_STANDARD_LIBRARY, "<frozen")) and not any(name in file for name in _SITE_PACKAGES)


def _renewed(call: Call, version_of: Any) -> Call:
    inputs = tuple(replace(tensor, version=version_of(tensor.tensor)) for tensor in call.inputs)
    outputs = tuple(replace(tensor, version=version_of(tensor.tensor)) for tensor in call.outputs)
    return replace(call, inputs=inputs, outputs=outputs)


def _is_written(call: Call, version_of: Any) -> bool:
    """True if the program wrote to memory of a call since it was issued.

    A process group copies into the outputs of collectives (gloo from a thread of its own), and the frameworks count
    this as a write, too. So for a collective, only inputs that share no memory with another tensor are examined.
    """
    tensors = (
        call.outputs if call.op == "recv" else [each for each in call.inputs if not _is_shared(each, call.outputs)]
    )
    return any(version_of(tensor.tensor) != tensor.version for tensor in tensors)


def _is_shared(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(
        tensor.tensor is not other.tensor and tensor.start < other.stop and other.start < tensor.stop
        for other in others
    )
