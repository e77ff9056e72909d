"""A key-value store of texts, and long texts as several values of bounded size.

Every value from a store is text that its reader parses as JSON and checks: nothing is unpickled or run.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from pipeproof.diagnostics.finding import Finding, Location, Severity
from pipeproof.foreign_text import ForeignTextError, decode_json

MOST_BYTES = 2**16
"""Largest value, in bytes."""
_MOST_PARTS = 2**10
"""Most values of one long text: 64 MiB."""


class Store(Protocol):
    """A store that all ranks share.

    Each call raises ConnectionError if the process that holds the store has ended.
    """

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for a value.

        Raises:
            TimeoutError: nobody wrote it in time.
        """

    def has(self, key: str) -> bool:
        """Return True if a value was written; does not wait."""

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its sum; ``get`` and ``has`` do not see counters."""

    def remove(self, key: str) -> None:
        """Remove a value: ``get`` then waits for the next; one process reads and removes a key."""

    def part(self, prefix: str) -> Store:
        """The same store with a prefix of all keys."""

    def of_thread(self) -> Store:
        """The same store for another thread, whose calls do not wait for this thread's calls."""


def put_json(store: Store, key: str, content: Any) -> None:
    """Write a JSON value of any length for ``get_json``; its first part comes last.

    Raises:
        ValueError: it is longer than 64 MiB.
    """
    data = json.dumps(content, separators=(",", ":"))  # ASCII: a character is a byte
    parts = [data[start : start + MOST_BYTES] for start in range(0, len(data), MOST_BYTES)]
    if len(parts) > _MOST_PARTS:
        raise ValueError(f"{key} has {len(data)} bytes, and at most {_MOST_PARTS * MOST_BYTES} go through the store")
    for number, part in reversed([*enumerate(parts)]):
        store.set(f"{key}/{number}", part if number else f"{len(parts)}\n{part}")


def get_json(store: Store, key: str, timeout_s: float) -> Any:
    """Wait for the value of ``put_json``.

    Raises:
        TimeoutError: nobody wrote it in time.
        ValueError: it is not a JSON value of ``put_json``.
    """
    count, newline, first = _bounded(store.get(f"{key}/0", timeout_s), key).partition("\n")
    if not newline or not count.isdecimal() or not 0 < int(count) <= _MOST_PARTS:
        raise ValueError(f"{key} in the store does not begin with its number of parts")
    rest = [_bounded(store.get(f"{key}/{number}", timeout_s), key) for number in range(1, int(count))]
    try:
        return decode_json("".join([first, *rest]))
    except ForeignTextError as error:
        raise ForeignTextError(f"{key} in the store: {error}") from error


def has_json(store: Store, key: str) -> bool:
    """Return True if ``put_json`` was called for the key; does not wait."""
    return store.has(f"{key}/0")


def remove_json(store: Store, key: str) -> None:
    """Remove a value of ``put_json`` of one part: readers wait for the first part."""
    store.remove(f"{key}/0")


def _bounded(value: str, key: str) -> str:
    if len(value) > MOST_BYTES + len(f"{_MOST_PARTS}\n"):
        raise ValueError(f"{key} in the store has a part of {len(value)} characters; at most {MOST_BYTES} are read")
    return value


def finding_content(finding: Finding) -> dict[str, Any]:
    """JSON of a finding for other ranks: all but its witness."""
    return asdict(replace(finding, witness=None))


def finding_of(content: Mapping[str, Any]) -> Finding:
    """The finding of ``finding_content``."""
    at = content["location"]
    location = None if at is None else Location(**at)
    return Finding(content["code"], Severity(content["severity"]), content["message"], location, content["help"])


# --- A store whose calls end, even if the process that serves it is stopped or its host is not reachable ---
# The clients of both frameworks wait for an answer without a limit (PyTorch 2.13, Paddle 3). A stopped process and a
# host without power neither close a connection nor reset it. So calls are made in a thread, which may wait for ever.


_Result = TypeVar("_Result")
_Call = tuple[Callable[[], Any], "Future[Any]"]
_END_S = 10.0
"""Longest wait for a call that another thread has begun."""


class TimeoutStore:
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
        """Remove a value: ``get`` then waits for the next."""
        self._answer(lambda: self._store.remove(key))

    def part(self, prefix: str) -> TimeoutStore:
        """The same store with a prefix of all keys."""
        return TimeoutStore(self._store.part(prefix), self._answer_s, self._caller)

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
