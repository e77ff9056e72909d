"""The steps of one rank: each carried out operation by operation, or from the second on replayed whole.

A replay leaves the host no work in a step, which is what limits small stages on
fast GPUs. It does what the second step did, in memory that stays: so only the
second step, which is captured, and the first, which loads kernels and opens
connections, have a log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeproof.exec.adapter import RankAdapter
from pipeproof.exec.progress import followed
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.specs.plan import RunSpec


class Replays(Protocol):
    """How a device captures what is launched, and tells how far a replay of it has come."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What replays all that ``work`` launches; nothing of it is computed now."""
        ...

    def write(self, op_id: int) -> None:
        """Launch the writing of an operation's number, behind all that was launched before."""
        ...

    def read(self) -> int:
        """The number that was written last; -1 before the first. Waits for nothing."""
        ...


def num_logged_steps(run: RunSpec, *, layers: bool, first_step: int = 0) -> int:
    """Steps of which a run that begins with ``first_step`` has a log; those with ``layers`` are not replayed."""
    num_steps = run.steps - first_step
    return min(num_steps, 2) if run.replay and not layers else num_steps


class ReplayedSteps:
    """Runs a rank's steps; ``program`` carries out that of one.

    ``tell`` is told the step and the operations that a replay comes to.
    """

    def __init__(
        self,
        adapter: RankAdapter,
        program: Callable[[int], None],
        replays: Replays,
        tell: Callable[[int, int], None],
    ) -> None:
        self._adapter, self._program, self._replays, self._tell = adapter, program, replays, tell
        self._replay: Callable[[], None] | None = None
        self._is_capturing = False
        self._is_warm = False

    def enter(self, op_id: int, kind: OpKind) -> None:
        """An operation is about to be carried out: a capture writes down that the device comes to it.

        Computations and waits say enough; what is inside them, and what does not block, would cost more than it tells.
        """
        if self._is_capturing and (kind in COMPUTE_KINDS or kind is OpKind.WAIT):
            self._replays.write(op_id)

    def run(self, step: int) -> None:
        """One step, the next one, to its end."""
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
        with followed(lambda: (step, self._replays.read()), self._tell):  # the host itself sees nothing of a replay
            self._replay()
            self._adapter.finish()  # reads what the step made, and so waits for it
