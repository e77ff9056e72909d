"""Times of a plan's operations: the content of a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeproof.schedule.ops import OpKind


@dataclass(slots=True)
class RankTimes:
    """Division of a rank's measured time in the counted steps, in nanoseconds.

    ``total_ns`` is the busy time of its GPU, or the time of its host; what is in none of the parts is unattributed.
    """

    rank: int
    total_ns: int = 0
    computation_ns: int = 0
    communication_ns: int = 0
    update_ns: int = 0

    @property
    def unattributed_ns(self) -> int:
        """The rest of the total, which belongs to no operation."""
        return max(0, self.total_ns - self.computation_ns - self.communication_ns - self.update_ns)


@dataclass(slots=True)
class Measurements:
    """Samples of the counted steps.

    ``ops`` are nanoseconds by stage and kind, ``messages`` samples of (bytes, nanoseconds). ``step_ns`` is the median
    length of a step, None if it is not known. ``notes`` are assumptions, and what was left out.
    """

    files: Sequence[str]
    num_steps: int
    num_counted: int
    ops: dict[tuple[int, OpKind], list[int]] = field(default_factory=lambda: defaultdict(list))
    messages: list[tuple[int, int]] = field(default_factory=list)
    ranks: list[RankTimes] = field(default_factory=list)
    step_ns: int | None = None
    devices: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
