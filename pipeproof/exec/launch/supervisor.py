"""Supervisor of a job's processes, one per rank and one for the reference: start, watch, stop, clean up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeproof.atomic_write import atomic_write
from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.units import size_text
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.job_files import Job
from pipeproof.exec.store.process_state import ProcessId, boot_id, is_ending, is_stopped
from pipeproof.exec.store.rendezvous import process_environment, rank_environment, reserved_ports
from pipeproof.exec.store.run_codes import DIED, HUNG
from pipeproof.foreign_text import MALFORMED, decode_json, open_foreign, read_foreign
from pipeproof.system_calls import address_space_limit, open_files_limit

# --- Hosts of a job by evidence, and the directories of jobs on this host ---
# A launcher's count of hosts is not used: two containers of one machine share neither files nor process numbers, and
# two agents of one machine may have separate temporary directories.


def own_host() -> tuple[str, str]:
    """Name of this host, and a text that is equal for processes that share its files and process numbers."""
    temporary = Path(tempfile.gettempdir()).stat()
    numbers = Path("/proc/self/ns/pid")
    namespace = str(numbers.stat().st_ino) if numbers.exists() else ""
    return socket.gethostname(), f"{boot_id()} {namespace} {temporary.st_dev}.{temporary.st_ino}"


@dataclass(frozen=True, slots=True)
class Host:
    """Ranks of one host in order."""

    name: str
    ranks: tuple[int, ...]


def hosts_of(machines: Sequence[tuple[str, str]]) -> tuple[Host, ...]:
    """Hosts by ``own_host`` of all ranks, in the order of their first ranks.

    Hosts with the same name get a number, as in ``node.2``.
    """
    ranks = grouped((machine, rank) for rank, machine in enumerate(machines))
    named: dict[str, int] = {}
    hosts = []
    for (name, _), own in ranks.items():
        named[name] = named.get(name, 0) + 1
        hosts.append(Host(name if named[name] == 1 else f"{name}.{named[name]}", tuple(own)))
    return tuple(hosts)


_DIRECTORY = re.compile(r"pipeproof-[0-9a-f]{32}")
_PROCESS = "process.json"


def make_directory(directory: Path) -> None:
    """Make the directory of a job on this host; remove directories of this user's jobs whose process has ended.

    Raises:
        FileExistsError: another process made it first.
    """
    remove_left_directories(directory.parent)
    directory.mkdir(mode=0o700)
    with atomic_write(directory / _PROCESS) as new:
        new.write_text(json.dumps({"machine": own_host()[1], **asdict(ProcessId.own())}))


def remove_left_directories(parent: Path) -> None:
    """Remove the directories of this user's jobs on this machine whose process has ended."""
    for left in parent.iterdir():
        if not _DIRECTORY.fullmatch(left.name):
            continue
        with contextlib.suppress(OSError, *MALFORMED):  # not ours, or being made
            status = left.lstat()
            if not stat.S_ISDIR(status.st_mode) or (sys.platform != "win32" and status.st_uid != os.getuid()):
                continue
            content = decode_json(read_foreign(left / _PROCESS))
            process = ProcessId(int(content["pid"]), str(content["started"]))
            if content["machine"] == own_host()[1] and not process.is_alive:  # nobody knows the end on another machine
                shutil.rmtree(left, ignore_errors=True)


START_UP_TIMEOUT_S = 60.0
"""Minimum of the watchdog's time until all ranks are ready: importing a framework on a busy machine is slow."""
_POLL_S = 0.05
_LEAST_FREE_BYTES = 2**16
"""Free space below which a disk counts as full: a process that ended may have freed some."""
_ENDING_S = 5.0
"""Longest wait for a process that the kernel is ending: it frees all its memory first."""


class WorkerFailedError(PipeproofError):
    """A worker died, raised or hung; everything was stopped."""


class JobEndedError(WorkerFailedError):
    """A rank of a launched job failed: each rank ends its process, threads of its framework included."""


