"""A watched job as it is now: the ring of each rank, and whether its process runs."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.launch.process_state import ProcessId, boot_id, is_stopped
from pipeproof.exec.monitor.monitor_codes import UNREADABLE_RING
from pipeproof.exec.monitor.ring import End, OpState, Ring, RingHeader, RingOp, read_header, read_ring

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
    """On another host, or in copied files: its heartbeat ended before that of the others."""
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

    @cached_property
    def blocking(self) -> tuple[RingOp, ...]:
        """Operations that the host is in, or else the first one that the device has not finished behind a wait."""
        in_host = tuple(op for op in self.ring.ops if op.state in (OpState.ISSUED, OpState.WAITED))
        return in_host or tuple(op for op in self.ring.ops if op.state is OpState.QUEUED)[:1]

    def is_behind(self, op: RingOp) -> bool:
        """True for an operation that the host queued on the device behind the operation that blocks the device."""
        first = next((op for op in self.ring.ops if op.state is OpState.QUEUED), None)
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
        """Time of the last event that the ring has; the start of the watch without any."""
        times = [max(op.issued_ns, op.waited_ns, op.done_ns) for op in self.ring.ops]
        return max(times, default=self.ring.header.started_ns)

    @property
    def own_line(self) -> str:
        """Line of the program where the main thread is, as ``file:line function``; empty if it is unknown."""
        stack = self.ring.header.stack
        return next((line.removeprefix("*") for line in stack if line.startswith("*")), next(iter(stack), ""))

    def plan_position(self, now_ns: int) -> str:
        """Operation of the plan that the rank is in, with step and seconds; empty where pipeproof executes no plan."""
        header = self.ring.header
        if not header.plan_op:
            return ""
        seconds = max(0.0, (now_ns - header.plan_op_ns) / 1e9)
        micro_batch = "" if header.micro_batch is None else f", micro-batch {header.micro_batch}"
        of = f"step {header.step}, stage {header.stage}{micro_batch}"
        return f"rank {self.rank} has been in {header.plan_op} ({of}) for {seconds:.1f} s"


@dataclass(frozen=True)
class JobNow:
    """All ranks of a job at one time; ``missing`` are ranks without a ring."""

    ranks: tuple[RankNow, ...]
    missing: tuple[int, ...]
    now_ns: int

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
        PlanFileError: PP952, a file is no ring, or the rings are of different jobs.
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

    If the last heartbeat of all ranks is old, the time is that heartbeat's: the
    job is checked as it was when it ended.

    Raises:
        PlanFileError: PP952, a file is no ring, or the rings are of different jobs.
    """
    headers = read_headers(files)
    rings = tuple(read_ring(path) for path in files.values())
    states = process_states(headers)
    last_ns = max((max(header.heartbeat_ns, header.end_ns) for header in headers), default=0)
    num_ranks = headers[0].num_ranks if headers else 0
    missing = tuple(rank for rank in range(num_ranks) if rank not in files)
    ranks = tuple(RankNow(ring, state) for ring, state in zip(rings, states, strict=True))
    now_ns = time.time_ns()
    is_live = ProcessState.STOPPED in states or now_ns - last_ns < _LIVE_S * 1e9
    return JobNow(ranks, missing, now_ns if is_live else last_ns)


def process_states(headers: Sequence[RingHeader]) -> list[ProcessState]:
    """Return the state of each rank's process.

    If the files were copied or all processes are gone, a rank counts as gone
    only if its heartbeat ended before that of the others.
    """
    here = socket.gethostname(), boot_id()
    last_ns = max((header.heartbeat_ns for header in headers), default=0)
    states = []
    for header in headers:
        if header.end is not End.NONE:
            states.append(ProcessState.RAISED if header.end is End.RAISED else ProcessState.ENDED)
        elif (header.host, header.boot_id) == here and ProcessId(header.pid, header.process_start).is_alive:
            states.append(ProcessState.STOPPED if is_stopped(header.pid) else ProcessState.RUNNING)
        elif (header.host, header.boot_id) == here:
            states.append(ProcessState.GONE)
        else:
            is_late = last_ns - header.heartbeat_ns > _LATE_HEARTBEAT_S * 1e9
            states.append(ProcessState.SILENT if is_late else ProcessState.RUNNING)
    if all(state in (ProcessState.GONE, ProcessState.SILENT) for state in states):
        return [
            ProcessState.GONE if last_ns - header.heartbeat_ns > _LATE_HEARTBEAT_S * 1e9 else ProcessState.RUNNING
            for header in headers
        ]
    return states


def _refused(path: Path, message: str) -> PlanFileError:
    return PlanFileError(
        UNREADABLE_RING.finding(
            message, Location(str(path)), "name a directory with the rings of one job: one `rank_N.ring` for each rank"
        )
    )  # fmt: skip
