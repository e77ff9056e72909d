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
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from pipeproof.analysis.sweep.evaluate_point import Evaluate, PointResult, Status, evaluate, evaluate_chunk
from pipeproof.analysis.sweep.sweep_points import Point, Sweep
from pipeproof.system_calls import interrupt_blocked
from pipeproof.version import __version__

_Params = ParamSpec("_Params")
_T = TypeVar("_T")


class OtherVersionError(RuntimeError):
    """A worker has another version of pipeproof, whose verdicts may differ."""


def run_sweep(
    sweep: Sweep,
    executor: Executor | None = None,
    *,
    done: Mapping[str, PointResult] | None = None,
    num_workers: int | None = None,
    num_in_flight: int | None = None,
    chunk_size: int = 1,
    on_result: Callable[[PointResult], None] | None = None,
    evaluate_point: Evaluate = evaluate,
) -> tuple[PointResult, ...]:
    """Check and simulate the points of a sweep; the results in the order of its points.

    Args:
        sweep: The points, such as ``sweep_of_plan`` has them.
        executor: Where points are evaluated; it stays open. Without it, in ``num_workers`` processes on this machine.
        done: Results by point id that are there already: those points are skipped.
        num_workers: Processes; without it, as many as there are processors. Not with ``executor``.
        num_in_flight: Most calls handed to the executor at once; twice the workers, with an executor of yours 64.
        chunk_size: Points of one call. A point that is tried again has a call of its own.
        on_result: Called in this thread with each new result, as it comes.
        evaluate_point: What is done with a point, and the file of the base plan. It must be picklable.

    Processes of our own import the caller's main module: a script calls this below ``if __name__ == "__main__"``.

    A point whose evaluation raises, or whose worker dies, is tried once more, then recorded as failed.

    Raises:
        ValueError: ``num_workers`` is given together with ``executor``.
        BrokenExecutor: an executor of yours takes no more points, or cancelled some. Results so far were given to
            ``on_result``.
        OtherVersionError: a worker has another version of pipeproof.
    """
    if executor is not None and num_workers is not None:
        raise ValueError("num_workers is the number of our own processes: give it, or an executor")
    results = dict(done or {})
    waiting = deque(point for point in sweep.points if point.id not in results)
    num_workers = min(num_workers or os.cpu_count() or 1, max(1, len(waiting)))
    most = num_in_flight or (64 if executor is not None else 2 * num_workers)

    def keep(result: PointResult) -> None:
        results[result.id] = result
        if on_result is not None:
            on_result(result)

    with _interrupted_later() as raise_if_interrupted:
        run = _Run(sweep.plan_file, evaluate_point, chunk_size, raise_if_interrupted)
        if executor is not None:
            for result in run.results(executor, waiting, most):
                keep(result)
            if run.lost or waiting:
                raise BrokenExecutor("the executor broke, and takes no more points")
        while executor is None and (waiting or run.lost):
            # Any of several points may have ended the process: run alone, the next one that dies is it.
            points, workers, at_once = (run.lost, 1, 1) if run.lost else (waiting, num_workers, most)
            with own_processes(workers) as pool:
                for result in run.results(pool, points, at_once):
                    keep(result)
    return tuple(results[point.id] for point in sweep.points)


