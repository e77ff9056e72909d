"""Watch over the ranks of one host, and one verdict for all hosts when a rank fails.

Theory of operation
-------------------
Each process of a job is watched by a thread of its own: for its own progress and for its parent, the launcher. The
first rank of a host that is alive and not stopped is the host's watchdog: it also looks for the end of the other
processes, and alone asks the store whether the job is to stop.

A rank that notices a failure adds to a counter in the store; the one that reads 1 composes the verdict. On every host
the watchdog spreads the stop by a file, each rank writes its position and its error there, and the watchdog sends them
to the store. The composer joins the positions of all hosts that answer: so a peer's broken connection is not taken for
the cause, and a hang is traced to the rank for which the others wait. All ranks end with one exit status, after the
first rank of each host has printed the verdict. Processes of this host that do not end are killed.

If the store is gone, or does not answer, each host ends with what it knows: the host of the store has ended, or the
process with which the store has gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeproof.atomic_write import atomic_write
from pipeproof.diagnostics.finding import Finding
from pipeproof.exec.launch.hosts import Host
from pipeproof.exec.launch.meeting import VERDICT, JobEndedError, Meeting, Verdict
from pipeproof.exec.launch.supervisor import START_UP_TIMEOUT_S
from pipeproof.exec.launch.watchdog import JobState, RankState
from pipeproof.exec.rank.job_files import end_process
from pipeproof.exec.store.answering_store import AnsweringStore
from pipeproof.exec.store.polling import wait_until
from pipeproof.exec.store.process_state import is_stopped
from pipeproof.exec.store.run_codes import DIED
from pipeproof.exec.store.store import get_json, has_json, put_json
from pipeproof.foreign_text import decode_json, read_foreign
from pipeproof.system_calls import kill

_POLL_S, _STORE_POLL_S = 0.05, 0.5
_NOTE_S = 1.0
"""Time between two notes of a rank's position, for the case that its process can give none."""
_LOCAL_S = 1.5
"""Longest wait for the positions of a host's living ranks."""
_HOSTS_S = 5.0
"""Longest wait for the positions of other hosts, at the end for them to read the verdict, and for the store then."""
_VERDICT_S = 10.0
_STORE_S = 10.0
"""Shortest time without an answer after which the store counts as gone; the job's time limit is mostly longer."""
_ENDING_S = 5.0
"""Time in which a host's other processes end by themselves."""
_ANSWER_S = 2.0
"""Time in which the main thread takes the verdict; after it the process ends at once."""

_STOP, _CLAIMS, _LEFT = "stop", "stop claims", "left"
_FINISHED = "finished"
_LOCAL_CAUSES = frozenset({"ended", "stopped", "launcher"})
"""Reasons by which a host's own processes explain that the store does not answer."""


