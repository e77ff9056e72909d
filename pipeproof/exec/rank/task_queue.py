"""Transfers that a thread executes in their order, where the backend's own calls block the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from pipeproof.exec.rank.framework_protocol import Tensor


class TransfersEnded(RuntimeError):  # noqa: N818 - no error by itself: another rank has failed
    """The pipeline gave up its transfers, or a peer has gone."""


@dataclass(slots=True, eq=False)
class Task:
    """Work of another thread on a tensor, and its times and outcome once it is done; a ``Transfer``.

    It begins when the tasks ``after`` are done.
    """

    buffer: Tensor
    act: Callable[[], None]
    after: Sequence[Task] = ()
    posted_ns: int = field(default_factory=time.monotonic_ns)
    start_ns: int = 0
    end_ns: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        """Block until the work is done; raise its error."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class TaskQueue:
    """A FIFO of tasks and the thread that executes them."""

    def __init__(self, name: str) -> None:
        self._fifo: SimpleQueue[Task | None] = SimpleQueue()
        self._open: list[Task] = []
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(
        self, buffer: Tensor, act: Callable[[], None], after: Sequence[Task] = (), *, begun_ns: int | None = None
    ) -> Task:
        """Queue work on a tensor. ``begun_ns`` is when it was begun elsewhere, if ``act`` only waits for its end.

        Raises:
            TransfersEnded: after ``abort``.
        """
        task = Task(buffer, act, after) if begun_ns is None else Task(buffer, act, after, begun_ns, begun_ns)
        with self._lock:
            if self._has_ended:
                raise TransfersEnded("the pipeline has failed")
            self._open.append(task)
        self._fifo.put(task)
        return task

    def abort(self) -> None:
        """End all tasks with an error, and accept no more. A task that runs is left to its thread."""
        with self._lock:
            self._has_ended = True
            tasks, self._open = self._open, []
        for task in tasks:
            task.error = TransfersEnded("the pipeline has failed")
            task.done.set()

    def close(self) -> None:
        """End the thread once all tasks are done."""
        self._fifo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended and (task := self._fifo.get()) is not None:
            for earlier in task.after:
                earlier.done.wait()
            task.after = ()
            task.start_ns = task.start_ns or time.monotonic_ns()
            error: Exception | None = None
            try:
                task.act()
            except Exception as raised:  # noqa: BLE001 - the wait for the task raises it
                error = raised
            task.end_ns = time.monotonic_ns()
            with self._lock:
                if task not in self._open:  # ended meanwhile
                    return
                self._open.remove(task)
            task.error = error
            task.done.set()
