"""Operations of fake ranks: transfers, collectives and computations with the times of post and end; and errors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeproof.cost.network_times import Network
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.diagnostics.finding import WitnessOp, shown_path
from pipeproof.schedule.op_table import Channel, Group
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.specs.cost import NetworkSpec


class FakeWorldError(AssertionError):
    """A rank program that would hang, mix up or corrupt data on real ranks."""


class DeadlockError(FakeWorldError):
    """Ranks wait for each other: ``cycle`` has the operations of a shortest such cycle.

    It is empty if hosts wait for one another to open connections.
    """

    def __init__(self, message: str, cycle: tuple[WitnessOp, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class NeverComesError(FakeWorldError):
    """A rank waits for an operation that no rank issues."""


class UnmatchedError(FakeWorldError):
    """The programs end with transfers that never met their counterpart."""


class MismatchError(FakeWorldError):
    """The two ends of a message, or the members of a collective, disagree."""


class RaceError(FakeWorldError):
    """An array was written while a send was reading it."""


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
    """Operations that must be done before it is posted."""
    posted_us: Fraction | None = None
    done_us: Fraction | None = None

    @property
    def is_done(self) -> bool:
        """True once it has ended."""
        return self.done_us is not None

    @property
    def words(self) -> str:
        """Name of the operation in messages."""
        return f"{self.op} ({shown_path(self.place)}:{self.line})"


@dataclass(eq=False, slots=True)
class Computation(FakeOp):
    """Time that passes on one rank."""

    duration_us: Fraction = Fraction(0)


@dataclass(eq=False, slots=True)
class Transfer(FakeOp):
    """One end of a message. ``array`` is a copy of a send's input, or the result of a receive."""

    channel: Channel = field(default=Channel("", 0, 0))
    peer: int = 0
    is_send: bool = True
    position: int = 0
    array: Array | None = None
    dtype: str = ""
    into: Array | None = None
    """Buffer of a receive; it has the expected shape and type."""
    source: Array | None = None
    """The caller's array that a send reads, to detect writes meanwhile."""
    num_bytes: int = 0
    begun_us: Fraction | None = None
    """Time at which the message of a send started."""

    @property
    def connection(self) -> Hashable:
        """Connection that first use opens."""
        return self.channel


@dataclass(eq=False, slots=True)
class Call(FakeOp):
    """One member's part in a collective."""

    group: Group = field(default=Group("", ()))
    group_index: int = 0
    position: int = 0
    arrays: Sequence[Array] = ()
    """Input of this member: one array, or one for each member of an all-to-all."""
    reduction: str = ""
    root: int | None = None
    result: Any = None

    @property
    def connection(self) -> Hashable:
        """Connection that first use opens."""
        return self.group_index

    @property
    def num_elements(self) -> int:
        """Number of elements of this member's input."""
        return sum(array.size for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of this member's input."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def form(self) -> tuple[object, ...]:
        """Properties that must be equal on all members."""
        shapes = tuple(array.shape for array in self.arrays)
        return self.op, shapes, tuple(str(a.dtype) for a in self.arrays), self.reduction, self.root

    @property
    def form_words(self) -> str:
        """Text of these properties for messages."""
        puts = " and ".join(f"{a.dtype} {list(a.shape)}" for a in self.arrays) if self.op.kind != OpKind.BARRIER else ""
        extras = [self.reduction] if self.reduction else []
        extras += [f"from rank {self.root}"] if self.root is not None else []
        return " ".join([self.words, *([f"of {puts}"] if puts else []), *extras])


class FakeTimes:
    """Times in microseconds by the links of a network, without contention; zero without a network."""

    def __init__(self, network: Network | None) -> None:
        self._times = None if network is None else NetworkTimes(network, "float32", "float32")

    def message_us(self, src: int, dst: int, num_bytes: int) -> Fraction:
        """Return the time from the start of a message until it has arrived."""
        if self._times is None:
            return Fraction(0)
        return self._times.message_us(np.array([[src, dst]], dtype=np.int64), num_bytes)

    def collective_us(self, kind: OpKind, ranks: tuple[int, ...], num_bytes: int) -> Fraction:
        """Return the time of a collective with so many bytes of each member, from the arrival of the last member.

        It is computed by the formulas of ``pipeproof.cost.network_times``.
        """
        if self._times is None:
            return Fraction(0)
        return self._times.collective_us(kind, np.array([ranks], dtype=np.int64), num_bytes)


def times_of(network: Mapping[str, Any] | None) -> FakeTimes:
    """Return the times of a network with the keys of a plan's ``cost.network``; zero without one.

    Raises:
        ValueError: a key is wrong or missing, or links are shared, which this clock does not support.
    """
    if network is None:
        return FakeTimes(None)
    spec = NetworkSpec.model_validate(dict(network))
    if spec.ranks_per_node is None or spec.node is None:
        raise ValueError("a network needs ranks_per_node and node: {bandwidth: GB/s, latency_us: ...}")
    if spec.contention:
        raise ValueError("contention: true is for `pipeproof simulate`; here each message has its links to itself")
    return FakeTimes(Network.of_spec(spec))


def exact_us(value: float | Fraction) -> Fraction:
    """Return a time as the exact fraction of its decimal text.

    Raises:
        ValueError: it is negative or no number.
    """
    time = value if isinstance(value, Fraction) else Fraction(str(value))
    if time < 0:
        raise ValueError(f"a computation takes at least 0 us, not {value}")
    return time
