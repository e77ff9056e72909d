"""One run of fake ranks: programs on threads that pass one baton, so every run is the same; and its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from string import ascii_lowercase
from typing import Any

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.diagnostics.finding import Location, WitnessOp
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, cycle_headline, wait_lines
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.op_table import Channel, Group, OpGraph, TensorSpec, build_graph
from pipeproof.schedule.ops import Op, OpKind, wait_for
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import (
    Array,
    Call,
    DeadlockError,
    FakeOp,
    FakeWorldError,
    NeverComesError,
    Transfer,
    UnmatchedError,
)
from pipeproof.verify.check_plan import Report, check_graph
from pipeproof.verify.fifo_matching import partner_of

# --- Explanation of a stall: the waits between ranks, as a cycle or as a chain that ends at a missing operation ---


@dataclass(eq=False, slots=True)
class HostState:
    """Position of one rank's program, and the operations that block it."""

    rank: int
    place: str = ""
    waits_for: Sequence[FakeOp] = ()
    opens: Mapping[Hashable, frozenset[int]] = field(default_factory=dict)
    """Connections that it is opening, each with the ranks that must reach it."""
    ended: bool = False

    def is_held(self, engine: Engine) -> bool:
        """True if it waits for an event that has not happened."""
        return any(not op.is_done for op in self.waits_for) or any(
            not ranks <= engine.came[connection] for connection, ranks in self.opens.items()
        )

    @property
    def words(self) -> str:
        """Its position in the program."""
        return "has ended" if self.ended else f"is held at {self.place}"


_Node = FakeOp | HostState


def explain(engine: Engine, hosts: Sequence[HostState], ops: Sequence[FakeOp]) -> FakeWorldError | None:
    """Return the error once no event is possible; None if all issued operations are done and matched.

    ``ops`` are all operations in the order of issue.
    """
    reader = _Reader(engine, hosts)
    left = [op for op in ops if not op.is_done]
    graph: WaitGraph[_Node] = WaitGraph([*(host for host in hosts if not host.ended), *left])
    for node in list(graph):
        for other in reader.waits(node):
            graph.add(node, other, reader.wait(node, other))
    if cycle := graph.cycle():
        names = tuple(WitnessOp(node.rank, str(node.op)) for node, _ in cycle if isinstance(node, FakeOp))
        lines = wait_lines([wait for _, wait in cycle])
        return DeadlockError("\n  ".join([f"{cycle_headline(cycle)} ({engine.model}):", *lines]), names)
    waiting = next((host for host in hosts if not host.ended), None)
    if waiting is not None:
        lines = wait_lines(list(graph.chain(waiting)))
        return NeverComesError("\n  ".join([f"rank {waiting.rank} waits for ever:", *lines]))
    alone = [op for op in ops if isinstance(op, Transfer) and engine.channels[op.channel].other(op) is None]
    if alone:
        lines = [f"rank {op.rank}: {op.words}, {'to' if op.is_send else 'from'} rank {op.peer}" for op in alone]
        return UnmatchedError("\n  ".join(["all programs have ended, but nobody ever met:", *lines]))
    assert not left, "what is left waits for something"
    return None


