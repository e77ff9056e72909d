"""Attributes that are replaced for a while, and put back whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Wrapping = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a function the one that stands in its place."""


class Patches:
    """Replaces attributes; ``undo`` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, wrapping: Wrapping) -> bool:
        """Put ``wrapping(function)`` in the place of a function; False where the owner has none of that name."""
        own = vars(owner).get(name)
        found = getattr(owner, name, None)
        if found is None:
            return False
        setattr(owner, name, wrapping(found))
        self._undo.append((lambda: setattr(owner, name, own)) if own is not None else (lambda: delattr(owner, name)))
        return True

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
