"""Running under a launcher that is not ours (``python -m paddle.distributed.launch``, ``torchrun``), on one machine.

Each process is one rank, found by its environment. The ranks
share a directory named after the launcher's process; rank 0 makes it, runs the
reference when all ranks are done, compares, reports, and removes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeproof.exec.codes import WORLD_SIZE
from pipeproof.exec.compare import StepResult
from pipeproof.exec.failures import event_of
from pipeproof.exec.jobs import Job, dump_plan
from pipeproof.exec.kept import prepared, remove_unfinished
from pipeproof.exec.launch import START_UP_TIMEOUT_S, WorkerFailedError
from pipeproof.exec.own_layers import require_own_layers
from pipeproof.exec.reference import run_reference
from pipeproof.exec.report import RunReport
from pipeproof.exec.run import RunOptions, StepCollector, finish_report, require_runnable
from pipeproof.exec.watchdog import JobState
from pipeproof.exec.worker import Emit, run_rank
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.verify.check import Report

_Result = TypeVar("_Result")

_POLL_S = 0.02
_ENVIRONMENT = {
    "paddle": ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
}
"""By backend what its launcher says to each process: the rank, how many there are, where they meet."""
_COMMAND = {"paddle": "python -m paddle.distributed.launch --nproc_per_node", "torch": "torchrun --nproc-per-node"}


def launched_rank() -> int | None:
    """This process's rank, if a launcher started it as one of several; None otherwise."""
    names = next((names for names in _ENVIRONMENT.values() if all(name in os.environ for name in names)), None)
    return None if names is None else int(os.environ[names[0]])


def run_launched(
    rank: int,
    report: Report,
    options: RunOptions,
    on_step: Callable[[StepResult], None],
    on_hang: Callable[[Finding], None],
) -> RunReport | None:
    """Run one rank; rank 0 returns the report of all, the others None.

    Raises:
        NotVerifiedError: the plan has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed.
        PipeproofError: the launcher started another number of processes than the plan has ranks, or the
            planted failure of the options would never strike.
        WorkerFailedError: this rank failed, or the others did not come to their end.
    """
    require_runnable(report, options)

    def prepare(directory: Path) -> Job:
        layers = options.record is not None and options.record.layers
        job = Job(directory, dump_plan(report.subject.loaded), report.digest, options.fault, options.profile, layers)
        job = replace(job, share_gpus=options.share_gpus, kept=prepared(options.kept, report.subject, report.digest))
        job.save()
        require_own_layers(job, report.subject.loaded, max(options.timeout_s, START_UP_TIMEOUT_S))
        return job

    def conclude(job: Job, emit: Emit, threads: int) -> RunReport:
        run_reference(job, lambda step: emit("reference", step=step))
        collector = StepCollector(job, report.subject, options.record, needs_numbers=report.certificate is not None)
        for result in collector.collect(report.subject.plan.spec.run.steps):
            on_step(result)
        return finish_report(report, job, collector.results, threads)

    try:
        return carry_out_launched(rank, report, options.timeout_s, on_hang, prepare, run_rank, conclude)
    finally:
        if rank == 0:
            remove_unfinished(options.kept, _shared_directory().name)


def carry_out_launched(
    rank: int,
    report: Report,
    timeout_s: float,
    on_hang: Callable[[Finding], None],
    prepare: Callable[[Path], Job],
    work: Callable[[Job, int, Emit], None],
    conclude: Callable[[Job, Emit, int], _Result],
) -> _Result | None:
    """Do one rank's ``work`` on the job that rank 0 has prepared; rank 0 concludes when all ranks have left their logs.

    ``conclude`` is given the largest count of compute threads that a worker measured.

    Raises:
        PipeproofError: the launcher started another number of processes than the plan has ranks, or is another one.
        WorkerFailedError: this rank failed, or the others did not come to their end.
    """
    _require_world_size(report)
    state = JobState(report.subject)
    directory = _shared_directory()
    watch = _SelfWatch(state, rank, timeout_s, on_hang, directory)
    finished = False
    try:
        job = _shared_job(directory, rank, timeout_s, prepare)
        work(job, rank, watch.emit)
        finished = True
        if rank != 0:
            return None
        _await_files([job.log_file(r) for r in range(report.subject.graph.num_ranks)], timeout_s)
        return conclude(job, watch.emit, state.threads)
    except PipeproofError:
        raise
    except Exception as error:
        watch.emit("error", **event_of(error))
        raise WorkerFailedError(state.died(rank, "raised")) from error
    finally:
        watch.stop()
        if rank == 0 or not finished:  # rank 0 may be gone already, and waits for nothing that comes no more
            shutil.rmtree(directory, ignore_errors=True)


def _require_world_size(report: Report) -> None:
    backend, needed = report.subject.plan.spec.run.backend, report.subject.graph.num_ranks
    place: tuple[str, ...]
    names, mend = _ENVIRONMENT[backend], f"start it with {_COMMAND[backend]} {needed}"
    if not all(name in os.environ for name in names):
        fact = f"the launcher is not one of {backend}, which run.backend names"
        place = ("run", "backend")
    elif (started := int(os.environ[names[1]])) != needed:
        fact = f"the launcher started {started} processes, but the plan's topology has {needed} ranks"
        place = ("topology",)
    else:
        return
    location = report.subject.locate(*place)
    raise PipeproofError(Finding(WORLD_SIZE.code, Severity.ERROR, fact, location=location, help=mend))


def _shared_directory() -> Path:
    """Where all ranks of this launcher meet."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    key = hashlib.sha256(f"{parent} {started} {os.getuid()}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"pipeproof-launched-{key}"


def _shared_job(directory: Path, rank: int, timeout_s: float, prepare: Callable[[Path], Job]) -> Job:
    """The job in the directory that all ranks share; rank 0 makes it."""
    if rank == 0:
        directory.mkdir(mode=0o700)
        job = prepare(directory)
        (directory / "ready").touch()
        return job
    _await_files([directory / "ready"], timeout_s)
    return Job.load(directory)


def _await_files(files: list[Path], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := [file.name for file in files if not file.exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {', '.join(missing)} within {timeout_s:g} s")
        time.sleep(_POLL_S)


class _SelfWatch:
    """The watchdog of one rank: without a launcher of ours, each process watches itself."""

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
        """Take an event of this rank."""
        self._last = time.monotonic()
        self._state.handle(self._rank, {"kind": kind, **content}, self._last)

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            ready = self._state.ranks[self._rank].threads > 0
            patience = self._timeout_s if ready else max(self._timeout_s, START_UP_TIMEOUT_S)
            if time.monotonic() - self._last > patience:
                self._on_hang(self._state.hung(patience, self._rank))
                shutil.rmtree(self._directory, ignore_errors=True)
                os._exit(ExitStatus.WORKER_FAILED)
