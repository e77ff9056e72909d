"""A watched job as it is now: the ring of each rank, and whether its process runs."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.diagnostics.units import time_text
from pipeproof.exec.monitor.monitor_codes import UNREADABLE_RING
from pipeproof.exec.monitor.ring import End, OpState, Ring, RingGroup, RingHeader, RingOp, read_header, read_ring
from pipeproof.exec.store.process_state import ProcessId, boot_id, is_stopped

_NAME: Final = re.compile(r"rank_(0|[1-9]\d*)\.ring", re.ASCII)
_LATE_HEARTBEAT_S: Final = 3.0
"""Age of a heartbeat from which a process whose state cannot be read counts as silent."""
_LIVE_S: Final = 10.0
"""Age of the last heartbeat of all ranks from which a job counts as ended."""


class ProcessState(StrEnum):
    """State of a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """It exists and does not run: SIGSTOP, or a debugger."""
    SILENT = "silent"
    """On another host, or in copied files: its heartbeat ended before the others'."""
    GONE = "gone"
    """It has ended, and did not note an end."""
    ENDED = "ended"
    """It noted the end of its program."""
    RAISED = "raised"
    """It noted the error that ended its program."""


@dataclass(frozen=True)
class RankNow:
    """One rank: its ring, and the state of its process."""

    ring: Ring
    state: ProcessState

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.ring.header.rank

    @property
    def has_left(self) -> bool:
        """True once nothing more can happen on the rank."""
        return self.state in (ProcessState.GONE, ProcessState.ENDED)

    @cached_property
    def blocking(self) -> tuple[RingOp, ...]:
        """Operations that the host is in, and, if the host waits for the device, operations that block the device.

        A host outside of operations may wait for its device anywhere. A host in a call waits for its device if the
        queue of launches is full, but not while the call makes a communicator.
        """
        waits_for_device = not self._in_host or any(
            self.is_behind(op) and not self.is_opening(op) for op in self._in_host
        )
        return (*self._in_host, *self._front) if waits_for_device else self._in_host

    @cached_property
    def _in_host(self) -> tuple[RingOp, ...]:
        return tuple(op for op in self.ring.ops if op.state in (OpState.ISSUED, OpState.WAITED))

    @cached_property
    def _front(self) -> tuple[RingOp, ...]:
        """The first operation that the device has not finished behind a wait, with the rest of its batch."""
        queued = tuple(op for op in self.ring.ops if op.state is OpState.QUEUED)
        return tuple(op for op in queued if op is queued[0] or (op.batch is not None and op.batch == queued[0].batch))

    def is_opening(self, op: RingOp) -> bool:
        """True while the host is in the first call of its kind to a group or a peer: it makes their connections."""
        is_first = op.number == 0 or (
            self.ring.is_whole
            and not any(
                (each.op, each.group, each.peer) == (op.op, op.group, op.peer)
                for each in self.ring.ops
                if each.seq < op.seq
            )
        )
        return op.state is OpState.ISSUED and is_first

    def is_behind(self, op: RingOp) -> bool:
        """True for an operation that the host queued on the device behind the operation that blocks the device."""
        first = next(iter(self._front), None)
        return (
            first is not None
            and op.group.backend == first.group.backend
            and op.state is not OpState.DONE
            and op.issued_ns > (first.waited_ns or first.issued_ns)
        )

    @property
    def last(self) -> RingOp | None:
        """The operation that was issued last."""
        return self.ring.ops[-1] if self.ring.ops else None

    @property
    def since_ns(self) -> int:
        """Time of the last event in the ring; without events, the start of the watch."""
        times = [max(op.issued_ns, op.waited_ns, op.done_ns) for op in self.ring.ops]
        return max(times, default=self.ring.header.started_ns)

    def since_of(self, op: RingOp) -> int:
        """Time of the last event of an operation; if it blocks the device, the time since which it does."""
        own_ns = max(op.issued_ns, op.waited_ns, op.done_ns)
        return max(own_ns, self._done_ns.get(op.group.backend, 0)) if op.state is OpState.QUEUED else own_ns

    @cached_property
    def _done_ns(self) -> dict[str, int]:
        """By backend, the time at which the last operation was done."""
        done_ns: dict[str, int] = {}
        for op in self.ring.ops:
            done_ns[op.group.backend] = max(done_ns.get(op.group.backend, 0), op.done_ns)
        return done_ns

    @property
    def host_since_ns(self) -> int:
        """Time since which the host issues nothing: since it entered its operation, or since its last event."""
        return min(map(self.since_of, self._in_host), default=self.since_ns)

    @property
    def device_since_ns(self) -> int:
        """Time since which an operation blocks the device; the last event of the rank if none does."""
        return max(map(self.since_of, self._front), default=self.since_ns)

    @property
    def own_line(self) -> str:
        """Line of the program where the main thread is, as ``file:line function``; empty if it is unknown."""
        stack = self.ring.header.stack
        return next((line.removeprefix("*") for line in stack if line.startswith("*")), next(iter(stack), ""))

    def plan_position(self, now_ns: int) -> str:
        """Operation of the plan that the rank is in, with step and seconds; empty if pipeproof executes no plan."""
        header = self.ring.header
        if not header.plan_op:
            return ""
        seconds = max(0.0, (now_ns - header.plan_op_ns) / 1e9)
        micro_batch = "" if header.micro_batch is None else f", micro-batch {header.micro_batch}"
        of = f"step {header.step}, stage {header.stage}{micro_batch}"
        return f"rank {self.rank} has been in {header.plan_op} ({of}) for {time_text(seconds * 1e6)}"


