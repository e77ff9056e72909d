"""Seams of a script's modules: places at which the two computations of an overlapped pair pass the turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pipeproof.exec.rank.overlapped_pair import SeamTurns

_running: list[SeamTurns] = []
"""The pair that runs in this process, if any. Of its threads exactly one runs at any time."""


class Work(Protocol):
    """A collective of ``torch.distributed`` that was called with ``async_op=True``."""

    def wait(self) -> object:
        """Block the host until it has ended; on a GPU block the current stream instead."""
        ...


def seam(work: Work) -> None:
    """Let the other micro-batch of an overlapped pair run up to its next seam, then wait for a collective.

    Outside of a pair it only waits. Modules call it in their forward, and in the backward of their autograd functions.
    """
    if _running:
        _running[-1].pass_turn()
    work.wait()


@contextmanager
def at_seams(turns: SeamTurns) -> Iterator[None]:
    """Within the context ``seam`` passes the turn by ``turns``."""
    _running.append(turns)
    try:
        yield
    finally:
        _running.remove(turns)
