"""World of fake ranks, and the communication calls of one rank program, blocking and non-blocking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.diagnostics.finding import shown_path
from pipeproof.schedule.columns import COMMUNICATORS, NONE
from pipeproof.schedule.op_table import Channel, Group
from pipeproof.schedule.ops import (
    AXES,
    COMPUTE_KINDS,
    META_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    UPDATE_KINDS,
    Op,
    OpKind,
    parse_op,
)
from pipeproof.testing.assertions import as_array, dtype_name
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import (
    Array,
    Call,
    Computation,
    DeadlockError,
    FakeOp,
    RaceError,
    Transfer,
    exact_us,
    times_of,
)
from pipeproof.testing.fake.fake_run import FakeRun, Running

_HERE = str(Path(__file__).parent)

_NAMES = {True: SEND_KINDS - META_KINDS, False: RECV_KINDS - META_KINDS}
"""Kinds that the name of a send, or of a receive, may have."""


class Handle:
    """A transfer in flight."""

    def __init__(self, rank: FakeRank, transfer: Transfer) -> None:
        self._rank, self._transfer = rank, transfer
        self._waited = False

    def wait(self) -> Any:
        """Block the rank until the transfer, and its whole batch, is done; waiting again changes nothing.

        Returns:
            The result of a receive as a numpy array; None for a send.

        Raises:
            RaceError: the array of a send was written since its post.
        """
        transfer = self._transfer
        if not self._waited:
            self._waited = True
            self._rank.finish(transfer)
            if transfer.source is not None and transfer.source.tobytes() != _bytes_of(transfer):
                raise RaceError(
                    f"rank {transfer.rank}: the array of {transfer.words} was written before its wait; a send reads "
                    "its array until then"
                )
        return None if transfer.is_send else transfer.array


def _bytes_of(send: Transfer) -> bytes:
    assert send.array is not None
    return send.array.tobytes()


class FakeRank:
    """One rank, for its program. Every call may raise an error of the whole world.

    ``name`` of a call is its text in the recorded graph, such as ``0SEND_F1``
    (``pipeproof.schedule.ops``): with names, the ends of a message must
    agree. ``communicator`` distinguishes channels between two ranks; without
    it, forward and backward names have one each, and messages without a name
    use that of forward ones. Values are numbers, arrays or tensors of any
    framework; results are numpy arrays.
    """

    def __init__(self, rank: int, num_ranks: int, world: Running) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._world = world
        self._batch: list[Transfer] | None = None
        self._num_batches = 0
        self._num_messages: dict[tuple[Channel, bool], int] = {}
        self._num_calls: dict[int, int] = {}
        self._opened: set[Hashable] = set()

    @property
    def now_us(self) -> Fraction:
        """The virtual time, in microseconds since the world began."""
        return self._world.now_us

    # --- messages ---

    def send(self, value: Any, to: int, *, name: str | None = None, communicator: str = "") -> None:
        """Send and wait until the send is done."""
        self._not_in_batch("send")
        self.isend(value, to, name=name, communicator=communicator).wait()

    def recv(self, source: int, into: Any = None, *, name: str | None = None, communicator: str = "") -> Any:
        """Receive, wait and return the array. ``into``, a numpy array, is filled and must fit the message."""
        self._not_in_batch("recv")
        return self.irecv(source, into, name=name, communicator=communicator).wait()

    def isend(self, value: Any, to: int, *, name: str | None = None, communicator: str = "") -> Handle:
        """Post a send. A numpy array must not be written before the wait, which detects it."""
        array = as_array(value)
        transfer = self._transfer(to, name, communicator, is_send=True)
        transfer.array, transfer.dtype, transfer.num_bytes = array.copy(), dtype_name(value), array.nbytes
        if transfer.dtype == "bfloat16":
            transfer.num_bytes = 2 * array.size
        transfer.source = value if isinstance(value, np.ndarray) else None
        return self._posted(transfer)

    def irecv(self, source: int, into: Any = None, *, name: str | None = None, communicator: str = "") -> Handle:
        """Post a receive."""
        if into is not None and not isinstance(into, np.ndarray):
            raise ValueError(f"into is filled in place, so it must be an array of numpy, not {type(into).__name__}")
        transfer = self._transfer(source, name, communicator, is_send=False)
        transfer.into, transfer.dtype = into, "" if into is None else dtype_name(into)
        return self._posted(transfer)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Sends and receives in this block are one call: posted together at its end, with no order among them."""
        self._not_in_batch("batch")
        self._batch = []
        try:
            yield
            entry = self._batch
        finally:
            self._batch = None
        if entry:
            self._num_batches += 1
            self._issue(entry)

    def _transfer(self, peer: int, name: str | None, communicator: str, *, is_send: bool) -> Transfer:
        if not 0 <= peer < self.num_ranks:
            raise ValueError(f"rank {peer} is not one of the {self.num_ranks} ranks of this world")
        op = None if name is None else _named(name, _NAMES[is_send], "2SEND_F0" if is_send else "3RECV_F0")
        communicator = communicator or COMMUNICATORS[op is not None and not op.is_forward]
        ends = (self.rank, peer) if is_send else (peer, self.rank)
        channel = Channel(communicator, *ends)
        number = self._num_messages.get((channel, is_send), 0)
        self._num_messages[channel, is_send] = number + 1
        if op is None:
            kind = OpKind.SEND_FORWARD if is_send else OpKind.RECV_FORWARD
            op = Op(kind, self._world.stage_of(channel) + (not is_send), number)
        batch = NONE if self._batch is None else self._num_batches
        return Transfer(self.rank, op, *_caller(), batch=batch, channel=channel, peer=peer, is_send=is_send)

    def _posted(self, transfer: Transfer) -> Handle:
        if self._batch is None:
            self._issue([transfer])
        else:
            self._batch.append(transfer)
        return Handle(self, transfer)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer; ``Handle.wait`` is the public way."""
        self._not_in_batch("wait")
        place, line = _caller()
        self._world.record_wait(transfer, place, line)
        self._world.hold(self.rank, transfer.members, f"{shown_path(place)}:{line}")

    # --- work ---

    def compute(self, duration_us: float | Fraction, *, name: str | None = None) -> None:
        """Let time pass. With a name, such as ``0F1``, the computation is in the recorded graph."""
        self._not_in_batch("compute")
        op = Op(OpKind.STEP, 0)
        if name is not None:
            op = _named(name, COMPUTE_KINDS | UPDATE_KINDS | {OpKind.STEP}, "0F1")
        work = Computation(self.rank, op, *_caller(), duration_us=exact_us(duration_us))
        if name is not None:
            self._world.record(work)
        self._world.issue([work])
        self._hold([work])

    # --- collectives ---

    def barrier(self, axis: str = "pp") -> None:
        """Wait until all ranks of the rank's group of this axis reach the barrier."""
        self._call(OpKind.BARRIER, axis, [])

    def all_reduce(self, value: Any, reduction: str = "sum", axis: str = "pp") -> Array:
        """Return the sum, max or avg of the inputs, reduced in the order of the group."""
        result: Array = self._call(OpKind.ALL_REDUCE, axis, [as_array(value)], reduction=reduction)
        return result

    def all_gather(self, value: Any, axis: str = "pp") -> list[Array]:
        """Return the members' inputs, in the order of the group."""
        result: list[Array] = self._call(OpKind.ALL_GATHER, axis, [as_array(value)])
        return result

    def reduce_scatter(self, value: Any, reduction: str = "sum", axis: str = "pp") -> Array:
        """Return this rank's shard of the reduction, along the first dim."""
        array = as_array(value)
        size = len(self._group(axis)[1].ranks)
        if not array.ndim or array.shape[0] % size:
            raise ValueError(f"a reduce_scatter over {size} ranks cuts the first dim of {list(array.shape)} evenly")
        result: Array = self._call(OpKind.REDUCE_SCATTER, axis, [array], reduction=reduction)
        return result

    def broadcast(self, value: Any, root: int, axis: str = "pp") -> Array:
        """Return the input of ``root``; the other inputs must have the same shape and type."""
        if root not in self._group(axis)[1].ranks:
            raise ValueError(f"root {root} is not in the {axis} group {list(self._group(axis)[1].ranks)}")
        result: Array = self._call(OpKind.BROADCAST, axis, [as_array(value)], root=root)
        return result

    def all_to_all(self, values: Sequence[Any], axis: str = "pp") -> list[Array]:
        """Return the inputs for this rank, in the order of the group; all have the same shape."""
        size = len(self._group(axis)[1].ranks)
        if len(values) != size:
            raise ValueError(f"an all_to_all over {size} ranks takes {size} values, not {len(values)}")
        result: list[Array] = self._call(OpKind.ALL_TO_ALL, axis, [as_array(value) for value in values])
        return result

    def _call(
        self, kind: OpKind, axis: str, arrays: Sequence[Array], *, reduction: str = "", root: int | None = None
    ) -> Any:
        self._not_in_batch(str(kind).lower())
        if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER) and reduction not in ("sum", "max", "avg"):
            raise ValueError(f"reduction {reduction!r} is none of sum, max, avg")
        index, group = self._group(axis)
        position = self._num_calls.get(index, 0)
        self._num_calls[index] = position + 1
        call = Call(
            self.rank,
            Op(kind, 0, position, axis=axis),
            *_caller(),
            group=group,
            group_index=index,
            position=position,
            arrays=[array.copy() for array in arrays],
            reduction=reduction,
            root=root,
        )
        self._issue([call])
        self._hold([call])
        return call.result

    def _group(self, axis: str) -> tuple[int, Group]:
        for index, group in enumerate(self._world.groups):
            if group.axis == axis and self.rank in group.ranks:
                return index, group
        raise ValueError(f"rank {self.rank} is in no {axis} group of this world")

    # --- the host ---

    def _issue(self, entry: Sequence[Transfer] | Sequence[Call]) -> None:
        for op in entry:
            self._world.record(op)
        if self._world.model.connections == "lazy":
            self._open(entry)
        self._world.issue(entry)
        if self._world.model.host_blocks and isinstance(entry[0], Transfer):
            self._hold(entry)

    def _open(self, entry: Sequence[Transfer] | Sequence[Call]) -> None:
        members = {
            op.connection: frozenset((op.channel.src, op.channel.dst) if isinstance(op, Transfer) else op.group.ranks)
            for op in entry
        }
        fresh = {connection: ranks for connection, ranks in members.items() if connection not in self._opened}
        self._opened.update(fresh)
        if fresh:
            self._world.open(self.rank, fresh, f"{shown_path(entry[-1].place)}:{entry[-1].line}")

    def _hold(self, ops: Sequence[FakeOp]) -> None:
        self._world.hold(self.rank, ops, f"{shown_path(ops[-1].place)}:{ops[-1].line}")

    def _not_in_batch(self, call: str) -> None:
        if self._batch is not None:
            raise ValueError(f"only isend and irecv may be in a batch; {call} comes after it")


