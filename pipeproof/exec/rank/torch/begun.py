"""Collectives of PyTorch that have begun, and the combination of their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeproof.exec.rank.framework_protocol import AsyncCollectives


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


class WaitedCollectives:
    """Collectives over the group ``ranks`` as ``begin`` has them, each waited for at once."""

    def __init__(self, ranks: tuple[int, ...], begin: AsyncCollectives) -> None:
        self.ranks, self._begin = ranks, begin

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensors of all members, joined along ``dim`` in group order; shapes and types must be equal."""
        return self._begin.all_gather(tensor, dim).wait()

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this member's part along ``dim`` of the sum over all members; added in group order, NCCL excepted."""
        return self._begin.reduce_scatter(tensor, dim).wait()

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send ``send[m]`` rows to each member m; return ``receive[m]`` rows of each, joined in group order."""
        return self._begin.exchange(rows, send, receive).wait()


def combined(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the ``sum`` or ``max`` of tensors, taken in their order."""
    return functools.reduce({"sum": torch.add, "max": torch.maximum}[reduction], parts)
