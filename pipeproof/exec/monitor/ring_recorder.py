"""Recorder of a watched rank: it writes the calls and waits of a program into the rank's ring.

A thread writes the heartbeat four times in a second. While the rank makes no progress, the thread also writes the
position of the main thread: the ring of a rank that waits for its data shows the line that waits.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Self

from pipeproof.exec.monitor.ring import (
    CAPACITY,
    OP_NUMBERS,
    End,
    OpState,
    RingGroup,
    RingWriter,
    SequenceDigest,
    group_text,
)
from pipeproof.interop.traces.message_hooks import GroupCalls
from pipeproof.interop.traces.recorder import Call, CallSink, is_library

DIRECTORY_VARIABLE: Final = "PIPEPROOF_WATCH"
"""Environment variable with the directory of the rings."""
DEFAULT_DIRECTORY: Final = "pipeproof-rings"
HEARTBEAT_S: Final = 0.25
_IDLE_BEFORE_STACK_S: Final = 0.75
_MAX_FRAMES: Final = 12
_MESSAGES: Final = frozenset({"send", "recv"})
_KINDS: Final = {"F": 1, "B": 2}
_NO_MARK: Final = (-1, -1, 0)

IsDone = Callable[[], bool]
"""Function that returns True once the device has finished the work that was queued before its creation."""


class RingRecorder(CallSink):
    """Writes calls and waits into the ring of this rank; it has the methods of the recorder of logs.

    Args:
        directory: directory of ``rank_N.ring``; created if it does not exist.
        only: names of the groups to record; None for all.
        marker: function of a backend that marks a point of the device's current stream, or returns None if the host
            waits for the operations.
        shared: write the file to its server at every heartbeat, for monitors on other hosts.

    Raises:
        OSError: the directory or the file cannot be created.
        ValueError: ``capacity`` is not positive.
    """

    def __init__(
        self, directory: Path, rank: int, num_ranks: int, framework: str, *, only: frozenset[str] | None = None,
        marker: Callable[[str], IsDone | None] | None = None, shared: bool = False, capacity: int = CAPACITY,
    ) -> None:  # fmt: skip
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a ring keeps at least 1 operation, not {capacity}")
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank_{rank}.ring"
        self.rank = rank
        self._ring = RingWriter(self.path, rank, num_ranks, framework, now_ns=time.time_ns(), capacity=capacity)
        self._lock = threading.RLock()
        self._only, self._marker, self._shared, self._capacity = only, marker, shared, capacity
        self._groups: dict[str, tuple[int, str]] = {}
        self._counts: dict[tuple[str, str, int | None, int], int] = {}
        self._digests: dict[str, SequenceDigest | None] = {}
        self._pending: dict[int, tuple[str, bool]] = {}
        """By number, the backend, and True if the call blocks its caller."""
        self._on_device: deque[tuple[int, IsDone]] = deque()
        self._next_seq = 0
        self._marks: list[tuple[int, int, int]] = []
        self._positions: dict[tuple[Any, int], int] = {}
        self._is_library: dict[Any, bool] = {}
        self._prefix = str(Path.cwd()) + os.sep
        self._has_raised = False
        self._stop = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._beat, name="pipeproof-watch", daemon=True)

    def start(self) -> None:
        """Start the heartbeat."""
        self._thread.start()

    @contextmanager
    def mark(self, *, stage: int, micro_batch: int, kind: Literal["F", "B"]) -> Iterator[None]:
        """Mark the messages that are sent and received inside with their stage, micro-batch and direction.

        Raises:
            ValueError: a number is negative, or the kind is unknown.
        """
        if stage < 0 or micro_batch < 0 or kind not in _KINDS:
            raise ValueError(f"a mark has a stage, a micro-batch and F or B, not {stage}, {micro_batch}, {kind!r}")
        self._marks.append((stage, micro_batch, _KINDS[kind]))
        try:
            yield
        finally:
            self._marks.pop()

    def write(self, event: str, **values: Any) -> None:
        """Do nothing: a ring has operations only."""

    def group(self, name: str, ranks: Sequence[int], backend: str, about: str = "") -> None:
        """Write a group before its first call; later calls do nothing."""
        if name not in self._groups:
            text = group_text(RingGroup(name, tuple(ranks), backend, about))
            self._groups[name] = self._ring.intern(text), backend
            self._digests[name] = self._ring.add_group(text)

    def call(self, call: Call, mark: dict[str, Any] | None = None) -> int:
        """Write that an operation is about to be issued, and return its number; -1 if its group is not recorded."""
        first = next(iter((*call.inputs, *call.outputs)), None)
        dtype, shape = ("", ()) if first is None else (first.dtype, first.shape)
        num_inputs, num_outputs = (sum(tensor.numel for tensor in each) for each in (call.inputs, call.outputs))
        return self.issue(
            call.op, call.group, call.peer, call.tag, dtype, shape, num_inputs, num_outputs, mark, blocks=call.blocks
        )  # fmt: skip

    def issue(
        self, op: str, group: str, peer: int | None, tag: int, dtype: str, shape: tuple[int, ...], num_inputs: int,
        num_outputs: int, mark: dict[str, Any] | None = None, *, blocks: bool = False,
    ) -> int:  # fmt: skip
        """Write an operation of a known group; the arguments are the fields of a record."""
        if self._only is not None and group not in self._only:
            return -1
        key = (group, op, peer, tag) if op in _MESSAGES else (group, "", None, 0)
        marked = self._marks[-1] if self._marks else _NO_MARK
        if mark is not None:
            kind = _KINDS.get(mark.get("kind", ""), 0)
            marked = mark.get("stage", -1), mark.get("micro_batch", -1), kind
        plan_op, step = ("", -1) if mark is None else (mark.get("plan_op", ""), mark.get("step", -1))
        position = self._position()
        ring = self._ring
        text, backend = self._groups[group]
        with self._lock:
            seq = self._next_seq
            self._next_seq = seq + 1
            number = self._counts.get(key, 0)
            self._counts[key] = number + 1
            self._pending[seq] = (backend, blocks)
            batch = self._batch
            if batch is not None:
                batch.append(seq)
            ring.issue(
                seq, OP_NUMBERS[op], text, number, peer, tag, None if batch is None else self._next_batch,
                ring.intern(dtype), shape, num_inputs, num_outputs, position, marked, time.time_ns(),
                ring.intern(plan_op), step,
            )  # fmt: skip
            digest = self._digests[group]
            if digest is not None and op not in _MESSAGES:
                digest.add(op, num_inputs, num_outputs, dtype)
                ring.digest(digest)
        return seq

    def enter(self, plan_op: str, step: int, stage: int, micro_batch: int) -> None:
        """Write the plan's operation that the rank executes now; empty if there is none."""
        self._ring.enter(plan_op.encode(), step, stage, micro_batch, time.time_ns())

    def issued(self, seq: int) -> None:
        """Write that a call has returned."""
        pending = self._pending.get(seq)
        if pending is not None and not pending[1]:
            self._ring.launched(seq)

    def waits(self, seqs: Sequence[int]) -> None:
        """Write that the host begins to wait for operations, or sees that they have ended."""
        now_ns = time.time_ns()
        for seq in seqs:
            if seq in self._pending:
                self._ring.waited(seq, now_ns)

    def done(self, seqs: Sequence[int], source: int | None = None) -> None:
        """Write that the host has passed the operations; on a device they are done when its stream reaches them."""
        now_ns = time.time_ns()
        is_done: IsDone | None = None
        for seq in seqs:
            pending = self._pending.pop(seq, None)
            if pending is None:
                continue
            if is_done is None and self._marker is not None:
                is_done = self._marker(pending[0])
            if is_done is None:
                self._ring.finished(seq, OpState.DONE, now_ns)
            else:
                self._ring.finished(seq, OpState.QUEUED, now_ns)
                self._on_device.append((seq, is_done))

    def is_pending(self, seq: int) -> bool:
        """True if nothing has waited for an operation yet."""
        return seq in self._pending

    def blocks(self, seq: int) -> bool:
        """True if an operation that is not done blocks its caller."""
        return seq in self._pending and self._pending[seq][1]

    def failed(self, seqs: Sequence[int], error: BaseException) -> None:
        """Write that a call or a wait raised an error."""
        now_ns = time.time_ns()
        for seq in seqs:
            if self._pending.pop(seq, None) is not None:
                self._ring.finished(seq, OpState.FAILED, now_ns)

    def unread(self, method: str, error: Exception) -> None:
        """Do nothing: the call is not in the ring."""

    def close(self, error: BaseException | None) -> None:
        """Write the end of the program, with the error that it raised, and stop the heartbeat."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        if error is None and not self._has_raised:
            self._ring.end(End.ENDED, "", time.time_ns())
        elif error is not None and not self._has_raised:
            self.raised(error)
        self._ring.pulse(time.time_ns(), time.process_time_ns())

    def raised(self, error: BaseException) -> None:
        """Write an error that ends the program, while threads of the program may still keep the process alive."""
        self._has_raised = True
        text = f"{type(error).__name__}: {error}{_raised_at(error.__traceback__)}"
        self._ring.end(End.RAISED, text, time.time_ns())

    def _beat(self) -> None:
        idle_since_ns, num_events = time.time_ns(), -1
        lines: tuple[str, ...] = ()
        while not self._stop.wait(HEARTBEAT_S):
            now_ns = time.time_ns()
            self._note_done(now_ns)
            self._ring.pulse(now_ns, time.process_time_ns())
            if self._ring.num_events != num_events:
                if lines:
                    self._ring.stack((), 0)
                num_events, lines, idle_since_ns = self._ring.num_events, (), now_ns
            elif now_ns - idle_since_ns > _IDLE_BEFORE_STACK_S * 1e9:
                now_at = self._stack()
                if now_at != lines:
                    self._ring.stack(now_at, now_ns if lines else idle_since_ns)
                    lines = now_at
            if self._shared:
                self._ring.sync()
        self._note_done(time.time_ns())  # otherwise a program that has ended would seem to wait for its device

    def _note_done(self, now_ns: int) -> None:
        """Write the ends of operations that the device has finished."""
        while self._on_device and self._on_device[0][1]():
            seq, _ = self._on_device.popleft()
            if seq >= self._next_seq - self._capacity:  # otherwise a later operation has overwritten its record
                self._ring.finished(seq, OpState.DONE, now_ns)

    def _stack(self) -> tuple[str, ...]:
        """Frames of the main thread, innermost first, as ``file:line function``; a ``*`` marks the program's own."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001 - documented, with its underscore
        lines: list[str] = []
        while frame is not None and len(lines) < _MAX_FRAMES:
            own = "" if self._in_library(frame) else "*"
            code = frame.f_code
            lines.append(f"{own}{code.co_filename.removeprefix(self._prefix)}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        return tuple(lines)

    def _in_library(self, frame: FrameType) -> bool:
        cached = self._is_library.get(frame.f_code)
        if cached is None:
            cached = self._is_library[frame.f_code] = is_library(frame)
        return cached

    def _position(self) -> int:
        """Offset of ``file:line`` of the innermost frame outside of libraries."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - documented, with its underscore
        while frame is not None and self._in_library(frame):
            frame = frame.f_back
        if frame is None:
            return 0
        key = frame.f_code, frame.f_lineno
        offset = self._positions.get(key)
        if offset is None:
            text = f"{frame.f_code.co_filename.removeprefix(self._prefix)}:{frame.f_lineno}"
            offset = self._positions[key] = self._ring.intern(text)
        return offset


def _raised_at(traceback: TracebackType | None) -> str:
    """Return `` at file:line`` of the innermost frame of a traceback that is outside of libraries."""
    at = ""
    while traceback is not None:
        if not is_library(traceback.tb_frame):
            file = traceback.tb_frame.f_code.co_filename.removeprefix(str(Path.cwd()) + os.sep)
            at = f" at {file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return at


_active: list[RingRecorder] = []
"""Recorder of this process while it is watched."""


def active_recorder() -> RingRecorder | None:
    """Return the recorder of this process; None if it is not watched."""
    return _active[0] if _active else None


class Watch:
    """A watched rank; the end of the ``with`` block, `close`, or the end of the program ends the watch.

    Without a block, no reference is needed: the watch lives until the program ends.
    """

    def __init__(self, recorder: RingRecorder, calls: GroupCalls) -> None:
        self._recorder = recorder
        self._stack = ExitStack()
        self._stack.enter_context(calls.recording())
        self._pid = os.getpid()
        self._hook = sys.excepthook
        sys.excepthook = self._raised
        atexit.register(self.close)
        recorder.start()
        _active.insert(0, recorder)

    @property
    def path(self) -> Path:
        """File of the ring of this rank."""
        return self._recorder.path

    def mark(self, *, stage: int, micro_batch: int, kind: Literal["F", "B"]) -> Any:
        """Mark the messages of a block with their meaning: ``with watch.mark(stage=0, micro_batch=3, kind="F"):``.

        Raises:
            ValueError: a number is negative, or the kind is unknown.
        """
        return self._recorder.mark(stage=stage, micro_batch=micro_batch, kind=kind)

    def close(self) -> None:
        """End the watch: the ring shows that the program has ended, and calls are no longer recorded."""
        if os.getpid() == self._pid:  # a forked worker shares the ring
            self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if self._recorder in _active:
            _active.remove(self._recorder)
        atexit.unregister(self.close)
        if sys.excepthook == self._raised:
            sys.excepthook = self._hook

    def _raised(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if os.getpid() == self._pid:
            self._recorder.raised(error)
        self._hook(kind, error, traceback)


def ring_directory(directory: str | Path | None) -> Path:
    """Return the directory of the rings: the argument, else ``PIPEPROOF_WATCH``, else ``pipeproof-rings``."""
    return Path(directory or os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
