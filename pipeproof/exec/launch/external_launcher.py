"""Runs under an external launcher (see ``exec.launch.launcher_table``) on one host.

Each process is one rank, identified by its environment. The ranks share a directory named after the launcher's process.
Rank 0 makes it, runs the reference when all ranks are done, compares, reports, and removes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipeproof.diagnostics.finding import Finding, PipeproofError, Severity
from pipeproof.exec.compare.compare_gradients import StepResult
from pipeproof.exec.compare.reference_process import run_reference
from pipeproof.exec.launch.failures import event_of
from pipeproof.exec.launch.job_files import Job, RunOptions
from pipeproof.exec.launch.launched_rank import LaunchedRank, launched_rank
from pipeproof.exec.launch.launcher_table import OF_BACKEND
from pipeproof.exec.launch.rendezvous import framework_variables
from pipeproof.exec.launch.supervisor import START_UP_TIMEOUT_S, WorkerFailedError
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.checkpointing import remove_unfinished
from pipeproof.exec.rank.worker import Emit, run_rank
from pipeproof.exec.run_codes import WORLD_SIZE
from pipeproof.exec.run_plan import StepCollector, finish_report, prepare_job, require_runnable
from pipeproof.exec.run_report import RunReport
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.verify.check_plan import Report

_Result = TypeVar("_Result")

_POLL_S = 0.02
_LOCAL = {"torch": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), "paddle": ("PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE")}
"""Variables of each framework for the rank among those of this host, and for their number."""


def join_launcher(run: RunSpec) -> LaunchedRank | None:
    """Rank of this process if a launcher started it as one of several, else None.

    A launcher that knows no framework sets none of the variables from which the plan's framework learns its rank; they
    are set here.

    Raises:
        PipeproofError: PP907, the launcher's variables are incomplete or contradict each other.
    """
    launched = launched_rank(os.environ, run.backend)
    if launched is not None and launched.launcher.backend is None:
        variables = framework_variables(run.backend, launched.rank, launched.world_size, launched.master, run.device)
        if run.backend == "paddle":  # init_parallel_env requires an address of this process, but nobody connects to it
            variables["PADDLE_CURRENT_ENDPOINT"] = f"{socket.gethostname()}:{launched.master[1]}"
        local_rank, local_world_size = _LOCAL[run.backend]
        variables[local_rank] = str(launched.local_rank)
        if launched.local_world_size is not None:
            variables[local_world_size] = str(launched.local_world_size)
        os.environ.update(variables)
    return launched


def run_launched(
    launched: LaunchedRank,
    report: Report,
    options: RunOptions,
    on_step: Callable[[StepResult], None],
    on_hang: Callable[[Finding], None],
    on_note: Callable[[Finding], None],
) -> RunReport | None:
    """Run one rank; rank 0 returns the report of all ranks, the others return None.

    Raises:
        NotVerifiedError: the plan has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed.
        PipeproofError: the launcher does not fit the plan, or the injected failure would never occur.
        WorkerFailedError: this rank failed, or another rank did not reach the end.
    """

    def conclude(job: Job, emit: Emit, threads: int) -> RunReport:
        run_reference(job, lambda step: emit("reference", step=step))
        collector = StepCollector(job, report.subject, options.record, requires_finite=report.certificate is not None)
        for result in collector.collect(report.subject.plan.spec.run.steps):
            on_step(result)
        return finish_report(report, job, collector.results, threads)

    try:
        return execute_launched(launched, report, options, on_hang, conclude, on_note)
    finally:
        if launched.rank == 0:
            remove_unfinished(options.checkpoint, _shared_directory().name)


def execute_launched(
    launched: LaunchedRank,
    report: Report,
    options: RunOptions,
    on_hang: Callable[[Finding], None],
    conclude: Callable[[Job, Emit, int], _Result],
    on_note: Callable[[Finding], None] = lambda _: None,
) -> _Result | None:
    """Run one rank of the job that rank 0 prepares; rank 0 concludes when all ranks have written their logs.

    ``conclude`` is given the job, the emitter and the largest number of compute threads that a worker measured.

    Raises:
        PipeproofError: see ``require_runnable``, or the launcher does not fit the plan: other processes than ranks,
            another backend, or ranks on several hosts.
        WorkerFailedError: this rank failed, or another rank did not reach the end.
    """
    require_runnable(report, options)
    _require_fit(launched, report)
    rank = launched.rank
    state = JobState(report.subject)
    directory = _shared_directory()
    watch = _SelfWatch(state, rank, options.timeout_s, on_hang, directory)
    finished = False
    try:
        job = _shared_job(directory, rank, report, options, on_note)
        run_rank(job, rank, watch.emit)
        finished = True
        if rank != 0:
            return None
        _await_files([job.rank_file(r, "log") for r in range(report.subject.graph.num_ranks)], options.timeout_s)
        return conclude(job, watch.emit, state.threads)
    except PipeproofError:
        raise
    except Exception as error:
        watch.emit("error", **event_of(error))
        raise WorkerFailedError(state.died(rank, "raised")) from error
    finally:
        watch.stop()
        if rank == 0 or not finished:  # without the directory rank 0 does not wait for a rank that failed
            shutil.rmtree(directory, ignore_errors=True)


def _require_fit(launched: LaunchedRank, report: Report) -> None:
    launcher, local = launched.launcher, launched.local_world_size
    backend, needed = report.subject.plan.spec.run.backend, report.subject.graph.num_ranks
    row = launcher if launcher.backend in (None, backend) else OF_BACKEND[backend]
    path: tuple[str, ...]
    fix = f"start it with {row.command.format(ranks=needed)}"
    if row is not launcher:
        fact = f"the launcher is not that of {backend}, which run.backend names"
        path = ("run", "backend")
    elif launched.world_size != needed:
        fact = f"the launcher started {launched.world_size} processes, but the plan's topology has {needed} ranks"
        path = ("topology",)
    elif local is not None and local < needed:
        fact = (
            f"the launcher started {local} of {needed} ranks on this host, but ranks share start signals, logs and "
            "results in a directory of one host's temporary files, which the other hosts lack"
        )
        path = ("topology",)
        fix += ", all on one host"
    else:
        return
    location = report.subject.locate(*path)
    raise PipeproofError(Finding(WORLD_SIZE.code, Severity.ERROR, fact, location=location, help=fix))


def _shared_directory() -> Path:
    """Directory that all ranks of this launcher share."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    started = (
        stat.read_text().rpartition(")")[2].split()[19] if parent else ""
    )  # the first process of a container has 0
    key = hashlib.sha256(f"{parent} {started} {os.getuid()}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"pipeproof-launched-{key}"


def _shared_job(
    directory: Path, rank: int, report: Report, options: RunOptions, on_note: Callable[[Finding], None]
) -> Job:
    """Job in the shared directory; rank 0 makes it."""
    if rank == 0:
        directory.mkdir(mode=0o700)
        job = prepare_job(report, options, directory, on_note)
        (directory / "ready").touch()
        return job
    _await_files([directory / "ready"], options.timeout_s)
    return Job.load(directory)


def _await_files(files: list[Path], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := [file.name for file in files if not file.exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {', '.join(missing)} within {timeout_s:g} s")
        time.sleep(_POLL_S)


class _SelfWatch:
    """Watchdog of one rank: under an external launcher each process watches itself."""

    def __init__(
        self,
        state: JobState,
        rank: int,
        timeout_s: float,
        on_hang: Callable[[Finding], None],
        directory: Path,
    ) -> None:
        self._state, self._rank, self._timeout_s, self._directory = state, rank, timeout_s, directory
        self._on_hang = on_hang
        self._last = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def emit(self, kind: str, **content: Any) -> None:
        """Handle an event of this rank."""
        self._last = time.monotonic()
        self._state.handle(self._rank, {"kind": kind, **content}, self._last)

    def stop(self) -> None:
        """Stop the watchdog."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            ready = self._state.ranks[self._rank].threads > 0
            patience = self._timeout_s if ready else max(self._timeout_s, START_UP_TIMEOUT_S)
            if time.monotonic() - self._last > patience:
                self._on_hang(self._state.hung(patience, self._rank))
                shutil.rmtree(self._directory, ignore_errors=True)
                os._exit(ExitStatus.WORKER_FAILED)
