"""One run of fake ranks: programs on threads that pass one baton, so every run is the same; and its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.op_table import Channel, Group, OpGraph
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import FakeOp
from pipeproof.testing.fake.fake_recording import Recorded, Recording
from pipeproof.testing.fake.stall_report import HostState, explain
from pipeproof.verify.check_plan import Report, check_graph


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
        """End the threads of ranks that have not ended."""
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
