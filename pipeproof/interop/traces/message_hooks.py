"""Hooks of the recorder: functions that are replaced while it records, and marks of prepared messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeproof.interop.traces.recorder import Call

Wrapping = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function, and returns its replacement."""


class Patches:
    """Replaces attributes; ``undo`` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, wrapping: Wrapping) -> bool:
        """Replace a function by ``wrapping(function)``; return False if the owner has none of that name."""
        own = vars(owner).get(name)
        function = getattr(owner, name, None)
        if function is None:
            return False
        setattr(owner, name, wrapping(function))
        self._undo.append((lambda: setattr(owner, name, own)) if own is not None else (lambda: delattr(owner, name)))
        return True

    def undo(self) -> None:
        """Restore everything."""
        while self._undo:
            self._undo.pop()()


class Marks:
    """Marks of prepared messages by the address of their tensor, which is kept alive until the message is issued."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[bool, int], tuple[Any, dict[str, Any]]] = {}

    def add(self, tensor: Any, address: int, mark: dict[str, Any], *, is_send: bool) -> None:
        """Store the mark of the next message of a tensor."""
        self._by_address[is_send, address] = tensor, mark

    def of(self, call: Call) -> dict[str, Any] | None:
        """Return the mark of a message, once; None if it was not prepared."""
        if call.op not in ("send", "recv"):
            return None
        is_send = call.op == "send"
        tensors = call.inputs if is_send else call.outputs
        entry = self._by_address.pop((is_send, tensors[0].start), None) if tensors else None
        return None if entry is None else entry[1]