class HostWatch:
    """Watch of one rank.

    ``on_finding`` prints a finding of the verdict, on one rank of each host. With ``watches_launcher`` the parent
    process must live as long as this one.
    """

    def __init__(
        self,
        meeting: Meeting,
        state: JobState,
        timeout_s: float,
        on_finding: Callable[[Finding], None],
        *,
        watches_launcher: bool = True,
    ) -> None:
        self._meeting, self._state, self._timeout_s = meeting, state, timeout_s
        self._on_finding = on_finding
        self._store = AnsweringStore(meeting.store.of_thread(), max(timeout_s, _STORE_S))
        self._launcher = os.getppid() if watches_launcher else None
        self._last = time.monotonic()
        self._looked = self._noted = 0.0
        # Of wall clocks, which order the failures of different hosts as well as the hosts are synchronized.
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._is_busy, self._prints = True, False
        self._reason: str | None = None
        self._closed, self._asked, self._concluded = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._refused: Verdict | None = None
        self._verdict: Verdict | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def emit(self, kind: str, **content: Any) -> None:
        """Handle an event of this rank."""
        self._last = time.monotonic()
        self._state.handle(self._meeting.rank, {"kind": kind, **content}, self._last)
        if kind == "finished":
            self._file(_FINISHED).touch()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Expect no progress of this rank in the block: it waits for other ranks, which are watched themselves."""
        self._is_busy = False
        try:
            yield
        finally:
            self._last, self._is_busy = time.monotonic(), True

    def fail(self, reason: str, refused: Verdict | None = None) -> JobEndedError:
        """Stop the job, wait for the verdict, and leave; return the error to raise.

        ``reason`` is ``raised``, of which an event has the error, ``terminated``, or ``refused`` with a verdict.
        """
        # A launcher's signals: this process ends within seconds, with the verdict.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        with self._lock:
            self._reason, self._refused = self._reason or reason, refused
            self._asked.set()
        self._concluded.wait(_LOCAL_S + _HOSTS_S + _VERDICT_S)
        verdict = self._verdict or Verdict((_unanswered("the rank that was to name the cause"),))
        self._leave()
        return JobEndedError(*(verdict.findings if self._prints else ()), status=verdict.status)

    def close(self) -> None:
        """End the watch of a rank that has reached the end of its job."""
        self._closed.set()
        self._thread.join()

    # --- in the thread ---

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            reason = None
            try:
                self._note_position()
                reason = self._reason or self._own_reason() or self._reason_of_host()
                if reason is None:
                    continue
                verdict = self._conclude(reason)
            except (ConnectionError, TimeoutError, ValueError, OSError) as error:
                verdict = self._without_store(error, reason or _STOP)
            self._end(verdict)
            return

    def _note_position(self) -> None:
        now = time.monotonic()
        if now - self._noted > _NOTE_S:
            self._noted = now
            self._write("note", {"state": self._state.ranks[self._meeting.rank].content(self._offset_ns)})

    def _own_reason(self) -> str | None:
        if self._launcher not in (None, os.getppid()):
            return "launcher"
        if not self._is_busy:
            return None
        is_ready = self._state.ranks[self._meeting.rank].threads > 0
        patience = self._timeout_s if is_ready else max(self._timeout_s, START_UP_TIMEOUT_S)
        return "hang" if time.monotonic() - self._last > patience else None

    def _reason_of_host(self) -> str | None:
        if self._path(_STOP).exists():
            return _STOP
        if not self._is_watchdog():
            return None
        if self._dead():
            return "death of another"
        now = time.monotonic()
        if now - self._looked > _STORE_POLL_S:
            self._looked = now
            if self._store.has(_STOP):
                return _STOP
        return None

    def _is_watchdog(self) -> bool:
        return self._meeting.rank == self._watchdog()

    def _watchdog(self) -> int:
        """First rank of this host that is alive and not stopped."""
        for rank, identity in self._meeting.local.items():
            if rank == self._meeting.rank or (identity.process.is_alive and not is_stopped(identity.process.pid)):
                return rank
        return self._meeting.rank

    def _dead(self) -> list[int]:
        return [
            rank
            for rank, identity in self._meeting.local.items()
            if not identity.process.is_alive and not self._file(_FINISHED, rank).exists()
        ]

    def _conclude(self, reason: str) -> Verdict:
        # Else a store that does not answer would keep this rank longer than the watchdog waits for it.
        self._store = self._store.limited(_HOSTS_S)
        composes = reason != _STOP and self._store.add(_CLAIMS, 1) == 1
        if reason != _STOP:
            self._store.set(_STOP, "1")
        self._write_position(reason)
        self._prints = self._is_watchdog()
        if self._prints:
            self._path(_STOP).touch()
            put_json(self._store, f"position/{self._meeting.index}", self._positions_of_host())
        if composes:
            verdict = self._composed()
            put_json(self._store, VERDICT, verdict.content())
            return verdict
        if not wait_until(lambda: has_json(self._store, VERDICT), _VERDICT_S):
            return Verdict((_unanswered("the rank that was to name the cause"),))
        return Verdict.of(get_json(self._store, VERDICT, _HOSTS_S))

    def _write_position(self, reason: str) -> None:
        refused = None if self._refused is None else self._refused.content()
        state = self._state.ranks[self._meeting.rank].content(self._offset_ns)
        self._write("position", {"reason": reason, "state": state, "refused": refused})

    def _write(self, name: str, content: Any) -> None:
        with atomic_write(self._file(name)) as new:
            new.write_text(json.dumps(content))

    def _positions_of_host(self) -> dict[str, Any]:
        """Positions of this host's ranks; of ended and stopped ones the last that they noted."""
        ends, positions = time.monotonic() + _LOCAL_S, dict[str, Any]()
        waiting = set(self._meeting.local)
        while waiting:
            for rank in sorted(waiting):
                identity = self._meeting.local[rank].process
                stopped, alive = is_stopped(identity.pid), identity.is_alive
                if self._file("position", rank).exists():
                    positions[str(rank)] = decode_json(read_foreign(self._file("position", rank)))
                elif stopped or not alive or time.monotonic() > ends:
                    finished = self._file(_FINISHED, rank).exists()
                    reason = "stopped" if stopped else "finished" if finished else "ended" if not alive else "silent"
                    positions[str(rank)] = {"reason": reason, **self._last_note(rank)}
                else:
                    continue
                waiting.discard(rank)
            time.sleep(_POLL_S if waiting else 0.0)
        return positions

    def _last_note(self, rank: int) -> Any:
        try:
            return decode_json(read_foreign(self._file("note", rank)))
        except (OSError, ValueError):
            return {}

    def _composed(self) -> Verdict:
        """Verdict by the positions of all hosts."""
        ends, silent, positions = time.monotonic() + _HOSTS_S, [], dict[int, Mapping[str, Any]]()
        for index, host in enumerate(self._meeting.hosts):
            if wait_until(functools.partial(has_json, self._store, f"position/{index}"), ends - time.monotonic()):
                of_host = get_json(self._store, f"position/{index}", _HOSTS_S)
                positions |= {int(rank): position for rank, position in of_host.items()}
            else:
                silent.append(host)
        refused = [position["refused"] for position in positions.values() if position.get("refused")]
        if refused and not silent:
            return Verdict.of(refused[0])
        return Verdict((cause_of(self._state, positions, silent, self._meeting.hosts, self._timeout_s),))

    def _without_store(self, error: Exception, reason: str) -> Verdict:
        """Verdict where the store does not answer: this host's ranks end by themselves.

        If the store has gone with a process of this host, its end is the cause.
        """
        self._prints = self._is_watchdog()
        with contextlib.suppress(OSError):
            self._write_position(reason)
            self._path(_STOP).touch()
            positions = {int(rank): position for rank, position in self._positions_of_host().items()}
            if not _LOCAL_CAUSES.isdisjoint(position["reason"] for position in positions.values()):
                return Verdict((cause_of(self._state, positions, (), self._meeting.hosts, self._timeout_s),))
        return Verdict((_unanswered(f"the store, which {self._meeting.hosts[0]} holds,", f" ({error})"[:300]),))

    def _end(self, verdict: Verdict) -> None:
        """Let the main thread raise the verdict; if it is blocked, end this process."""
        self._verdict = verdict
        self._concluded.set()
        self._asked.wait(_ANSWER_S)
        with self._lock:  # held to the end: a main thread that comes now waits for it
            if self._asked.is_set():
                return
            for finding in verdict.findings if self._prints else ():
                with contextlib.suppress(Exception):
                    self._on_finding(finding)
            self._leave()
            end_process(verdict.status)

    def _leave(self) -> None:
        """Leave a failed job: the first rank left on a host ends what is left on the host and removes its files."""
        if self._is_watchdog():
            self._end_others()
            shutil.rmtree(self._meeting.directory, ignore_errors=True)
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._let_others_read()

    def _end_others(self) -> None:
        others = [each.process for rank, each in self._meeting.local.items() if rank != self._meeting.rank]
        wait_until(lambda: not any(other.is_alive and not is_stopped(other.pid) for other in others), _ENDING_S)
        for other in others:
            if other.is_alive:
                with contextlib.suppress(OSError):
                    kill(other.pid)

    def _let_others_read(self) -> None:
        """Rank 0 may serve the store: it stays until every host that answers has left."""
        if self._prints:
            self._store.add(_LEFT, 1)
        if self._meeting.rank == 0:
            wait_until(lambda: self._store.add(_LEFT) >= len(self._meeting.hosts), _HOSTS_S)

    def _file(self, name: str, rank: int | None = None) -> Path:
        return self._path(f"rank{self._meeting.rank if rank is None else rank}.{name}")

    def _path(self, name: str) -> Path:
        return self._meeting.directory / name


