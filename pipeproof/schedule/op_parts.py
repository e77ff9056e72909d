"""Parts of the op table: tensors, channels, groups, buffer accesses, and the kinds of edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import NamedTuple, overload

from pipeproof.schedule.columns import Columns, IntColumn, op_from_columns
from pipeproof.schedule.ops import Op
from pipeproof.specs.axis_layout import dtype_bytes


class BoundaryPosition(NamedTuple):
    """One member of one variant of the edge after stage ``edge``."""

    edge: int
    variant: int
    member: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor whose bytes are in a packed message, as one rank holds it; for the fields see ``TensorSpec``.

    ``index`` is its position among the members of its boundary; it takes no part in equality.
    """

    member: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    dims: str
    index: int = field(default=0, compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the local tensor."""
        return prod(self.shape) * dtype_bytes(self.dtype)


PART_ALIGNMENT = 16
"""The start of each part of a packed message is a multiple of these bytes, for the types on a GPU."""


def part_starts(sizes: Iterable[int]) -> list[int]:
    """Return the first byte of each part of a packed message, from the parts' bytes, and then the message's bytes."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // PART_ALIGNMENT) * PART_ALIGNMENT)
    return starts


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor at a stage boundary, as one rank on one side of the boundary holds it.

    ``shape`` is local, in elements; ``placement`` is over the ``tp`` axis in
    its text form; ``dims`` names the dims (``sbh``). ``member``
    distinguishes the tensors that cross a boundary together (``mask``, ``hidden``).
    ``strides`` are in elements; None is C order without holes. ``position`` is the boundary member that a tensor of
    a lowered plan is; it takes no part in equality. A packed message has ``parts``, and is a vector of bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    dims: str
    member: str = ""
    strides: tuple[int, ...] | None = None
    position: BoundaryPosition | None = field(default=None, compare=False)
    parts: tuple[TensorPart, ...] = ()

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

    If a rank of the graph represents many that run the same program, each of ``ranks`` represents ``copies`` members of
    the group.
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
    """Accesses of rows to buffers, one entry per name: op id, index into ``OpGraph.buffers``, READ | WRITE | FREE."""

    op: IntColumn
    buffer: IntColumn
    mode: IntColumn


class EdgeKind(StrEnum):
    """The reason why one operation comes after another."""

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


class OpsById(Sequence[Op]):
    """The operations by id, each made at its first use."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._made: dict[int, Op] = dict(columns.unusual)

    def __len__(self) -> int:
        return self._columns.num_rows

    @overload
    def __getitem__(self, op_id: int) -> Op: ...
    @overload
    def __getitem__(self, op_id: slice) -> list[Op]: ...
    def __getitem__(self, op_id: int | slice) -> Op | list[Op]:
        if isinstance(op_id, slice):
            return [self[i] for i in range(*op_id.indices(len(self)))]
        op = self._made.get(op_id)
        if op is None:
            op = self._made[op_id] = self._make(int(op_id))
        return op

    def __iter__(self) -> Iterator[Op]:
        return (self[i] for i in range(len(self)))

    def _make(self, op_id: int) -> Op:
        if not 0 <= op_id < len(self):
            raise IndexError(op_id)
        values = self._columns.values
        return op_from_columns(
            *(int(values[name][op_id]) for name in ("kind", "stage", "work_item", "target_kind", "index", "axis")),
            num_splits=self._columns.num_splits,
        )


class EdgesByKind(Mapping[EdgeKind, IntColumn]):
    """Edges by kind, each kind computed at its first use."""

    def __init__(self, compute: Callable[[EdgeKind], IntColumn]) -> None:
        self._compute = compute
        self._known: dict[EdgeKind, IntColumn] = {}

    def __getitem__(self, kind: EdgeKind) -> IntColumn:
        if kind not in self._known:
            self._known[kind] = self._compute(kind)
        return self._known[kind]

    def __iter__(self) -> Iterator[EdgeKind]:
        return iter(EdgeKind)

    def __len__(self) -> int:
        return len(EdgeKind)
