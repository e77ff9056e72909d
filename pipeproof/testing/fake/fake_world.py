"""World of fake ranks: programs run on threads that pass one baton, so every run is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.schedule.op_table import Channel, Group, OpGraph
from pipeproof.schedule.ops import AXES
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import DeadlockError, FakeOp
from pipeproof.testing.fake.fake_rank import FakeRank
from pipeproof.testing.fake.fake_recording import Recorded, Recording
from pipeproof.testing.fake.stall_report import HostState, explain
from pipeproof.testing.fake.virtual_clock import times_of
from pipeproof.verify.check_plan import Report, check_graph

RankProgram = Callable[[FakeRank], Any]
"""Program of one rank, in ordinary blocking calls."""

DEFAULT_MODEL = ChannelModel("pair")
"""One FIFO between two ranks and no buffers: two ranks that both send first deadlock."""


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
        return _Running(engine, self._groups, programs).run()


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


class _Running:
    """One run: the world's interface for the ranks; only the thread with the baton executes it."""

    def __init__(self, engine: Engine, groups: tuple[Group, ...], programs: Sequence[RankProgram]) -> None:
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
            host.value = self._programs[rank](FakeRank(rank, len(self._hosts), self))
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
