"""Runs under an external launcher (``python -m paddle.distributed.launch``, ``torchrun``) on one machine.

Each process is one rank, identified by its environment. The ranks share a directory named after the launcher's process.
Rank 0 makes it, runs the reference when all ranks are done, compares, reports, and removes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
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
from pipeproof.exec.launch.supervisor import START_UP_TIMEOUT_S, WorkerFailedError
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.checkpointing import remove_unfinished
from pipeproof.exec.rank.worker import Emit, run_rank
from pipeproof.exec.run_codes import WORLD_SIZE
from pipeproof.exec.run_plan import StepCollector, finish_report, prepare_job, require_runnable
from pipeproof.exec.run_report import RunReport
from pipeproof.exit_status import ExitStatus
from pipeproof.verify.check_plan import Report

_Result = TypeVar("_Result")

_POLL_S = 0.02
_ENVIRONMENT = {
    "paddle": ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
}
"""Variables that each backend's launcher sets: the rank, the number of ranks, the rendezvous."""
_COMMAND = {"paddle": "python -m paddle.distributed.launch --nproc_per_node", "torch": "torchrun --nproc-per-node"}


def launched_rank() -> int | None:
    """Rank of this process if a launcher started it as one of several, else None."""
    names = next((names for names in _ENVIRONMENT.values() if all(name in os.environ for name in names)), None)
    return None if names is None else int(os.environ[names[0]])


def run_launched(
    rank: int,
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
        return execute_launched(rank, report, options, on_hang, conclude, on_note)
    finally:
        if rank == 0:
            remove_unfinished(options.checkpoint, _shared_directory().name)


def execute_launched(
    rank: int,
    report: Report,
    options: RunOptions,
    on_hang: Callable[[Finding], None],
    conclude: Callable[[Job, Emit, int], _Result],
    on_note: Callable[[Finding], None] = lambda _: None,
) -> _Result | None:
    """Run one rank of the job that rank 0 prepares; rank 0 concludes when all ranks have written their logs.

    ``conclude`` is given the job, the emitter and the largest number of compute threads that a worker measured.

    Raises:
        PipeproofError: see ``require_runnable``, or the launcher does not fit the plan: other processes than ranks, or
            another backend.
        WorkerFailedError: this rank failed, or another rank did not reach the end.
    """
    require_runnable(report, options)
    _require_world_size(report)
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


def _require_world_size(report: Report) -> None:
    backend, needed = report.subject.plan.spec.run.backend, report.subject.graph.num_ranks
    path: tuple[str, ...]
    names, fix = _ENVIRONMENT[backend], f"start it with {_COMMAND[backend]} {needed}"
    if not all(name in os.environ for name in names):
        fact = f"the launcher is not that of {backend}, which run.backend names"
        path = ("run", "backend")
    elif (started := int(os.environ[names[1]])) != needed:
        fact = f"the launcher started {started} processes, but the plan's topology has {needed} ranks"
        path = ("topology",)
    else:
        return
    location = report.subject.locate(*path)
    raise PipeproofError(Finding(WORLD_SIZE.code, Severity.ERROR, fact, location=location, help=fix))


def _shared_directory() -> Path:
    """Directory that all ranks of this launcher share."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
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
