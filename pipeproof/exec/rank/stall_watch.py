"""Thread of each rank that reports a step without progress or the end of its launcher, and ends its rank.

It also ends its rank after another rank's failure.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, ranks_text
from pipeproof.exec.rank.job_files import end_process
from pipeproof.exec.store.agreement import STORE_LOST, Agreement
from pipeproof.exec.store.rendezvous import wait_until
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.op_table import OpGraph

STALLED = "the pipeline made no progress"
"""Beginning of the report of a stall."""
ANSWER_S = 5.0
"""Time in which ranks answer a stalled one, and in which a rank may still end by itself after a failure."""
OUTSIDE_S = 10.0
"""Time in which a rank may come back to ``step``, which raises, after a failure."""
_LONGEST_POLL_S = 1.0
_DEVICE_POLL_S = 0.01
_NOTICE_S = 3 * _LONGEST_POLL_S
"""Longest time in which rank 0, with which the store may end, waits for the watches of all ranks to see a failure."""
_LEAVE_S = 2.0
_ABORT_S = 2.0
"""Time for ending the transfers: NCCL's call may itself wait, like the device."""
_OF_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "PADDLE_LOCAL_SIZE")
"""Variables of torchrun and of Paddle's launcher, which are alive as long as their ranks. A shell may end before."""