@contextlib.contextmanager
def job_directory(logs: Path | None) -> Iterator[Path]:
    """Yield a new directory that is removed at the end; worker output is copied to ``logs`` first.

    The directory of a killed launcher is removed at the next start.
    """
    directory = Path(tempfile.gettempdir()) / f"pipeproof-{secrets.token_hex(16)}"
    make_directory(directory)
    try:
        yield directory
    finally:
        try:
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for log in directory.glob("*.out"):
                    shutil.copy(log, logs)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True)
class _Worker:
    name: str
    rank: int | None
    """None for the reference."""
    process: subprocess.Popen[bytes]
    events: int
    output: Path
    unread: bytes = b""
    listening: bool = True


class Launcher:
    """Launcher of one job: a process for each rank, which runs ``module``, and the reference if the job has one."""

    def __init__(
        self,
        job: Job,
        state: JobState,
        timeout_s: float,
        module: str = "pipeproof.exec.launch.worker",
        *,
        has_reference: bool = True,
    ) -> None:
        self._job, self._state, self._timeout_s = job, state, timeout_s
        self._module, self._has_reference = module, has_reference
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._reference_heard_s = 0.0
        self.reference_steps = 0
        """Number of steps that the reference has finished."""

    def run(self, on_progress: Callable[[], None]) -> None:
        """Start all processes and return when all have succeeded; ``on_progress`` is called after every event.

        Raises:
            WorkerFailedError: a worker died or raised, or no rank made progress within the watchdog's time.
        """
        with reserved_ports(self._state.subject.graph.num_ranks + 1) as ports:
            try:
                self._start_all(ports)
                self._watch(on_progress)
            finally:
                self._stop_all()

    def _start_all(self, ports: list[int]) -> None:
        num_ranks, run = self._state.subject.graph.num_ranks, self._state.subject.plan.spec.run
        for rank in range(num_ranks):
            environment = rank_environment(run.backend, rank, num_ranks, ports, run.device)
            self._start(f"rank{rank}", rank, self._module, environment)
        if self._has_reference and not self._job.options.profile:  # the reference would disturb measurements
            self._start_reference()
        for state in self._state.ranks:
            state.heard_s = time.monotonic()

    def _start_reference(self) -> None:
        self._start("reference", None, "pipeproof.exec.compare.reference_process", process_environment())
        self._reference_heard_s = time.monotonic()

    def _start(self, name: str, rank: int | None, module: str, environment: dict[str, str]) -> None:
        read_end, write_end = os.pipe()
        output = self._job.directory / f"{name}.out"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self._job.directory), str(write_end), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=environment,
                start_new_session=True,  # Ctrl-C only reaches the launcher, which then stops the workers
            )
        os.close(write_end)
        if sys.platform != "win32":  # runs are refused there
            os.set_blocking(read_end, False)
        worker = _Worker(name, rank, process, read_end, output)
        self._workers.append(worker)
        self._selector.register(read_end, selectors.EVENT_READ, worker)

    def _watch(self, on_progress: Callable[[], None]) -> None:
        while any(w.process.poll() is None for w in self._workers) or self._selector.get_map():
            ready = self._selector.select(_POLL_S)
            for key, _ in ready:
                self._read(key.data)
            alone = all(worker.rank is not None for worker in self._workers)
            if self._has_reference and self._state.all_finished and alone:
                self._start_reference()
            # Check right after reading, before a pause of this process (comparing a large step), and not while ranks
            # send events. Events of the reference do not count as progress of the ranks.
            if all(key.data.rank is None for key, _ in ready):
                self._raise_if_dead()
                self._raise_if_hung()
            if ready:
                on_progress()
            self._raise_if_dead()
        self._raise_if_dead()

    def _raise_if_hung(self) -> None:
        """Check the time of the ranks' last event, and of the reference's once the ranks have finished."""
        heard = self._state.last_heard_s
        if self._state.all_finished:
            heard = max(heard, self._reference_heard_s)  # the reference may have finished long before the ranks
        patience = self._timeout_s if self._state.all_ready else max(self._timeout_s, START_UP_TIMEOUT_S)
        if time.monotonic() - heard > patience:
            raise WorkerFailedError(_with_limits(self._hang(patience)))

    def _read(self, worker: _Worker) -> None:
        data = os.read(worker.events, 1 << 16)
        if not data:
            self._selector.unregister(worker.events)
            worker.listening = False
            return
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines:
            event = decode_json(line)
            if worker.rank is not None:
                self._state.handle(worker.rank, event, time.monotonic())
            elif event["kind"] == "step":
                self.reference_steps = event["step"] + 1
                self._reference_heard_s = time.monotonic()

    def _raise_if_dead(self) -> None:
        dead = [w for w in self._workers if w.process.poll() not in (None, 0)]
        if not dead:
            return
        # A killed rank closes its connections before it can be waited for, and its peers fail because of that.
        ending = [w for w in self._workers if w not in dead and is_ending(w.process.pid)]
        for worker in ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_ENDING_S)
        dead += [w for w in ending if w.process.poll() not in (None, 0)]
        self._drain()
        raised = [w for w in self._workers if w.rank is not None and self._state.ranks[w.rank].failure is not None]
        # a rank that raised may still be ending
        raise WorkerFailedError(_with_limits(self._death(min([*dead, *raised], key=self._blame))))

    def _drain(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(BlockingIOError):
                while worker.listening:
                    self._read(worker)

    def _blame(self, worker: _Worker) -> tuple[int, int]:
        """Sort key of the worker to blame: killed workers first, then the earliest error, because peers fail later."""
        if worker.rank is None:
            return (2, 0)
        failure = self._state.ranks[worker.rank].failure
        return (0, 0) if failure is None else (1, failure.at_ns)

    def _death(self, worker: _Worker) -> Finding:
        if worker.rank is not None and self._state.ranks[worker.rank].failure is not None:
            return self._state.died(worker.rank, "raised")
        status = worker.process.returncode
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if shutil.disk_usage(self._job.directory).free < _LEAST_FREE_BYTES:
            name = "the reference process" if worker.rank is None else f"the process of rank {worker.rank}"
            return DIED.finding(
                f"{name} {end}: the disk of {self._job.directory.parent} is full",
                help="free space there, or name a directory of another disk in TMPDIR",
            )
        if worker.rank is None:
            return DIED.finding(
                f"the reference process {end}: {_last_line(worker.output)}",
                help="`--logs DIR` keeps the output of each process",
            )
        return self._state.died(worker.rank, end)

    def _hang(self, patience_s: float) -> Finding:
        stopped = [w.rank for w in self._workers if w.rank is not None and is_stopped(w.process.pid)]
        if self._has_reference and self._state.all_finished:
            return HUNG.finding(
                f"the reference process has finished no step for {patience_s:g} s",
                help="a larger `--timeout` gives it more time",
            )
        return self._state.hung(patience_s, stopped[0] if stopped else None)

    def _stop_all(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            os.close(worker.events)
        self._selector.close()


def _with_limits(finding: Finding) -> Finding:
    """Add process limits that may be too low: frameworks fail at them in many ways, and rarely name them."""
    space, files = address_space_limit(), open_files_limit()
    low = [] if space is None else [f"an address space of {size_text(space)} (`ulimit -v`)"]
    if files is not None and files < _ENOUGH_FILES:
        low.append(f"{files} open files (`ulimit -n`)")
    if not low:
        return finding
    text = f"each process may have only {' and '.join(low)}, which may be too little"
    return replace(finding, help=f"{finding.help}; {text}" if finding.help else text)


_ENOUGH_FILES = 256
"""Open files that are enough for a process of a small run; a rank of a larger run has some for each peer."""


_LAST_BYTES = 2**16


def _last_line(path: Path) -> str:
    with open_foreign(path) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
