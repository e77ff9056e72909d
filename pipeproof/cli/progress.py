"""Progress of a command on a line of standard error, which appears at a terminal if the command takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_S = 1.0
"""Time without a line: commands that end before it show none, and load nothing for it."""

PLAIN_S = 10.0
"""Time between two lines without a terminal."""

OnProgress = Callable[[str, int, int], None]
"""Callback for progress: the current task, the number done and the total, which is 0 if it is not known."""


@contextmanager
def showing_progress(first: str, count: Callable[[int], str] = "{:,}".format) -> Iterator[OnProgress]:
    """Show progress, which begins as ``first``; yields the callback, which without a terminal writes a line each 10 s.

    ``count`` writes the number done and the total. Print nothing to standard output inside: it would get into the line.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # it may have been closed
        yield _PlainLines(count).update
        return
    import threading

    line = _Line(first, count)
    timer = threading.Timer(DELAY_S, line.show)
    timer.daemon = True  # an exit during the delay does not wait for it
    timer.start()
    try:
        yield line.update
    finally:
        timer.cancel()
        line.end()


class _PlainLines:
    """Lines of a file or a pipe: one each ten seconds."""

    def __init__(self, count: Callable[[int], str]) -> None:
        self._count, self._next = count, time.monotonic() + PLAIN_S

    def update(self, task: str, done: int, total: int) -> None:
        """Write the current task, the number done and the total, if the last line is old enough."""
        if time.monotonic() < self._next or sys.stderr is None:
            return
        self._next = time.monotonic() + PLAIN_S
        sys.stderr.write(f"{_text(task, done, total, self._count)}\n")
        sys.stderr.flush()


def _text(task: str, done: int, total: int, count: Callable[[int], str]) -> str:
    return f"{task}: {count(done)} of {count(total)}" if total else task


class _Line:
    """The line: the timer's thread shows it, the command's thread updates and ends it."""

    def __init__(self, first: str, count: Callable[[int], str]) -> None:
        import threading

        self._lock, self._count = threading.Lock(), count
        self._latest: tuple[str, int, int] = (first, 0, 0)
        self._bars: Progress | None = None
        self._ended = False

    def update(self, task: str, done: int, total: int) -> None:
        """Keep the current task, the number done and the total, and show them once the line is shown."""
        with self._lock:
            self._latest = (task, done, total)
            if self._bars is not None:
                self._refresh(self._bars)

    def show(self) -> None:
        """Show the line, unless it has ended."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        from pipeproof.cli.console import console_for

        text = TextColumn("{task.description}", markup=False)
        # Standard output stays as it is: rich would send it to the console of standard error.
        bars = Progress(
            text, BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console_for(stderr=True), transient=True, redirect_stdout=False,
        )  # fmt: skip
        with self._lock:
            if self._ended:
                return
            bars.add_task(self._latest[0], total=None)
            self._refresh(bars)
            bars.start()
            self._bars = bars

    def end(self) -> None:
        """Remove the line."""
        with self._lock:
            self._ended = True
            if self._bars is not None:
                self._bars.stop()

    def _refresh(self, bars: Progress) -> None:
        task, done, total = self._latest
        text = _text(task, done, total, self._count)
        bars.tasks[0].total = bars.tasks[0].total if total else None  # ``update`` cannot make a total unknown
        bars.update(bars.task_ids[0], description=text, completed=done, total=total or None)
