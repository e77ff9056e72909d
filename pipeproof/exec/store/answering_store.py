"""A store whose calls end, also where the process that serves it is stopped or its host is not reachable.

The clients of both frameworks wait for an answer without a limit (PyTorch 2.13, Paddle 3). A stopped process and a host
without power neither close a connection nor reset it. So the calls are made in a thread, which may wait for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pipeproof.exec.store.store import Store

_Result = TypeVar("_Result")
_Call = tuple[Callable[[], Any], "Future[Any]"]
_END_S = 10.0
"""Longest wait for a call that another thread has begun."""


class AnsweringStore:
    """A ``Store`` that counts as gone if it does not answer a call within ``answer_s`` seconds.

    Its calls are made one after the other. ``part`` shares the thread.
    """

    def __init__(self, store: Store, answer_s: float, caller: _Caller | None = None) -> None:
        self._store, self._answer_s, self._caller = store, answer_s, caller or _Caller()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._answer(lambda: self._store.set(key, value))

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for a value.

        Raises:
            TimeoutError: nobody wrote it in time.
        """
        return self._answer(lambda: self._store.get(key, timeout_s), timeout_s)

    def has(self, key: str) -> bool:
        """Return True if a value was written."""
        return self._answer(lambda: self._store.has(key))

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its sum."""
        return self._answer(lambda: self._store.add(key, amount))

    def remove(self, key: str) -> None:
        """Remove a value, so that ``get`` waits for the next."""
        self._answer(lambda: self._store.remove(key))

    def part(self, prefix: str) -> AnsweringStore:
        """The same store with a prefix of all keys."""
        return AnsweringStore(self._store.part(prefix), self._answer_s, self._caller)

    def of_thread(self) -> Store:
        """The store itself for another thread: its calls have no limit, and take no time for a change of threads."""
        return self._answer(self._store.of_thread)

    def _answer(self, work: Callable[[], _Result], wait_s: float = 0.0) -> _Result:
        return self._caller.call(work, self._answer_s + wait_s)


class _Caller:
    """A thread that makes calls, until nobody has this object any more, or the process ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lost = threading.Event()
        left: SimpleQueue[None] = SimpleQueue()
        thread = threading.Thread(target=_make_calls, args=(self._calls, left), name="store", daemon=True)
        thread.start()
        weakref.finalize(self, _end_calls, self._calls, self._lost, thread, left)

    def call(self, work: Callable[[], _Result], limit_s: float) -> _Result:
        """Return the result of a call, or raise its error."""
        future: Future[_Result] = Future()
        if not self._lost.is_set():
            self._calls.put((work, future))
            if not wait([future], limit_s).done:
                self._lost.set()
        if self._lost.is_set():
            raise ConnectionError(f"no answer within {limit_s:g} s")
        return future.result()


def _make_calls(calls: SimpleQueue[_Call | None], left: SimpleQueue[None]) -> None:
    while (call := calls.get()) is not None:
        work, future = call
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - of the caller, who raises it
            future.set_exception(error)
        del call, work, future  # they keep the store alive
    left.put(None)


def _end_calls(
    calls: SimpleQueue[_Call | None], lost: threading.Event, thread: threading.Thread, left: SimpleQueue[None]
) -> None:
    """End the thread: one that is in C++ when the interpreter ends would abort the process.

    It may be called in a garbage collection, where a join could wait for a lock that this thread holds.
    """
    calls.put(None)
    if not lost.is_set() and thread is not threading.current_thread():
        with suppress(Empty):
            left.get(timeout=_END_S)
