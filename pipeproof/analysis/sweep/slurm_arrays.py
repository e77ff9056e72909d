"""Slurm job arrays as the executor of a sweep, submitted by submitit (extra ``slurm``).

A task of an array is a process of its own, which starts Python and loads the package, after the scheduler has found a
processor for it: seconds, and a point takes milliseconds. So a task evaluates many points, and the tasks that wait at
one time are one array. Arguments and results are files of a folder that all hosts can see.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pipeproof.analysis.sweep.cluster import Cluster, ClusterError, TaskError, WorkerDiedError

_Params = ParamSpec("_Params")
_T = TypeVar("_T")

_ARRAY_SIZE = 1000
"""Most tasks of an array: below ``MaxArraySize`` of Slurm, 1001 unless a site has changed it."""
_LOOK_S = 1.0
"""Interval at which waiting calls are submitted, and the folder is listed."""
_GRACE_S = 15.0
"""Time after the end of a task in which its result may become visible on a slow file system."""
_ANSWER_S = 15
"""For Slurm's commands."""
_ALIVE = {"READY", "PENDING", "RUNNING", "UNKNOWN", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED"}
"""States in which a task has not ended. A preempted task has: it is not requeued."""
_LOG_LINES = 20


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the array's tasks. ``None`` leaves the default of the site."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: int = 60
    """Limit of a task, in minutes."""
    cpus: int = 1
    """Processors of a task."""
    mem: str | None = None
    """Memory of a task, such as 4G."""
    parallel: int = 256
    """Most tasks that run at once."""
    chunk: int = 100
    """Points of a task. The largest sweep, of 100,000 points, is then one array."""
    folder: str | None = None
    """Folder for arguments and results, which all hosts can see; by default that of the results file."""


@contextmanager
def open_slurm(options: SlurmOptions, folder: Path) -> Iterator[Cluster]:
    """Make a folder for job arrays below ``folder``, unless the options name another.

    In the end all jobs of this executor are cancelled. The folder is removed, unless there was an exception.

    Raises:
        ClusterError: Slurm's commands are missing or do not answer, or the folder cannot be written.
        ModuleNotFoundError: the ``submitit`` package is not installed.
    """
    import submitit

    _require_slurm()
    try:  # for this user alone: a result is a pickle, which runs the code of its writer here
        private = Path(tempfile.mkdtemp(prefix="pipeproof-slurm-", dir=options.folder or folder))
    except OSError as error:
        raise ClusterError(f"no folder for job arrays: {error}") from error
    backend = submitit.SlurmExecutor(private)
    settings = {
        "partition": options.partition, "account": options.account, "qos": options.qos,
        "constraint": options.constraint, "time": options.time, "cpus_per_task": options.cpus, "mem": options.mem,
        "array_parallelism": options.parallel,
    }  # fmt: skip
    # a task that was preempted or lost its host is not repeated here: its points are repeated once, each alone
    backend.update_parameters(
        job_name=private.name, additional_parameters={"no-requeue": True},
        **{key: value for key, value in settings.items() if value is not None},
    )  # fmt: skip
    executor = ArrayExecutor(backend, cancel_all=partial(_cancel_by_name, private.name))
    try:
        yield Cluster(executor, num_in_flight=sys.maxsize, chunk_size=options.chunk)
    finally:
        executor.shutdown(cancel_futures=True)
    shutil.rmtree(private, ignore_errors=True)


def _require_slurm() -> None:
    """Refuse what would hang later: the end of a task without a result is known from Slurm's accounting alone."""
    for command in ("sbatch", "srun", "scancel", "sacct"):
        if shutil.which(command) is None:
            raise ClusterError(f"no {command} here: start the sweep on a host that submits jobs to Slurm")
    try:
        subprocess.run(
            ["sacct", "--noheader", "--allocations", "--jobs=1"],  # noqa: S607 - from PATH, as the user's shell does
            capture_output=True, text=True, timeout=_ANSWER_S, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"sacct has not answered within {_ANSWER_S} s") from error
    except subprocess.CalledProcessError as error:
        raise ClusterError(
            f"sacct does not answer, and Slurm's accounting is needed: {error.stderr.strip()}"
        ) from error


def _cancel_by_name(name: str) -> None:
    """Cancel the jobs of this name: also one whose submission was interrupted before its number was read."""
    subprocess.run(["scancel", f"--user={getpass.getuser()}", f"--name={name}"], check=False)  # noqa: S607


class ArrayExecutor(Executor):
    """Calls as tasks of job arrays: those that wait at one time are one array.

    Args:
        backend: An executor of submitit, whose folder has no placeholders.
        cancel_all: Cancels all jobs of the backend; by default one after the other.
        look_s: Interval of submissions and of looks for results, in seconds.
        grace_s: Time for the result of a task to appear after its end, in seconds.
    """

    def __init__(
        self,
        backend: Any,
        cancel_all: Callable[[], None] | None = None,
        look_s: float = _LOOK_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._backend, self._cancel_all = backend, cancel_all
        self._look_s, self._grace_s = look_s, grace_s
        self._lock = threading.Lock()
        self._closed = False
        self._futures: set[Future[Any]] = set()
        """Those that have not ended."""
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._jobs: dict[Future[Any], Any] = {}
        self._ended_at: dict[Future[Any], float] = {}
        """Times at which tasks were seen to have ended without a result."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[_Params, _T], /, *args: _Params.args, **kwargs: _Params.kwargs) -> Future[_T]:
        """Submit a call, with the next array. If it raises, the error is a ``TaskError`` with the traceback."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise BrokenExecutor("the executor was shut down")
            self._futures.add(future)
            self._waiting.append((future, partial(function, *args, **kwargs)))
        future.add_done_callback(self._futures.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT002
        """Wait for the calls, or cancel them, running ones included, and stop looking for results."""
        with self._lock:
            self._closed = True
        if cancel_futures:
            self._stop()  # first: an array that is being submitted gets its number
            if self._cancel_all is not None and self._futures:
                self._cancel_all()
            elif self._cancel_all is None:
                for job in self._jobs.values():
                    job.cancel(check=False)
            for future in list(self._futures):
                future.cancel()
        elif wait:
            wait_for(list(self._futures))
            self._stop()

    def _stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._look_s) and (self._futures or not self._closed):
                self._submit_waiting()
                self._look()
        except Exception as error:  # noqa: BLE001 - a thread that ends here would leave waiters for ever
            with self._lock:
                self._closed = True
            for future in list(self._futures):
                _fail(future, BrokenExecutor(f"{type(error).__name__}: {error}"))

    def _submit_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        waiting = [(future, call) for future, call in waiting if not future.cancelled()]
        for first in range(0, len(waiting), _ARRAY_SIZE):
            futures, calls = zip(*waiting[first : first + _ARRAY_SIZE], strict=True)
            try:
                jobs = self._backend.submit_array(calls)
            except Exception as error:  # noqa: BLE001 - as Slurm's words come, and what pickle raises
                for future in futures:
                    _fail(future, ClusterError(f"the job array was not accepted: {error}"))
            else:
                self._jobs.update(zip(futures, jobs, strict=True))

    def _look(self) -> None:
        """End the futures of tasks that have ended. One listing of the folder, not a look per task, is kind to it."""
        if not self._jobs:
            return
        results = {path.name for path in Path(self._backend.folder).iterdir()}
        for future, job in list(self._jobs.items()):
            if future.cancelled():
                job.cancel(check=False)
            elif job.paths.result_pickle.name in results:
                _read(future, job)
            elif not self._has_ended(future, job):
                continue
            else:
                _fail(future, WorkerDiedError(_story(job)))
            del self._jobs[future]
            self._ended_at.pop(future, None)

    def _has_ended(self, future: Future[Any], job: Any) -> bool:
        """Report the end of a task without a result, once the result would be visible."""
        if future not in self._ended_at:
            if job.state.split()[0].upper() not in _ALIVE:  # submitit asks Slurm rarely, once for all jobs
                self._ended_at[future] = time.monotonic()
            return False
        return time.monotonic() - self._ended_at[future] > self._grace_s


def _read(future: Future[Any], job: Any) -> None:
    try:
        raised = job.exception()
        result = job.result() if raised is None else None
    except Exception as error:  # noqa: BLE001 - as a damaged file raises anything
        _fail(future, error)
        return
    if raised is not None:
        _fail(future, TaskError(str(raised)))
        return
    with suppress(InvalidStateError):  # cancelled
        future.set_result(result)


def _fail(future: Future[Any], error: Exception) -> None:
    with suppress(InvalidStateError):  # cancelled
        future.set_exception(error)


def _story(job: Any) -> str:
    """The state of a task that ended without a result, and the end of its log."""
    lines = (job.stderr() or job.stdout() or "").splitlines()[-_LOG_LINES:]
    return "\n".join((f"task {job.job_id} ended without a result (state {job.state})", *lines))