class _Reader:
    def __init__(self, engine: Engine, hosts: Sequence[HostState]) -> None:
        self._engine, self._hosts = engine, hosts

    def waits(self, node: _Node) -> Iterator[_Node]:
        """Return all events that a host or an operation still waits for."""
        if isinstance(node, HostState):
            yield from (op for op in node.waits_for if not op.is_done)
            for connection, ranks in node.opens.items():
                yield from (self._hosts[rank] for rank in sorted(ranks - self._engine.came[connection]))
        elif node.posted_us is None:
            yield from (op for op in node.follows if not op.is_done)
        elif isinstance(node, Call):
            yield from self._members(node)
        elif isinstance(node, Transfer):
            yield from self._other_end(node)

    def _members(self, call: Call) -> Iterator[_Node]:
        there = {member.rank: member for member in self._engine.calls[call.group_index, call.position]}
        for rank in call.group.ranks:
            if rank not in there:
                yield self._hosts[rank]
            elif there[rank].posted_us is None:
                yield there[rank]

    def _other_end(self, transfer: Transfer) -> Iterator[_Node]:
        ends = self._engine.channels[transfer.channel]
        if transfer.is_send and not self._engine.meets(transfer):
            awaited = self._engine.awaited(transfer)
            assert awaited is not None, "a send that waits for no room is done when it is posted"
            yield ends.receives[awaited] if awaited < len(ends.receives) else self._hosts[transfer.peer]
        else:
            yield ends.other(transfer) or self._hosts[transfer.peer]

    def wait(self, one: _Node, other: _Node) -> Wait:
        """Return one wait for messages."""
        if isinstance(one, HostState):
            if isinstance(other, HostState):
                return Wait(one.rank, "", f"rank {other.rank}", f"which {other.words}, to open its end", one.place)
            return Wait(one.rank, "", other.words, at=one.place)
        if isinstance(other, HostState):
            why = f"which {other.words} and has not issued {self._missing(one)}"
            return Wait(one.rank, one.words, f"rank {other.rank}", why)
        if one.posted_us is None:
            return Wait(one.rank, one.words, other.words, "which is before it in its queue")
        return Wait(one.rank, one.words, f"{other.words} of rank {other.rank}")

    def _missing(self, op: FakeOp) -> str:
        """Return the operation that the other rank has not issued."""
        if not isinstance(op, Transfer):
            return "it"
        if op.is_send and not self._engine.meets(op):
            return "the receive that makes room"
        return str(partner_of(op.op))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows of all ranks with their locations in the programs.

    ``ops`` has the operation of each row, None for waits.
    """

    graph: OpGraph
    origins: tuple[Location, ...]
    ops: tuple[FakeOp | None, ...]


class Recording:
    """Collects rows rank by rank."""

    def __init__(self, num_ranks: int) -> None:
        self._rows: list[list[tuple[Op, FakeOp | None, str, int]]] = [[] for _ in range(num_ranks)]

    def issued(self, op: FakeOp) -> None:
        """Record an issued operation."""
        self._rows[op.rank].append((op.op, op, op.place, op.line))

    def waited(self, op: FakeOp, place: str, line: int) -> None:
        """Record that its rank waits for it."""
        self._rows[op.rank].append((wait_for(op.op), None, place, line))

    def finish(self, engine: Engine, groups: tuple[Group, ...]) -> Recorded:
        """Build the graph. A receive without shape and type gets those of its send."""
        tensors: dict[TensorSpec, int] = {}
        origins: dict[Location, int] = {}
        ranks = []
        for recorded in self._rows:
            rows = []
            for op, source, place, line in recorded:
                origin = origins.setdefault(Location(place, line, 1), len(origins))
                rows.append(_row(op, source, engine, tensors, origin))
            ranks.append(rows)
        ops = tuple(source for recorded in self._rows for _, source, _, _ in recorded)
        return Recorded(build_graph(ranks, list(tensors), groups), tuple(origins), ops)


def _row(op: Op, source: FakeOp | None, engine: Engine, tensors: dict[TensorSpec, int], origin: int) -> Row:
    row = Row(op, origin=origin)
    if isinstance(source, Transfer):
        held = _held(source, engine)
        tensor, stop = NONE, 0
        if held is not None:
            array, dtype = held
            tensor = tensors.setdefault(_tensor(array, dtype), len(tensors))
            stop = array.size
        communicator = source.channel.communicator
        return replace(row, peer=source.peer, tensor=tensor, stop=stop, communicator=communicator, batch=source.batch)
    if isinstance(source, Call):
        root = NONE if source.root is None else source.root
        tensor = NONE
        if op.kind is not OpKind.BARRIER:
            tensor = tensors.setdefault(_tensor(source.arrays[0], str(source.arrays[0].dtype)), len(tensors))
        return replace(
            row,
            peer=root,
            tensor=tensor,
            stop=source.num_elements,
            group=source.group_index,
            reduction=source.reduction,
        )
    return row


def _held(transfer: Transfer, engine: Engine) -> tuple[Array, str] | None:
    """Return the array of a transfer and its type; None for an unmatched receive without a buffer."""
    send = transfer if transfer.is_send else engine.channels[transfer.channel].other(transfer)
    if transfer.into is not None:
        return transfer.into, transfer.dtype
    return None if send is None or send.array is None else (send.array, send.dtype)


def _tensor(array: Array, dtype: str) -> TensorSpec:
    dims = ascii_lowercase[: array.ndim]
    return TensorSpec(f"{dtype}[{', '.join(map(str, array.shape))}]", array.shape, dtype, "replicated", dims)


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation of a run with its times; ``start_us`` is its post."""

    rank: int
    op: str
    start_us: Fraction
    end_us: Fraction


