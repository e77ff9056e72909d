"""Backends that themselves send and receive parts of a tensor, as Paddle's process groups on NCCL do.

Fleet's ``partial`` transport is made of such calls. Where a backend has none,
the slice is cut out, sent as a tensor, and joined by an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pipeproof.exec.framework import Tensor, Transfer
from pipeproof.schedule.optable import Channel


@dataclass(frozen=True, slots=True)
class Slice:
    """The ``index``-th of ``num_slices`` equal ranges of a contiguous tensor, flattened."""

    whole: Tensor
    num_slices: int
    index: int


@runtime_checkable
class SliceChannels(Protocol):
    """Channels that move slices."""

    def post_slice(self, channel: Channel, part: Slice, after: Sequence[Transfer] = ()) -> Transfer:
        """As ``Channels.post``: the range alone is sent, or received; the transfer's buffer is the slice."""
        ...


@runtime_checkable
class SliceCollectives(Protocol):
    """Collectives that join slices."""

    def gather_slices(self, part: Slice) -> Tensor:
        """The whole tensor, with the range of each member in its place, written where this member's is."""
        ...


def whole_of(buffer: Tensor) -> tuple[Tensor, int]:
    """The tensor that a transfer's buffer is (a part of), and how many such parts it has."""
    return (buffer.whole, buffer.num_slices) if isinstance(buffer, Slice) else (buffer, 1)
