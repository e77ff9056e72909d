"""What fake ranks issue: transfers, collectives and computations, each with the times of its post and its end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from numpy.typing import NDArray

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.optable import Channel, Group
from pipeproof.specs.excerpt import shown_path

Array = NDArray[Any]


@dataclass(eq=False, slots=True)
class FakeOp:
    """One operation of one rank; ``place`` is the file and line of the program that issued it."""

    rank: int
    op: Op
    place: str
    line: int
    batch: int = -1
    members: Sequence[FakeOp] = ()
    """All operations of its call, itself included."""
    follows: Sequence[FakeOp] = ()
    """What must be done before it is posted."""
    posted_us: Fraction | None = None
    done_us: Fraction | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.done_us is not None

    @property
    def words(self) -> str:
        """The operation as messages name it."""
        return f"{self.op} ({shown_path(self.place)}:{self.line})"


@dataclass(eq=False, slots=True)
class Computation(FakeOp):
    """Time that passes on one rank."""

    duration_us: Fraction = Fraction(0)


@dataclass(eq=False, slots=True)
class Transfer(FakeOp):
    """One end of a message. ``array`` is a copy of what a send takes, later what a receive got."""

    channel: Channel = field(default=Channel("", 0, 0))
    peer: int = 0
    is_send: bool = True
    position: int = 0
    array: Array | None = None
    dtype: str = ""
    into: Array | None = None
    """What a receive fills; it says the shape and type that are wanted."""
    source: Array | None = None
    """The caller's own array that a send reads, to notice who writes it meanwhile."""
    num_bytes: int = 0
    begun_us: Fraction | None = None
    """When the message of a send was on its way."""

    @property
    def connection(self) -> Hashable:
        """What first use opens."""
        return self.channel


@dataclass(eq=False, slots=True)
class Call(FakeOp):
    """One member's part in a collective."""

    group: Group = field(default=Group("", ()))
    group_index: int = 0
    position: int = 0
    arrays: Sequence[Array] = ()
    """What this member puts in: one array, or one for each member of an all-to-all."""
    reduction: str = ""
    root: int | None = None
    result: Any = None

    @property
    def connection(self) -> Hashable:
        """What first use opens."""
        return self.group_index

    @property
    def num_elements(self) -> int:
        """Elements that this member puts in."""
        return sum(array.size for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        """Bytes that this member puts in."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def form(self) -> tuple[object, ...]:
        """What must be the same on all members."""
        shapes = tuple(array.shape for array in self.arrays)
        return self.op, shapes, tuple(str(a.dtype) for a in self.arrays), self.reduction, self.root

    @property
    def form_words(self) -> str:
        """The same in words."""
        puts = " and ".join(f"{a.dtype} {list(a.shape)}" for a in self.arrays) if self.op.kind != OpKind.BARRIER else ""
        extras = [self.reduction] if self.reduction else []
        extras += [f"from rank {self.root}"] if self.root is not None else []
        return " ".join([self.words, *([f"of {puts}"] if puts else []), *extras])
