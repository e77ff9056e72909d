"""Running a sweep on any ``concurrent.futures`` executor; without one, on processes of its own.

A process that dies ends its whole pool, and the point that it evaluated is
unknown. All pending points are therefore tried once more, each alone: a point
that ends its process again has failed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

from pipeproof.analysis.sweep.evaluate_point import PointResult, Status, evaluate
from pipeproof.analysis.sweep.sweep_file import Sweep
from pipeproof.analysis.sweep.sweep_points import Point

_Params = ParamSpec("_Params")
_T = TypeVar("_T")

Evaluate = Callable[[Point, str], PointResult]


def run_sweep(
    sweep: Sweep,
    executor: Executor | None = None,
    *,
    done: Mapping[str, PointResult] | None = None,
    num_workers: int | None = None,
    num_in_flight: int | None = None,
    on_result: Callable[[PointResult], None] | None = None,
    evaluate_point: Evaluate = evaluate,
) -> tuple[PointResult, ...]:
    """Check and simulate the points of a sweep; the results in the order of its points.

    Args:
        sweep: What ``load_sweep`` read.
        executor: Where points are evaluated; it stays open. Without it, in ``num_workers`` processes on this machine.
        done: Results by point id that are there already: those points are skipped.
        num_workers: Processes; without it, as many as there are processors. Not with ``executor``.
        num_in_flight: Most points handed to the executor at once; twice the workers, with an executor of yours 64.
        on_result: Called in this thread with each new result, as it comes.
        evaluate_point: What is done with a point, and the file of the base plan. It must be picklable.

    Processes of our own import the caller's main module: a script calls this below ``if __name__ == "__main__"``.

    A point whose evaluation raises, or whose worker dies, is tried once more, then recorded as failed.

    Raises:
        ValueError: ``num_workers`` is given together with ``executor``.
        BrokenExecutor: an executor of yours takes no more points, or cancelled some. Results so far were given to
            ``on_result``.
    """
    if executor is not None and num_workers is not None:
        raise ValueError("num_workers is the number of our own processes: give it, or an executor")
    results = dict(done or {})
    waiting = deque(point for point in sweep.points if point.id not in results)
    num_workers = min(num_workers or os.cpu_count() or 1, max(1, len(waiting)))
    most = num_in_flight or (64 if executor is not None else 2 * num_workers)
    run = _Run(sweep.plan_file, evaluate_point)

    def keep(result: PointResult) -> None:
        results[result.id] = result
        if on_result is not None:
            on_result(result)

    if executor is not None:
        for result in run.results(executor, waiting, most):
            keep(result)
        if run.lost or waiting:
            raise BrokenExecutor("the executor broke, and takes no more points")
    while executor is None and (waiting or run.lost):
        # Any of several points may have ended the process: run alone, the next one that dies is it.
        points, workers, at_once = (run.lost, 1, 1) if run.lost else (waiting, num_workers, most)
        with _own_processes(workers) as pool:
            for result in run.results(pool, points, at_once):
                keep(result)
    return tuple(results[point.id] for point in sweep.points)


class _Run:
    def __init__(self, plan_file: str, evaluate_point: Evaluate) -> None:
        self._plan_file, self._evaluate = plan_file, evaluate_point
        self._tried: set[str] = set()
        """Points that raised, or that were under way when a pool broke."""
        self.lost: deque[Point] = deque()
        """Points to be tried again, because their executor broke."""

    def results(self, executor: Executor, waiting: deque[Point], num_in_flight: int) -> Iterator[PointResult]:
        """The results of ``waiting``, which empties, as they come; all of them, unless the executor breaks."""
        flying: dict[Future[PointResult], Point] = {}
        broken = False
        while flying or (waiting and not broken):
            while waiting and not broken and len(flying) < num_in_flight:
                try:
                    future = executor.submit(self._evaluate, waiting[0], self._plan_file)
                except BrokenExecutor:
                    broken = True
                else:
                    flying[future] = waiting.popleft()
            landed = wait(flying, return_when=FIRST_COMPLETED).done
            for future in [future for future in flying if future in landed]:  # in the order of the sweep
                point = flying.pop(future)
                if future.cancelled():  # as by a cluster that has gone
                    broken = True
                    self.lost.append(point)
                    continue
                error = future.exception()
                if error is None:
                    yield future.result()
                    continue
                broken = broken or isinstance(error, BrokenExecutor)
                if point.id in self._tried:
                    yield _failed(point, error)
                    continue
                self._tried.add(point.id)
                (self.lost if broken else waiting).append(point)


def _failed(point: Point, error: BaseException) -> PointResult:
    if isinstance(error, BrokenExecutor):
        message = "its worker process died, twice"
    else:
        message = f"{type(error).__name__}: {error}, twice"
    return PointResult(point.id, point.settings, Status.FAILED, message=message)


@contextmanager
def _own_processes(num_workers: int) -> Iterator[Executor]:
    """A pool of processes that ends at once when it is left by an exception, and takes its processes with it."""
    before = set(multiprocessing.active_children())
    # Spawned, not forked: the progress bar has a thread, and a copy of a process with threads may hang.
    pool = _Processes(num_workers, multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


class _Processes(ProcessPoolExecutor):
    """Processes that a Ctrl-C, which reaches every process of the terminal, does not: ours ends them itself."""

    def submit(self, function: Callable[_Params, _T], /, *args: _Params.args, **kwargs: _Params.kwargs) -> Future[_T]:
        """Submit a call; a process started for it inherits the blocked signal."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _interrupted_later():
                return super().submit(function, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Put a Ctrl-C off to the end, so that no process is left half started.

    To block it is not enough: the system hands it to a thread that does not (those of numerical libraries do not), and
    Python then interrupts the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one is ever interrupted
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
