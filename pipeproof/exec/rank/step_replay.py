"""Progress of a device whose host runs ahead, and steps that are replayed as a whole from the second step on.

A replay takes the host's work out of a step; this work limits small stages on fast GPUs. It repeats the second step in
memory that stays allocated. So only the second step, which is captured, and the first, which loads kernels and opens
connections, have a log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.specs.plan_sections import RunSpec

POLL_S = 0.1
"""Interval between two reads of a device's progress."""


class DeviceProgress(Protocol):
    """Progress of a device: it writes each operation that it reaches, and the host reads the last one at any time."""

    def begin(self, step: int) -> None:
        """Begin a step."""

    def write(self, op_id: int) -> None:
        """Launch the writing of an operation's number after all work launched before."""

    def read(self) -> tuple[int, int]:
        """Return the last step and operation that the device reached, -1 before the first, without waiting."""


@contextmanager
def follow_device(read: Callable[[], tuple[int, int]] | None, report: Callable[[int, int], None]) -> Iterator[None]:
    """Within the context, call ``report`` with each new step and operation of a device that ``read`` returns.

    Numbers below 0 mean that the device has reached no operation yet. Without ``read`` nothing is reported.
    """
    if read is None:
        yield
        return
    ended = threading.Event()

    def poll() -> None:
        last = (-1, -1)
        while not ended.wait(POLL_S):
            now = read()
            if -1 not in now and now != last:
                report(*now)
                last = now

    thread = threading.Thread(target=poll, name="device progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Replays(Protocol):
    """Capture of launched work on a device, and the progress of its replay."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays everything that ``work`` launches; nothing is computed now."""

    def write(self, op_id: int) -> None:
        """Launch the writing of an operation's number after all work launched before."""

    def read(self) -> int:
        """Return the last written number, -1 before the first, without waiting."""


def num_logged_steps(run: RunSpec, *, layers: bool, first_step: int = 0) -> int:
    """Number of logged steps of a run that begins with ``first_step``; steps with ``layers`` are not replayed."""
    num_steps = run.steps - first_step
    return min(num_steps, 2) if run.replay and not layers else num_steps


class ReplayedSteps:
    """Runner of a rank's steps; ``program`` executes one step operation by operation.

    ``report`` is called with the step and operation that a replay reaches.
    """

    def __init__(
        self,
        adapter: RankAdapter,
        program: Callable[[int], None],
        replays: Replays,
        report: Callable[[int, int], None],
    ) -> None:
        self._adapter, self._program, self._replays, self._report = adapter, program, replays, report
        self._replay: Callable[[], None] | None = None
        self._is_capturing = False
        self._is_warm = False

    def enter(self, op_id: int, kind: OpKind) -> None:
        """Before an operation, capture the writing of its number if it is a computation or a wait.

        The operations inside those, and operations that do not block, would cost more time than they are worth.
        """
        if self._is_capturing and (kind in COMPUTE_KINDS or kind is OpKind.WAIT):
            self._replays.write(op_id)

    def run(self, step: int) -> None:
        """Run the next step."""
        if not self._is_warm:
            self._adapter.begin(step)
            self._program(step)
            self._adapter.finish()
            self._is_warm = True
            return
        if self._replay is None:
            self._adapter.begin(step)
            self._is_capturing = True
            self._replay = self._replays.captured(lambda: self._program(step))
            self._is_capturing = False
        else:
            self._adapter.begin_again(step)
        with follow_device(
            lambda: (step, self._replays.read()), self._report
        ):  # the host does not see the operations of a replay
            self._replay()
            self._adapter.finish()  # reads the step's results, and so waits for them
