"""A key-value store of texts, and long texts as several values of bounded size.

Everything that comes out of a store is text that its reader parses as JSON and checks: nothing is unpickled or run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

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
        """Add to a counter that all ranks share, and return its sum; a counter is no value of ``get`` or ``has``."""

    def remove(self, key: str) -> None:
        """Remove a value, so that ``get`` waits for the next; one process reads and removes a key."""

    def part(self, prefix: str) -> Store:
        """The same store with a prefix of all keys."""

    def of_thread(self) -> Store:
        """The same store for another thread, whose calls do not wait for those of this one."""


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
        ValueError: it is no JSON value of ``put_json``.
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
    """Remove a value of ``put_json`` of one part: its first part is what readers wait for."""
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