class _Run:
    def __init__(
        self, plan_file: str, evaluate_point: Evaluate, chunk_size: int, raise_if_interrupted: Callable[[], None]
    ) -> None:
        self._plan_file, self._evaluate, self._chunk_size = plan_file, evaluate_point, chunk_size
        self._raise_if_interrupted = raise_if_interrupted
        self._tried: set[str] = set()
        """Points that raised, or that were under way when a pool broke."""
        self.lost: deque[Point] = deque()
        """Points to be tried again, because their executor broke."""

    def results(self, executor: Executor, waiting: deque[Point], num_in_flight: int) -> Iterator[PointResult]:
        """The results of ``waiting``, which empties, as they come; all of them, unless the executor breaks."""
        flying: dict[_Call, list[Point]] = {}
        broken = False
        while flying or (waiting and not broken):
            while waiting and not broken and len(flying) < num_in_flight:
                chunk = self._next_chunk(waiting)
                try:
                    future = executor.submit(evaluate_chunk, chunk, self._plan_file, self._evaluate)
                except BrokenExecutor:
                    broken = True
                    waiting.extendleft(reversed(chunk))
                else:
                    flying[future] = chunk
            landed = self._landed(flying)
            for future in [future for future in flying if future in landed]:  # in the order of the sweep
                chunk = flying.pop(future)
                if future.cancelled():  # as by a cluster that has gone
                    broken = True
                    self.lost.extend(chunk)
                    continue
                broken = broken or isinstance(future.exception(), BrokenExecutor)
                for point, outcome in zip(chunk, _outcomes(future, len(chunk)), strict=True):
                    if "raised" not in outcome:
                        yield PointResult.from_json(outcome)
                    elif point.id in self._tried:
                        message, traceback = f"{outcome['raised']}, twice", outcome["traceback"]
                        yield PointResult(point.id, point.settings, Status.FAILED, message=message, traceback=traceback)
                    else:
                        self._tried.add(point.id)
                        (self.lost if broken else waiting).append(point)

    def _landed(self, flying: Collection[_Call]) -> set[_Call]:
        """Wait for calls that have ended; none without calls.

        Raises:
            KeyboardInterrupt: Ctrl-C came.
        """
        landed: set[_Call] = set()
        while flying and not landed:
            self._raise_if_interrupted()
            landed = wait(flying, timeout=_INTERRUPT_POLL_S, return_when=FIRST_COMPLETED).done
        return landed

    def _next_chunk(self, waiting: deque[Point]) -> list[Point]:
        """Take the points of the next call; a point that is tried again is alone, because its worker may have died."""
        chunk = [waiting.popleft()]
        while waiting and len(chunk) < self._chunk_size and not {chunk[0].id, waiting[0].id} & self._tried:
            chunk.append(waiting.popleft())
        return chunk


_Call = Future[tuple[str, list[dict[str, Any]]]]
"""A call of ``evaluate_chunk``."""


def _outcomes(future: _Call, num_points: int) -> list[dict[str, Any]]:
    """The value of each point of a call that has ended; if the call has none, the same failure for all of its points.

    Raises:
        OtherVersionError: the worker has another version.
    """
    error = future.exception()
    if error is None:
        version, outcomes = future.result()
        if version != __version__:
            raise OtherVersionError(
                f"a worker has pipeproof {version}, and this is {__version__}: install the same there"
            )
        return outcomes
    raised = "its worker process died" if isinstance(error, BrokenExecutor) else f"{type(error).__name__}: {error}"
    return [{"raised": raised, "traceback": str(error) or None}] * num_points


@contextmanager
def own_processes(num_workers: int) -> Iterator[Executor]:
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
        with interrupt_blocked():
            return super().submit(function, *args, **kwargs)


_INTERRUPT_POLL_S = 0.1
"""Longest time from a Ctrl-C until it takes effect, unless a result is being processed."""


@contextmanager
def _interrupted_later() -> Iterator[Callable[[], None]]:
    """Postpone a Ctrl-C until the yielded function is called, or to the end.

    Futures and pools share locks with their threads. An exception between the acquisition of such a lock and the block
    that releases it, as KeyboardInterrupt can be, leaves the lock acquired, and the pool then never ends. A process
    would be left half started, too. To block the signal is not enough: the system gives it to a thread that does not
    block it (those of numerical libraries do not), and Python then interrupts the main thread all the same.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()  # only that one is ever interrupted
    if not in_main_thread or handler in (signal.SIG_IGN, None):
        yield lambda: None
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    def raise_if_interrupted() -> None:
        nonlocal came
        if came:
            came = False
            signal.signal(signal.SIGINT, handler)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, note)

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