def cause_of(
    state: JobState,
    positions: Mapping[int, Mapping[str, Any]],
    silent: Sequence[Host],
    hosts: Sequence[Host],
    timeout_s: float,
) -> Finding:
    """Finding on the cause of a stop.

    A host that does not answer comes first, then ended processes, then the earliest error, since peers fail because of
    it; then a launcher that ended, a stopped process, and the rank for which the others wait.
    """
    for rank, position in positions.items():
        if "state" in position:
            state.ranks[rank] = RankState.of(position["state"])
    by_reason: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        by_reason.setdefault(position["reason"], []).append(rank)
    if silent:
        return _silent(silent, state, positions)
    if dead := by_reason.get("ended"):
        return state.died(dead[0], "ended without a report (killed, or out of the host's memory)")
    if raised := [rank for rank, position in positions.items() if state.ranks[rank].failure is not None]:
        return state.died(min(raised, key=lambda rank: _failed_at(state, rank)), "raised")
    if left := by_reason.get("launcher"):
        return _launcher_ended([host for host in hosts if set(left) & set(host.ranks)])
    if stopped := by_reason.get("stopped"):
        return state.hung(timeout_s, stopped[0])
    if terminated := by_reason.get("terminated"):
        return state.died(terminated[0], "was ended by a signal from outside")
    return state.hung(timeout_s)


def _failed_at(state: JobState, rank: int) -> int:
    failure = state.ranks[rank].failure
    assert failure is not None
    return failure.at_ns


def _silent(silent: Sequence[Host], state: JobState, positions: Mapping[int, Mapping[str, Any]]) -> Finding:
    names = ", ".join(map(str, silent))
    rank = next(iter(positions), None)
    seen = "" if rank is None else f"; meanwhile rank {rank} was {state.position_text(rank)}"
    return _unanswered(f"{'host' if len(silent) == 1 else 'hosts'} {names}", seen)


def _launcher_ended(hosts: Sequence[Host]) -> Finding:
    names = ", ".join(map(str, hosts))
    return DIED.finding(
        f"the launcher on {names} has ended before its ranks",
        help="look at why it ended: a signal, the job's limit of time or memory",
    )


def _unanswered(what: str, more: str = "") -> Finding:
    return DIED.finding(
        f"{what} does not answer: its processes have ended or are stopped, or it is not reachable{more}",
        help="look at the launcher's output on that host",
    )
