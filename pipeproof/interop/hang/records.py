"""What a Flight Recorder dump says: the operations of a rank on its communicators, in the order of issue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod

from pipeproof.specs.finding import Location


class State(IntEnum):
    """How far an operation has come."""

    SCHEDULED = 0
    """Issued by the host; the device has not come to it."""
    STARTED = 1
    COMPLETED = 2


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name, what it is for, and its global ranks in the order of group ranks."""

    name: str
    desc: str
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"group {self.name or '0'}" + (f" ({self.desc})" if self.desc not in ("", "undefined") else "")


@dataclass(frozen=True, slots=True)
class Channel:
    """From a global rank to another in a group; the k-th send meets the k-th receive."""

    group: Group
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of one rank.

    ``index`` is its place among the rank's entries. ``channel`` is of a send
    or a receive, and ``number`` then the place on that channel, else the
    group's count of collectives. Sizes are the shapes of all tensors together.
    """

    rank: int
    index: int
    kind: str
    group: Group
    number: int
    channel: Channel | None
    batched: bool
    state: State
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    location: Location | None

    @property
    def is_send(self) -> bool:
        """Whether this end of a channel gives."""
        return self.kind == "send"

    @property
    def num_elements(self) -> int:
        """Elements of what is sent, received or put into a collective."""
        return _numel(self.input_sizes) or _numel(self.output_sizes)

    @property
    def text(self) -> str:
        """``send 0->1 #2`` with global ranks, or ``all_reduce #5``; counted from 0 as people count micro-batches."""
        if self.channel is None:
            return f"{self.kind} #{self.number} of {self.group.title}"
        arrow = f"{self.channel.src}->{self.channel.dst}" if self.is_send else f"{self.channel.dst}<-{self.channel.src}"
        return f"{self.kind} {arrow} #{self.number}"

    @property
    def tensor_text(self) -> str:
        """Shapes and types as messages show them."""
        sizes = self.input_sizes or self.output_sizes
        shapes = ", ".join("[" + ", ".join(map(str, size)) + "]" for size in sizes)
        return f"{shapes or 'no tensor'} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


@dataclass(frozen=True)
class Unit:
    """What is launched at once: one operation, or all of a batch, which is done when all of them are."""

    rank: int
    entries: tuple[Entry, ...]
    state: State
    queue: tuple[object, ...]
    """Units of a rank with one queue start in the order in which they were issued."""

    @property
    def pending(self) -> bool:
        """Whether it is not done."""
        return self.state is not State.COMPLETED

    @property
    def text(self) -> str:
        """The operation, or the first of the batch and how many there are."""
        first = self.entries[0].text
        return first if len(self.entries) == 1 else f"batch of {len(self.entries)} ({first}, ..)"


@dataclass(frozen=True)
class Dump:
    """What one rank recorded; ``whole`` is False where its buffer was too short for all of it."""

    rank: int
    file: str
    version: str
    whole: bool
    units: tuple[Unit, ...]

    @cached_property
    def pending(self) -> tuple[Unit, ...]:
        """What is not done, in the order in which it was issued."""
        return tuple(unit for unit in self.units if unit.pending)


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(size) for size in sizes)
