"""What the log of a rank says, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pipeproof.specs.finding import Location


@dataclass(frozen=True, slots=True)
class LoggedTensor:
    """A tensor of a call; ``start`` and ``stop`` are the addresses that it lies between, in bytes."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A process group: its name, and its global ranks in the order of group ranks.

    ``opened`` says that its communicator was made with the group, so that
    single messages use it, too.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    opened: bool

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"group {self.name}"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a message is about, as far as that is known: F or B, the stage on this rank, the micro-batch."""

    kind: str | None = None
    stage: int | None = None
    micro_batch: int | None = None

    def __str__(self) -> str:
        unit = "" if self.micro_batch is None else f" {self.micro_batch}"
        stage = "" if self.stage is None else f" of stage {self.stage}"
        return f"{self.kind}{unit}{stage}"


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """An operation that a rank issued. ``line`` is its place in the log, ``at`` in the user's own code."""

    rank: int
    seq: int
    op: str
    group: LoggedGroup
    peer: int | None
    tag: int
    reduction: str
    inputs: tuple[LoggedTensor, ...]
    outputs: tuple[LoggedTensor, ...]
    sent_splits: tuple[int, ...]
    received_splits: tuple[int, ...]
    batch: int | None
    blocks: bool
    mark: Mark | None
    at: str
    line: Location

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op in ("send", "recv")

    @property
    def tensor(self) -> LoggedTensor | None:
        """What a message carries, or the first that a collective takes."""
        return next(iter((*self.inputs, *self.outputs)), None)

    @property
    def tensors_text(self) -> str:
        """What it carries, in words."""
        shown = self.inputs or self.outputs
        return ", ".join(map(str, shown[:3])) + (", .." if len(shown) > 3 else "")


@dataclass(frozen=True, slots=True)
class LoggedWait:
    """The host came to wait for operations, by their numbers; ``changed`` of them had their memory written before."""

    of: tuple[int, ...]
    changed: tuple[int, ...]
    at: str
    line: Location


@dataclass(frozen=True)
class RankLog:
    """The log of one rank: calls and waits in their order, which of the calls are done, and how the recording ended.

    ``created`` are the members of the groups that were made meanwhile. Without
    ``ended`` the rank was killed, or is still running.
    """

    rank: int
    num_ranks: int
    framework: str
    file: str
    events: tuple[LoggedCall | LoggedWait, ...]
    done: frozenset[int]
    created: tuple[tuple[int, ...], ...]
    groups: Mapping[str, LoggedGroup]
    ended: bool
    error: str | None
    error_line: Location | None

    @property
    def calls(self) -> tuple[LoggedCall, ...]:
        """All operations, in the order of issue."""
        return tuple(event for event in self.events if isinstance(event, LoggedCall))

    @property
    def held_by(self) -> tuple[int, ...]:
        """The operations that the host was waiting for when the log broke off."""
        if self.ended or not self.events:
            return ()
        last = self.events[-1]
        of = last.of if isinstance(last, LoggedWait) else (last.seq,) if last.blocks else ()
        return tuple(seq for seq in of if seq not in self.done)