def _named(name: str, kinds: frozenset[OpKind], example: str) -> Op:
    op = parse_op(name)
    if op.kind not in kinds:
        raise ValueError(f"{name} cannot name this call; an example of what can: {example}")
    return op


def _caller() -> tuple[str, int]:
    """Return file and line of the nearest frame outside this package."""
    frame = sys._getframe(1)  # noqa: SLF001 - what inspect's functions read, without reading sources
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_HERE) or frame.f_code.co_filename.endswith("contextlib.py")
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


RankProgram = Callable[[FakeRank], Any]
"""Program of one rank, in ordinary blocking calls."""

DEFAULT_MODEL = ChannelModel("pair")
"""One FIFO between two ranks and no buffers: two ranks that both send first deadlock."""


class FakeWorld:
    """Ranks that run in this process, on configurable channels.

    Args:
        num_ranks: number of ranks.
        semantics: which transfers wait for each other, when a send is done,
            whether posts block the host, whether connections open at first
            use: a ``ChannelModel``; the default is ``DEFAULT_MODEL``.
        network: times of messages and collectives, with the keys of a
            plan's ``cost.network``; without it they take no time.
        groups: by axis (``pp``, ``dp``, ``tp``, ``cp``, ``ep``), groups of
            ranks for collectives. Without ``pp``, all ranks are one group of
            that axis.

    Raises:
        ValueError: no ranks, invalid groups, or an invalid network.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        semantics: ChannelModel = DEFAULT_MODEL,
        network: Mapping[str, Any] | None = None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a world has at least one rank, not {num_ranks}")
        self.num_ranks, self.semantics = num_ranks, semantics
        self._times = times_of(network)
        self._groups = _groups(num_ranks, {"pp": [range(num_ranks)], **(groups or {})})

    def run(self, program: RankProgram | Sequence[RankProgram]) -> FakeRun:
        """Run one program on every rank, or one for each, until all have ended.

        Raises:
            DeadlockError: ranks wait for each other; the message is the shortest cycle, with files and lines.
            NeverComesError: a rank waits for an operation that no rank issues.
            UnmatchedError: all programs ended, and a transfer is unmatched.
            MismatchError: matched operations disagree.
            RaceError: an array was written while a send read it.
            ValueError: the number of programs, or a call's arguments.
            Exception: any error of a program, with a note that names the rank.
        """
        return self._run(program, self.semantics)

    def failing_models(self, program: RankProgram | Sequence[RankProgram]) -> tuple[ChannelModel, ...]:
        """Return the channel models of ``pipeproof.comm.channel_models.MODELS`` under which programs deadlock.

        Programs are run again for each model: they must not keep state between runs.
        """
        failing = []
        for model in MODELS:
            try:
                self._run(program, model)
            except DeadlockError:
                failing.append(model)
        return tuple(failing)

    def _run(self, program: RankProgram | Sequence[RankProgram], model: ChannelModel) -> FakeRun:
        programs = [program] * self.num_ranks if callable(program) else list(program)
        if len(programs) != self.num_ranks:
            raise ValueError(f"{len(programs)} programs for {self.num_ranks} ranks")
        engine = Engine(self.num_ranks, model, self._times)
        return Running(engine, self._groups, [partial(self._started, each) for each in programs]).run()

    def _started(self, program: RankProgram, run: Running, rank: int) -> Any:
        return program(FakeRank(rank, self.num_ranks, run))


def _groups(num_ranks: int, by_axis: Mapping[str, Sequence[Sequence[int]]]) -> tuple[Group, ...]:
    groups = []
    for axis, members in by_axis.items():
        if axis not in AXES:
            raise ValueError(f"axis {axis!r} is none of {', '.join(AXES)}")
        ranks = [rank for group in members for rank in group]
        if len(set(ranks)) < len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
            raise ValueError(f"groups of {axis}: each rank 0..{num_ranks - 1} is in at most one, found {ranks}")
        groups += [Group(axis, tuple(group)) for group in members]
    return tuple(groups)
