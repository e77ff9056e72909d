"""Which clock the times of an op log are of: the host's, or a device's that runs behind it.

A host that waits for what it asks for reads its own clock. One that runs ahead
of a GPU sees only when it asked: there a moment is a marker that the GPU
passes, and its time is known when the step is at its end. So ``now`` may
return a number that stands for a time, and ``dated`` puts the times in place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

from pipeproof.exec.oplog import LogEntry

ClockName = Literal["host", "device"]


class Clock(Protocol):
    """What dates operations."""

    def begin(self) -> None:
        """A step begins; nothing of the step before is asked for any more."""
        ...

    def now(self) -> int:
        """This place in the order of what is carried out: nanoseconds, or what ``dated`` makes them of."""
        ...

    def dated(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Entries of the step with all times in nanoseconds of the host's monotonic clock."""
        ...


class HostClock:
    """The machine's monotonic clock, one for all processes; a ``Clock``."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def now(self) -> int:
        """Nanoseconds."""
        return time.monotonic_ns()

    def dated(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """As they are."""
        return entries


@dataclass(frozen=True, slots=True)
class Timing:
    """What a rank says of its times: whose they are, and by how much they may be off against another rank's.

    ``device`` is the GPU's name, ``allocated_bytes`` and ``reserved_bytes`` the most that its allocator had given out
    and had taken from the device in the last step; on a CPU they are empty and 0.
    """

    clock: ClockName = "host"
    accuracy_ns: int = 0
    device: str = ""
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def save(self, file: Path) -> None:
        """Leave it for the launcher."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what ``save`` wrote."""
        return cls(**json.loads(file.read_text()))