class StallWatch:
    """The watch of one rank. ``abort`` ends transfers.

    ``describe`` is a ``WeakMethod``, because the watch must not keep the pipeline alive. It returns a function from an
    operation's number to its facts, or None once the pipeline is gone. ``read_device`` returns the last step and
    operation that a GPU reached, for ranks whose host runs ahead. ``release`` is called when the watch ends: by
    ``close``, at the end of the process, or because the pipeline is gone.
    """

    def __init__(
        self,
        agreement: Agreement,
        timeout_s: float,
        describe: Callable[[], Callable[[int], Mapping[str, Any]] | None],
        abort: Callable[[], None],
        read_device: Callable[[], tuple[int, int]] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._agreement, self._timeout_s, self._describe, self._abort = agreement, timeout_s, describe, abort
        self._read_device, self._release, self._main = read_device, release, threading.get_ident()
        self._launcher = os.getppid() if any(os.environ.get(name) for name in _OF_LAUNCHERS) else None
        self._at: tuple[int, int] | None = None
        self._on_device: tuple[int, int] | None = None
        """The last operation whose beginning the device will report; reset by an operation that it will not report."""
        self._call = ""
        self._since, self._device_at = time.monotonic(), (-1, -1)
        self._failure: str | None = None
        self._noticing = threading.Lock()
        self._has_noticed = False
        self._ended = threading.Event()
        self._left: SimpleQueue[None] = SimpleQueue()
        """Gets an entry when the thread ends: ``close`` may run in a garbage collection, where a join can deadlock."""
        self.is_closed = self._leaves = False
        self._thread = threading.Thread(target=self._run, name="pipeproof stall watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is in C++ when the interpreter ends would abort the process

    @property
    def failure(self) -> str | None:
        """The failure that a rank has reported, once this rank has seen it."""
        return self._failure

    def enter(self, step: int, op_id: int, *, on_device: bool = False) -> None:
        """Note that the host begins an operation; with ``on_device`` the device reports it when it gets there."""
        self._at, self._since, self._main = (step, op_id), time.monotonic(), threading.get_ident()
        self._on_device = self._at if on_device else None

    def leave(self) -> None:
        """Note that the host has left the step; a device may still be in it."""
        self._at, self._call, self._since = None, "", time.monotonic()

    @property
    def is_calling(self) -> bool:
        """True in a call outside of the plan."""
        return bool(self._call)

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Watch a call outside of the plan that waits for other ranks, such as ``clip_grad_norm_``."""
        self.begin_call(call)
        try:
            yield
        finally:
            self.leave()

    def begin_call(self, call: str) -> None:
        """Begin ``calling``, which ``leave`` ends."""
        self._call = call
        self.enter(-1, -1)

    def close(self) -> None:
        """End the thread after the device has caught up with its host: it may wait for another rank for ever."""
        atexit.unregister(self.close)
        if self.is_closed:
            return
        self.is_closed = True
        if threading.current_thread() is self._thread:  # in a garbage collection
            self._leaves = True
            return
        while self._is_behind() and self._left.empty() and not self._ended.is_set():
            time.sleep(_DEVICE_POLL_S)
        self._ended.set()
        with contextlib.suppress(Empty):
            self._left.get(timeout=_LEAVE_S)
        self._release()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._left.put(None)

    def _watch(self) -> None:
        poll_s = min(_LONGEST_POLL_S, self._timeout_s / 10)
        answered, has_store = False, True
        while not self._ended.wait(poll_s):
            if self._leaves or (self._describe() is None and not self._is_behind()):  # nobody has the pipeline any more
                self.is_closed = True
                atexit.unregister(self.close)
                self._release()
                return
            try:
                if has_store:
                    self._failure = self._agreement.failure()
                    if self._failure is not None:
                        self._end_soon()
                        return
                    if not answered and self._agreement.has("stalled"):
                        self._agreement.publish(f"state/{self._agreement.rank}", self._state())
                        answered = True
            except Exception:  # noqa: BLE001 - the job may be ending well: only a step without progress is reported
                has_store = False
            if self._launcher not in (None, os.getppid()):
                text = f"rank {self._agreement.rank}: its launcher on {socket.gethostname()} has ended before it"
                self._fail(text, text)
            elif self._is_stalled():
                self._report(has_store=has_store)
            else:
                continue
            self._end_soon()
            return

    def _is_stalled(self) -> bool:
        if self._read_device is not None:
            at = self._read_device()
            if at != self._device_at:
                self._device_at, self._since = at, time.monotonic()
        return self._is_busy() and time.monotonic() - self._since > self._timeout_s

    def _is_busy(self) -> bool:
        """True while the host is in a step, or the device behind it."""
        return self._at is not None or self._is_behind()

    def _is_behind(self) -> bool:
        """True while a device has not reached the host's last operation."""
        return self._on_device is not None and self._read_device is not None and self._read_device() != self._on_device

    def state(self, *, with_line: bool = True) -> str:
        """Return the activity of the rank: the operation and the peer that it waits for, and the line of the script."""
        return self._state(with_line=with_line)[0]

    def _state(self, *, with_line: bool = True) -> tuple[str, int]:
        """Return the activity of the rank, and the peer that it waits for (-1: no peer)."""
        line = _user_line(self._main) if with_line else ""
        where = f", at {line}" if line else ""
        if self._call:
            return f"is in {self._call}{where}", -1
        at = self._at
        if self._on_device is not None and self._is_busy() and self._device_at[0] == self._on_device[0]:
            at = self._device_at  # the host is ahead
        describe = self._describe()
        if at is None or describe is None:
            return f"is outside of step(){where}", -1
        facts = describe(at[1])
        if facts["peer"] >= 0:
            return f"waits in step {at[0]} for rank {facts['peer']}: {facts['op']}{where}", facts["peer"]
        of = f"(stage {facts['stage']}, micro-batch {facts['micro_batch']})"
        return f"is in step {at[0]}, {facts['op']} {of}{where}", -1

    def _report(self, *, has_store: bool) -> None:
        """Collect what every rank is doing, and report it to all."""
        headline = f"{STALLED} for {self._timeout_s:g} s"
        text = own = f"{headline}\n  rank {self._agreement.rank} {self.state()}\n  {STORE_LOST}"
        if has_store:
            with contextlib.suppress(Exception):  # the store has gone
                text = f"{headline}\n{self._states()}"
        self._fail(text, own)

    def _fail(self, text: str, own: str) -> None:
        """Report a failure to all, or keep ``own`` if the store has gone; another rank's report may have been first."""
        try:
            self._agreement.fail(text)
            failure = self._agreement.failure()
        except Exception:  # noqa: BLE001 - the store has gone
            failure = own
        self._failure = failure  # once: the script reads it, and all ranks raise one text

    def _states(self) -> str:
        self._agreement.publish("stalled", self._agreement.rank)
        self._agreement.publish(f"state/{self._agreement.rank}", self._state())
        ranks = range(self._agreement.num_ranks)
        wait_until(
            lambda: all(self._agreement.has(f"state/{rank}") for rank in ranks), min(ANSWER_S, self._timeout_s) + 2
        )
        no_answer = "does not answer: its process has ended or is stopped, or its pipeline is closed", -1
        states = {
            rank: self._agreement.read(f"state/{rank}", "no state")
            if self._agreement.has(f"state/{rank}")
            else no_answer
            for rank in ranks
        }
        graph = WaitGraph(ranks)
        for rank, (text, peer) in states.items():
            if peer >= 0:
                graph.add(rank, peer, Wait(rank, text, f"rank {peer}"))
        lines = [f"rank {rank} {text}" for rank, (text, _) in states.items()]
        lines += [
            f"{ranks_text(end)} wait for each other" if len(end) > 1 else f"the waits end at rank {end[0]}"
            for end in graph.ends(rank for rank in ranks if graph.waits(rank))
        ]
        return "\n".join(f"  {line}" for line in lines)

    def acknowledge(self) -> None:
        """Note that the script has got the failure as an error and may continue.

        Rank 0 first waits until all ranks know of the failure: the store may end with it, and a rank outside of a step
        would then wait for ever.
        """
        self._ended.set()
        self._notice()
        if self._agreement.rank == 0:
            with contextlib.suppress(Exception):  # the store has gone
                wait_until(lambda: self._agreement.num_noticed() >= self._agreement.num_ranks, _NOTICE_S)

    def _notice(self) -> None:
        """Count this rank once among those that know of the failure."""
        with self._noticing:
            if not self._has_noticed:
                self._has_noticed = True
                with contextlib.suppress(Exception):  # the store has gone
                    self._agreement.notice()

    def _end_soon(self) -> None:
        """Wake the main thread by ending its transfers; end the process if the script does not get the failure."""
        self._notice()
        if self._at is not None or self._on_device is None:  # a device's results with lost messages are wrong
            abort = threading.Thread(target=self._abort, name="pipeproof abort", daemon=True)
            abort.start()
            abort.join(_ABORT_S)
        begin = time.monotonic()
        while not self._ended.wait(0.1):
            if time.monotonic() - begin > (ANSWER_S if self._is_busy() else OUTSIDE_S):
                text = f"pipeproof: rank {self._agreement.rank} ends while it {self.state()}: {self._failure}"
                end_process(ExitStatus.WORKER_FAILED, f"{text}\n")


def op_facts(graph: OpGraph, op_id: int) -> Mapping[str, Any]:
    """The operation with its stage, micro-batch and the peer it waits for, as JSON values."""
    op = graph.ops[op_id]
    about = op.target if op.target is not None else op
    waits_for = int(graph.waits_for[op_id])
    peer = int(graph.peer[waits_for if waits_for >= 0 else op_id])
    return {"op": str(op), "stage": about.stage, "micro_batch": about.micro_batch, "peer": peer}


_LIBRARIES = tuple(
    path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name)) is not None
)
_OWN = f"{Path(__file__).parents[2]}{os.sep}"


def _user_line(thread: int) -> str:
    """``file:line`` of the innermost frame of a thread outside of libraries and pipeproof."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to see another thread
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, _OWN, "<frozen")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