@dataclass(frozen=True)
class FakeRun:
    """Result of programs that all ended.

    ``values[r]`` is the return value of rank r's program, ``timeline`` has every
    recorded operation except waits, in the order of the graph.
    """

    values: tuple[Any, ...]
    makespan_us: Fraction
    model: ChannelModel
    recorded: Recorded

    @property
    def graph(self) -> OpGraph:
        """Graph of the issued operations."""
        return self.recorded.graph

    @cached_property
    def timeline(self) -> tuple[Timed, ...]:
        """Every recorded operation except waits, with its times."""
        return tuple(
            Timed(op.rank, str(op.op), op.posted_us, op.done_us)
            for op in self.recorded.ops
            if op is not None and op.posted_us is not None and op.done_us is not None
        )

    def check(self, backend: BackendTable | None = None) -> Report:
        """Check the issued operations with every rule that needs no plan; see ``pipeproof.check_graph``."""
        return check_graph(self.graph, backend=backend, origins=self.recorded.origins)


Program = Callable[["Running", int], Any]
"""Program of a rank, given its run and its number."""


class _Abandoned(BaseException):
    """End of the thread of a rank whose world has ended; programs must not catch it."""


@dataclass(eq=False)
class _Host:
    """A rank's thread: it runs while it has the baton."""

    state: HostState
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    value: Any = None
    error: BaseException | None = None


class Running:
    """One run: the world's interface for the ranks; only the thread with the baton executes it."""

    def __init__(self, engine: Engine, groups: tuple[Group, ...], programs: Sequence[Program]) -> None:
        self.groups, self.model = groups, engine.model
        self._engine, self._recording = engine, Recording(len(programs))
        self._ops: list[FakeOp] = []
        self._stages: dict[Channel, int] = {}
        self._hosts = [_Host(HostState(rank)) for rank in range(len(programs))]
        self._back = threading.Semaphore(0)
        self._abandoned = False
        self._programs = programs

    @property
    def now_us(self) -> Fraction:
        """The virtual time."""
        return self._engine.now_us

    def run(self) -> FakeRun:
        """Run each rank until it blocks, then the clock, until neither can continue."""
        try:
            while True:
                free = [host for host in self._hosts if not host.state.ended and not host.state.is_held(self._engine)]
                for host in free:
                    self._give_baton(host)
                    self._engine.settle()
                if not free and not self._engine.advance():
                    break
            wrong = explain(self._engine, [host.state for host in self._hosts], self._ops)
        finally:
            self._abandon()
        if wrong is not None:
            raise wrong
        recorded = self._recording.finish(self._engine, self.groups)
        return FakeRun(tuple(host.value for host in self._hosts), self.now_us, self.model, recorded)

    # --- the baton ---

    def _give_baton(self, host: _Host) -> None:
        if host.thread is None:
            name = f"fake rank {host.state.rank}"
            host.thread = threading.Thread(target=self._main, args=(host,), name=name, daemon=True)
            host.thread.start()
        host.turn.release()
        self._back.acquire()
        if host.error is not None:
            raise host.error

    def _main(self, host: _Host) -> None:
        rank = host.state.rank
        try:
            self._await_turn(host)
            host.value = self._programs[rank](self, rank)
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 - raised again where the world is run
            error.add_note(f"raised on rank {rank} of a fake world at {float(self.now_us):g} us")
            host.error = error
        host.state.ended = True
        self._back.release()

    def _await_turn(self, host: _Host) -> None:
        host.turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def _abandon(self) -> None:
        self._abandoned = True
        for host in self._hosts:
            host.turn.release()
            if host.thread is not None:
                host.thread.join()

    def _hold(self, rank: int) -> None:
        host = self._hosts[rank]
        if self._abandoned:  # a program's own clean-up, after the end
            raise _Abandoned
        self._engine.settle()
        if host.state.is_held(self._engine):
            self._back.release()
            self._await_turn(host)
        host.state.waits_for, host.state.opens = (), {}

    # --- what ranks ask for ---

    def issue(self, entry: Sequence[FakeOp]) -> None:
        """Issue one call of a rank."""
        self._ops += entry
        self._engine.issue(entry)

    def record(self, op: FakeOp) -> None:
        """Record an issued operation."""
        self._recording.issued(op)

    def record_wait(self, op: FakeOp, place: str, line: int) -> None:
        """Record a wait."""
        self._recording.waited(op, place, line)

    def hold(self, rank: int, ops: Sequence[FakeOp], place: str) -> None:
        """Block a rank's program until all of these are done."""
        state = self._hosts[rank].state
        state.waits_for, state.place = ops, place
        self._hold(rank)

    def open(self, rank: int, connections: dict[Hashable, frozenset[int]], place: str) -> None:
        """Block a rank's program until all of these ranks have reached each connection."""
        state = self._hosts[rank].state
        state.opens, state.place = connections, place
        for connection in connections:
            self._engine.came[connection].add(rank)
        self._hold(rank)

    def stage_of(self, channel: Channel) -> int:
        """Two stage numbers for each channel: the even one sends."""
        return 2 * self._stages.setdefault(channel, len(self._stages))
