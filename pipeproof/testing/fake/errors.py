"""What a world of fake ranks refuses: each is a test that fails."""

from __future__ import annotations

from pipeproof.specs.finding import WitnessOp


class FakeWorldError(AssertionError):
    """A rank program that would hang, mix up or corrupt data on real ranks."""


class DeadlockError(FakeWorldError):
    """Ranks wait for each other: ``cycle`` are the operations on a shortest such cycle.

    It is empty where hosts wait for one another to open connections.
    """

    def __init__(self, message: str, cycle: tuple[WitnessOp, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class NeverComesError(FakeWorldError):
    """A rank waits for what nobody will issue."""


class UnmatchedError(FakeWorldError):
    """The programs end with transfers that never met their counterpart."""


class MismatchError(FakeWorldError):
    """The two ends of a message, or the members of a collective, mean different things."""


class RaceError(FakeWorldError):
    """An array was written while a send was reading it."""