@dataclass(frozen=True)
class JobNow:
    """All ranks of a job at one time; ``missing`` are ranks without a ring."""

    ranks: tuple[RankNow, ...]
    missing: tuple[int, ...]
    now_ns: int
    is_over: bool = False
    """No process runs, and some are gone that noted no end: the others keep their earlier states."""

    @cached_property
    def by_rank(self) -> dict[int, RankNow]:
        """Ranks by their number."""
        return {rank.rank: rank for rank in self.ranks}


def ring_files(directory: Path) -> dict[int, Path]:
    """Return the ring file of each rank in a directory and the directories in it, one for each host.

    Raises:
        PlanFileError: PP952, two files are of one rank, or the directory cannot be read.
    """
    files: dict[int, Path] = {}
    try:
        paths = sorted([*directory.glob("rank_*.ring"), *directory.glob("*/rank_*.ring")])
    except OSError as error:
        raise _refused(directory, f"`{directory}` cannot be read: {error.strerror}") from error
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        rank = int(match[1])
        if rank in files:
            raise _refused(directory, f"`{files[rank]}` and `{path}` are both of rank {rank}")
        files[rank] = path
    return dict(sorted(files.items()))


def read_headers(files: dict[int, Path]) -> tuple[RingHeader, ...]:
    """Read the headers of all rings.

    Raises:
        PlanFileError: PP952, a file is not a ring, or the rings are of different jobs.
    """
    headers = tuple(read_header(path) for path in files.values())
    for (rank, path), header in zip(files.items(), headers, strict=True):
        if header.rank != rank:
            raise _refused(path, f"`{path}` is of rank {header.rank}")
        if header.num_ranks != headers[0].num_ranks:
            raise _refused(
                path, f"`{path}` is of a job of {header.num_ranks} ranks, the first ring of {headers[0].num_ranks}"
            )  # fmt: skip
    return headers


def read_job(files: dict[int, Path]) -> JobNow:
    """Read all rings, and the states of the processes of this host.

    If no process runs, and some are gone that noted no end, or if the last heartbeat of all ranks is old, the time is
    that heartbeat's: the job is checked as it was when it ended. The time is taken before the rings are read: no wait
    looks longer than it was. States are read before ends: a process that has noted its end does not count as gone.

    Raises:
        PlanFileError: PP952, a file is not a ring, or the rings are of different jobs.
    """
    now_ns = time.time_ns()
    headers = read_headers(files)
    states = process_states(headers)
    rings = _with_ends(tuple(read_ring(path) for path in files.values()))
    states = [_noted_end(ring.header) or state for ring, state in zip(rings, states, strict=True)]
    last_ns = max((max(header.heartbeat_ns, header.end_ns) for header in headers), default=0)
    num_ranks = headers[0].num_ranks if headers else 0
    missing = tuple(rank for rank in range(num_ranks) if rank not in files)
    at_end = [
        ProcessState.RUNNING
        if state is not ProcessState.ENDED and last_ns - header.heartbeat_ns <= _LATE_HEARTBEAT_S * 1e9
        else state
        for state, header in zip(states, headers, strict=True)
    ]
    is_over = {ProcessState.GONE} <= {*states} <= {ProcessState.GONE, ProcessState.SILENT, ProcessState.ENDED}
    is_over = is_over and ProcessState.RUNNING in at_end
    states = at_end if is_over else states
    ranks = tuple(RankNow(ring, state) for ring, state in zip(rings, states, strict=True))
    is_live = ProcessState.STOPPED in states or now_ns - last_ns < _LIVE_S * 1e9
    return JobNow(ranks, missing, now_ns if is_live and not is_over else last_ns, is_over)


_ALL_ENTER: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Collectives that no member leaves before all have entered."""


def _with_ends(rings: tuple[Ring, ...]) -> tuple[Ring, ...]:
    """Return the rings with ends of collectives that only another member has noted.

    A rank notes ends on its device with its heartbeat, and one that was killed does not note the last ones. If one
    member has finished a collective, all have entered it and finished the collectives before it.
    """
    entered: dict[RingGroup, int] = {}
    for ring in rings:
        for op in ring.ops:
            if op.state is OpState.DONE and op.op in _ALL_ENTER:
                entered[op.group] = max(entered.get(op.group, 0), op.number)
    return tuple(
        replace(
            ring,
            ops=tuple(
                replace(op, state=OpState.DONE, done_ns=op.waited_ns)
                if op.state is OpState.QUEUED and not op.is_message and op.number < entered.get(op.group, 0)
                else op
                for op in ring.ops
            ),
        )
        for ring in rings
    )


def process_states(headers: Sequence[RingHeader]) -> list[ProcessState]:
    """Return the state of each rank's process."""
    own_host = socket.gethostname(), boot_id()
    last_ns = max((header.heartbeat_ns for header in headers), default=0)
    states = []
    for header in headers:
        noted = _noted_end(header)
        if noted is not None:
            states.append(noted)
        elif (header.host, header.boot_id) == own_host and ProcessId(header.pid, header.process_start).is_alive:
            states.append(ProcessState.STOPPED if is_stopped(header.pid) else ProcessState.RUNNING)
        elif (header.host, header.boot_id) == own_host:
            states.append(ProcessState.GONE)
        else:
            is_late = last_ns - header.heartbeat_ns > _LATE_HEARTBEAT_S * 1e9
            states.append(ProcessState.SILENT if is_late else ProcessState.RUNNING)
    return states


def _noted_end(header: RingHeader) -> ProcessState | None:
    return {End.ENDED: ProcessState.ENDED, End.RAISED: ProcessState.RAISED}.get(header.end)


def _refused(path: Path, message: str) -> PlanFileError:
    return PlanFileError(
        UNREADABLE_RING.finding(
            message, Location(str(path)), "name a directory with the rings of one job: one `rank_N.ring` for each rank"
        )
    )  # fmt: skip
