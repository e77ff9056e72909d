"""Overlap points of a script's modules: here the two computations of an overlapped pair alternate.

On a GPU both computations launch on the stream of the step, and the collectives of the script run on the streams of
their groups. The forward runs in the rank's thread. Autograd runs the backward in its own thread for the GPU, which is
blocked while the forward has control; a ``wait`` there makes the stream of the step wait, as it does in the forward.
So the work that one half launches between ``async_op=True`` and ``wait`` of the other runs next to the collective, in a
captured step too.

A recomputed forward runs inside of the backward with random numbers of its own. So each half has its own state of
PyTorch's default generators; the forward has the script's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from pipeproof.exec.rank.overlapped_pair import Alternation


class Work(Protocol):
    """A collective of ``torch.distributed`` with ``async_op=True``, or anything else that a half waits for."""

    def wait(self) -> object:
        """Block the host until it has ended; on a GPU block the current stream instead."""


def overlap_point(work: Work) -> None:
    """Let the other micro-batch of an overlapped pair run up to its next overlap point, then wait for a collective.

    Outside of a pair it only waits. Modules call it in their forward, and in the backward of their autograd functions.
    """
    if _running:
        _running[-1].pass_control()
    work.wait()


@contextmanager
def at_overlap_points(alternation: Alternation) -> Iterator[None]:
    """Within the context ``overlap_point`` passes control by ``alternation``."""
    pair = _Pair(alternation)
    _running.append(pair)
    try:
        yield
    finally:
        _running.remove(pair)
        pair.end()


class _Pair:
    """A pair that runs, and the state of the generators that its forward has while the backward runs."""

    def __init__(self, alternation: Alternation) -> None:
        self._alternation, self._of_forward = alternation, _Generators()

    def pass_control(self) -> None:
        """Let the other half run, with its own state of the generators."""
        own = _Generators()
        is_backward = self._alternation.is_backward
        if is_backward:
            self._of_forward.restore()
        self._alternation.pass_control()
        if is_backward:
            self._of_forward = _Generators()
        own.restore()

    def end(self) -> None:
        """Continue with the state of the forward, after which the backward may have run."""
        if self._alternation.has_forward_ended_first:
            self._of_forward.restore()


class _Generators:
    """The state of PyTorch's default generators: of the CPU, and of the GPU where it is not captured.

    Under capture the state of a GPU cannot be read, and a recomputed forward that would need it cannot be captured.
    """

    def __init__(self) -> None:
        is_readable = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        self._of_cpu = torch.get_rng_state()
        self._of_gpu = torch.cuda.get_rng_state() if is_readable else None

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._of_cpu)
        if self._of_gpu is not None:
            torch.cuda.set_rng_state(self._of_gpu)


_running: list[_Pair] = []
"""The pair that runs in this process, if any. Of its threads exactly one runs at any time."""
