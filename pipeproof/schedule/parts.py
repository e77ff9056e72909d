"""What rows of the op table speak of: tensors, channels, groups, buffers; and why one operation follows another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from pipeproof.schedule.columns import IntColumn


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as one rank holds it: what crosses a stage boundary, on one of its sides.

    ``shape`` is local, in elements; ``placement`` is over the ``tp`` axis in
    its text form; ``dims`` names the dims (``sbh``). ``member`` tells apart
    the tensors that cross a boundary together (``mask`` beside ``hidden``).
    ``strides`` are in elements; None is C order without holes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    dims: str
    member: str = ""
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the local tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Channel:
    """A FIFO from one rank to another on one communicator; no tags, the k-th send meets the k-th recv."""

    communicator: str
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.communicator} {self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one communicator along one mesh axis, in group order.

    Where a rank of the graph stands for many that run the same program, each
    of ``ranks`` stands for ``copies`` members of the group.
    """

    axis: str
    ranks: tuple[int, ...]
    copies: int = 1

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks) * self.copies


@dataclass(frozen=True, eq=False)
class Accesses:
    """What rows say of buffers, one entry per name: op id, index into ``OpGraph.buffers``, READ | WRITE | FREE."""

    op: IntColumn
    buffer: IntColumn
    mode: IntColumn


class EdgeKind(StrEnum):
    """Why one operation comes after another."""

    HOST = "host"
    """Next on the rank's compute queue."""
    POST = "post"
    """A transfer is posted after the compute-queue operation before it."""
    QUEUE = "queue"
    """Next on the same transfer queue, or on the same queue of another name."""
    MATCH = "match"
    """The k-th send of a channel to its k-th recv."""
    WAIT = "wait"
    """An operation to the wait for it."""
    DATA = "data"
    """Producer to consumer of a tensor within a rank."""
