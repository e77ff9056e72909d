"""Calls become arrays of tasks and end as their tasks do; without submitit, whose jobs are imitated here."""

import time
from concurrent.futures import BrokenExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeproof.analysis.sweep import slurm_arrays
from pipeproof.analysis.sweep.cluster import ClusterError, TaskError, WorkerDiedError
from pipeproof.analysis.sweep.slurm_arrays import ArrayExecutor


class Job:
    """A task; it ends when the test says so."""

    def __init__(self, folder, number, call):
        self.job_id, self._call, self.state, self.cancelled = str(number), call, "PENDING", False
        self.paths = SimpleNamespace(result_pickle=Path(folder) / f"{number}_0_result.pkl")

    def run(self):
        self.paths.result_pickle.touch()

    def exception(self):
        try:
            self._call()
        except ZeroDivisionError as error:
            return RuntimeError(f"trace of {error}")
        return None

    def result(self):
        return self._call()

    def cancel(self, check):
        self.cancelled = True

    def stderr(self):
        return "\n".join(f"line {number}" for number in range(100))


class Backend:
    """Keeps the arrays that were submitted."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.arrays = folder, error, []

    def submit_array(self, calls):
        if self.error is not None:
            raise self.error
        first = sum(map(len, self.arrays))
        self.arrays.append([Job(self.folder, first + index, call) for index, call in enumerate(calls)])
        return self.arrays[-1]


@pytest.fixture
def backend(tmp_path):
    return Backend(tmp_path)


@pytest.fixture
def executor(backend):
    made = ArrayExecutor(backend, look_s=0.02, grace_s=0.1)
    yield made
    made.shutdown(cancel_futures=True)


def jobs_of(backend, count):
    deadline = time.monotonic() + 30
    while sum(map(len, backend.arrays)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [job for array in backend.arrays for job in array]


def test_calls_that_wait_together_are_one_array(backend, executor):
    futures = [executor.submit(pow, 2, number) for number in range(5)]
    jobs = jobs_of(backend, 5)
    assert len(backend.arrays) <= 2  # a look may have come between
    for job in reversed(jobs):
        job.run()
    assert [future.result(30) for future in futures] == [1, 2, 4, 8, 16]


def test_an_array_has_no_more_tasks_than_slurm_takes(backend, executor, monkeypatch):
    monkeypatch.setattr(slurm_arrays, "_ARRAY_SIZE", 3)
    for number in range(7):
        executor.submit(pow, 2, number)
    jobs_of(backend, 7)
    assert max(map(len, backend.arrays)) <= 3


def test_a_call_that_raises_and_a_task_that_ends_without_a_result(backend, executor):
    raised, died, alive = executor.submit(divmod, 1, 0), executor.submit(abs, 1), executor.submit(abs, -2)
    jobs = jobs_of(backend, 3)
    jobs[0].run()
    jobs[1].state = "OUT_OF_MEMORY"
    jobs[2].state = "RUNNING"
    with pytest.raises(TaskError, match="trace of"):
        raised.result(30)
    with pytest.raises(WorkerDiedError, match=r"task 1 ended without a result \(state OUT_OF_MEMORY\)\nline 80\n"):
        died.result(30)
    assert not alive.done()


def test_a_result_that_comes_late_counts(backend, tmp_path):
    executor = ArrayExecutor(backend, look_s=0.02, grace_s=60)
    future = executor.submit(abs, -2)
    (job,) = jobs_of(backend, 1)
    job.state = "COMPLETED"
    assert wait([future], timeout=0.2).not_done
    job.run()
    assert future.result(30) == 2
    executor.shutdown()


def test_a_refused_array_ends_its_calls(tmp_path):
    executor = ArrayExecutor(Backend(tmp_path, RuntimeError("invalid partition")), look_s=0.02)
    with pytest.raises(ClusterError, match="not accepted: invalid partition"):
        executor.submit(abs, 1).result(30)
    executor.shutdown()


def test_a_folder_that_goes_away_ends_all_calls(backend, executor, tmp_path):
    future = executor.submit(abs, 1)
    jobs_of(backend, 1)
    tmp_path.rmdir()
    assert isinstance(future.exception(30), BrokenExecutor)
    with pytest.raises(BrokenExecutor):
        executor.submit(abs, 1)
    tmp_path.mkdir()


def test_cancelling_one_call_leaves_the_others(backend, executor):
    cancelled, other = executor.submit(abs, 1), executor.submit(abs, -2)
    jobs = jobs_of(backend, 2)
    assert cancelled.cancel()
    jobs[1].run()
    assert other.result(30) == 2
    assert [job.cancelled for job in jobs] == [True, False]


@pytest.mark.parametrize("by_name", [True, False])
def test_shutdown_cancels_what_is_left(backend, by_name):
    calls = []
    executor = ArrayExecutor(backend, cancel_all=(lambda: calls.append(1)) if by_name else None, look_s=0.02)
    done, left = executor.submit(abs, -2), executor.submit(abs, 1)
    jobs = jobs_of(backend, 2)
    jobs[0].run()
    assert done.result(30) == 2
    executor.shutdown(cancel_futures=True)
    assert left.cancelled()
    assert (calls, jobs[1].cancelled) == (([1], False) if by_name else ([], True))
    with pytest.raises(BrokenExecutor):
        executor.submit(abs, 1)


def test_shutdown_waits_for_calls_and_cancels_nothing(backend):
    calls = []
    executor = ArrayExecutor(backend, cancel_all=lambda: calls.append(1), look_s=0.02)
    future = executor.submit(abs, -2)
    jobs_of(backend, 1)[0].run()
    executor.shutdown()
    assert future.done()
    executor.shutdown(cancel_futures=True)
    assert calls == []
