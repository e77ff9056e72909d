"""Running a sweep on any ``concurrent.futures`` executor; without one, on processes of its own.

A process that dies ends its whole pool, and its point is unknown. All points under way are therefore
tried again, each alone: a point that ends its process then has failed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar

from pipeproof.analysis.sweep.evaluate_point import Evaluate, PointResult, evaluate, evaluate_here, failed_point
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
    num_workers: int | None = None,
    on_result: Callable[[PointResult], None] | None = None,
    evaluate_point: Evaluate = evaluate,
) -> tuple[PointResult, ...]:
    """Check and simulate the points of a sweep; the results in the order of its points.

    Args:
        sweep: The points, such as ``sweep_of_plan`` has them.
        executor: Where points are evaluated, at most 64 at once; it stays open. Without it, in ``num_workers``
            processes on this machine.
        num_workers: Processes; without it, as many as there are processors. Not with ``executor``.
        on_result: Called in this thread with each result, as it comes.
        evaluate_point: Function of a point and the file of the base plan. It must be picklable.

    Processes of our own import the caller's main module: a script calls this below ``if __name__ == "__main__"``.

    A point fails if its evaluation raises, or if its worker dies twice: the second time it is tried alone.

    Raises:
        ValueError: ``num_workers`` is given together with ``executor``.
        BrokenExecutor: your executor accepts no more points, or cancelled some. ``on_result`` already got the results
            so far.
        OtherVersionError: a worker has another version of pipeproof.
    """
    if executor is not None and num_workers is not None:
        raise ValueError("num_workers is the number of our own processes: give it, or an executor")
    results: dict[str, PointResult] = {}
    waiting, lost = deque(sweep.points), deque[Point]()
    num_workers = min(num_workers or os.cpu_count() or 1, max(1, len(waiting)))

    def keep(point: Point, result: PointResult) -> None:
        results[point.id] = result
        if on_result is not None:
            on_result(result)

    with _interrupted_later() as raise_if_interrupted:
        run = _Run(sweep.plan_file, evaluate_point, keep, raise_if_interrupted)
        if executor is not None:
            lost = run.on(executor, waiting, 64)
            if lost or waiting:
                raise BrokenExecutor("the executor broke, and takes no more points")
        while executor is None and (waiting or lost):
            if lost:
                suspect = lost.popleft()
                with own_processes(1) as pool:
                    run.on(pool, deque([suspect]), 1)
                    if suspect.id not in results:
                        keep(suspect, failed_point(suspect, "its worker process died"))
            else:
                with own_processes(num_workers) as pool:
                    lost = run.on(pool, waiting, 2 * num_workers)
    return tuple(results[point.id] for point in sweep.points)


@dataclass(frozen=True)
class _Run:
    plan_file: str
    evaluate: Evaluate
    keep: Callable[[Point, PointResult], None]
    raise_if_interrupted: Callable[[], None]

    def on(self, executor: Executor, waiting: deque[Point], most: int) -> deque[Point]:
        """Evaluate ``waiting``, which empties unless the executor breaks, and return the points that were lost then."""
        flying: dict[Future[tuple[str, PointResult]], Point] = {}
        lost, broken = deque[Point](), False
        while flying or (waiting and not broken):
            while waiting and not broken and len(flying) < most:
                try:
                    future = executor.submit(evaluate_here, waiting[0], self.plan_file, self.evaluate)
                except BrokenExecutor:
                    broken = True
                else:
                    flying[future] = waiting.popleft()
            landed: set[Future[tuple[str, PointResult]]] = set()
            while flying and not landed:
                self.raise_if_interrupted()
                landed = wait(flying, timeout=_INTERRUPT_POLL_S, return_when=FIRST_COMPLETED).done
            for future in [future for future in flying if future in landed]:  # in the order of the sweep
                point = flying.pop(future)
                # A cluster that has gone cancels.
                if future.cancelled() or isinstance(future.exception(), BrokenExecutor):
                    broken = True
                    lost.append(point)
                elif (error := future.exception()) is not None:
                    self.keep(point, failed_point(point, f"{type(error).__name__}: {error}"))
                else:
                    version, result = future.result()
                    if version != __version__:
                        raise OtherVersionError(
                            f"a worker has pipeproof {version}, and this is {__version__}: install the same there"
                        )
                    self.keep(point, result)
        return lost


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
    """Processes that ignore Ctrl-C, which every process of the terminal gets: the parent ends them itself."""

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
    could also be left half started. To block the signal is not enough: the system gives it to a thread that does not
    block it (threads of numerical libraries do not), and Python then interrupts the main thread all the same.
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
