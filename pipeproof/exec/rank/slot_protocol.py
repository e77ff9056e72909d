"""Protocol of messages through slots of the receiver's memory, without a call that both sides make.

A channel has slots in the receiver's memory, which the sender can write, and two words for each slot:

- ``empty``, which the sender awaits and the receiver signals: the slot may be written.
- ``full``, which the receiver awaits and the sender signals: the slot may be read.

Each side posts its messages on one stream, in order, and both take the slots in the same order. A message is the same
four steps on both sides; the sender copies into the slot, and the receiver out of it:

    1. AWAIT   wait until the own word of the slot is 1
    2. CLEAR   write 0 to it
    3. COPY
    4. SIGNAL  write 1 to the other side's word of the slot

At first all words ``empty`` are 1 and all words ``full`` 0. At any time one side alone holds a slot, or exactly one of
its words is 1. Three properties follow:

- *Write before signal*: SIGNAL comes after COPY on one stream, and the receiver reads only after its AWAIT.
- *Reuse*: the sender writes a slot only after an ``empty`` that the receiver wrote after its own COPY.
- *No lost signal*: a word is 0 when its SIGNAL comes. Its owner has cleared it before its own SIGNAL of the slot, and
  without that the other side does not get to this SIGNAL.

Nothing counts messages. A step that was captured as a CUDA graph can therefore be replayed: words have the same values
before and after each message. ``tests/exec/test_slot_protocol.py`` explores all interleavings of small sizes, and lists
the orders of the steps without a violation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

NUM_SLOTS = 2
"""Slots of a channel: one is filled while the other is read."""


class Step(Enum):
    """One step of a message, on either side."""

    AWAIT = "await"
    CLEAR = "clear"
    COPY = "copy"
    SIGNAL = "signal"


STEPS = (Step.AWAIT, Step.CLEAR, Step.COPY, Step.SIGNAL)


class Ended(Protocol):
    """The end of a message on a stream."""

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for it, by default the current one."""
        ...


class CopyStream(Protocol):
    """A stream of one end of a channel. Words, targets and sources are addresses; calls launch, and do not wait."""

    def begin(self, after: Any = None) -> None:
        """Make what follows wait for an event, by default for the work that the current stream has got so far."""
        ...

    def await_word(self, word: int) -> None:
        """Wait until a word of this rank is 1."""
        ...

    def write_word(self, word: int, value: int) -> None:
        """Write a word after everything that was launched before is complete and visible to other devices."""
        ...

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes by a copy engine."""
        ...

    def end(self) -> Ended:
        """Return the end of the work so far."""
        ...

    def is_idle(self) -> bool:
        """Return True if all work is complete; do not wait."""
        ...


class SlotEnd:
    """One end of a channel.

    Args:
        stream: the stream of this end.
        own_words: addresses of the words that this end awaits, one for each slot.
        other_words: addresses of those that it signals.
        slots: addresses of the slots, as this end sees them.
        slot_bytes: size of each slot.
        is_sender: True for the end that copies into the slots.
    """

    def __init__(
        self,
        stream: CopyStream,
        own_words: Sequence[int],
        other_words: Sequence[int],
        slots: Sequence[int],
        slot_bytes: int,
        *,
        is_sender: bool,
        steps: Sequence[Step] = STEPS,
    ) -> None:
        self.stream, self._own, self._other, self._slots = stream, own_words, other_words, slots
        self.slot_bytes, self._is_sender, self._steps, self._slot = slot_bytes, is_sender, steps, 0

    def post(self, address: int, num_bytes: int, after: Any = None) -> Ended:
        """Launch the next message, from or to ``address``; one that is larger than a slot moves in equal pieces.

        It waits for ``after``, see ``CopyStream.begin``.
        """
        self.stream.begin(after)
        piece = -(-num_bytes // max(1, -(-num_bytes // self.slot_bytes)))
        for first in range(0, max(num_bytes, 1), max(piece, 1)):
            self._move(address + first, min(piece, num_bytes - first))
        return self.stream.end()

    def _move(self, address: int, num_bytes: int) -> None:
        stream, slot = self.stream, self._slot
        self._slot = (slot + 1) % len(self._slots)
        for step in self._steps:
            if step is Step.AWAIT:
                stream.await_word(self._own[slot])
            elif step is Step.CLEAR:
                stream.write_word(self._own[slot], 0)
            elif step is Step.SIGNAL:
                stream.write_word(self._other[slot], 1)
            elif num_bytes:
                target, source = (self._slots[slot], address) if self._is_sender else (address, self._slots[slot])
                stream.copy(target, source, num_bytes)
