"""Collectives of PyTorch that have begun, and the combination of their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Begun:
    """A collective that has begun; a ``BegunCollective``. It keeps its tensors until it is dropped."""

    __slots__ = ("_join", "_kept", "_works")

    def __init__(self, works: Sequence[Any], join: Callable[[], torch.Tensor], *kept: torch.Tensor) -> None:
        self._works, self._join, self._kept = works, join, kept

    def block(self) -> None:
        """Block the host until it has ended; on a GPU block the current stream instead."""
        for work in self._works:
            work.wait()

    def wait(self) -> torch.Tensor:
        """Block, and return the result."""
        self.block()
        return self._join()


def combined(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the ``sum`` or ``max`` of tensors, taken in their order."""
    return functools.reduce({"sum": torch.add, "max": torch.maximum}[reduction], parts)
