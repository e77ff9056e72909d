"""What one rank holds over simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property

import numpy as np

from pipeproof.schedule.columns import IntColumn

GIB = 2**30


class Part(StrEnum):
    """What memory is taken by."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    MESSAGES = "messages"
    OVERHEAD = "overhead"


PARTS = tuple(Part)
"""A part's place here is its code in columns."""
STATES = (Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER)
"""What goes with the weights, from step to step."""


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes over time: ``lasting`` by part all along, and the ``change`` of ``part`` at each of ``times``, in ticks.

    There are ``ticks_per_us`` ticks in a microsecond.

    Changes are in order of time; of those at one time, what is given back
    goes before what is taken.
    """

    lasting: Mapping[Part, int]
    times: IntColumn
    part: IntColumn
    change: IntColumn
    ticks_per_us: int

    @cached_property
    def held(self) -> IntColumn:
        """Bytes after each change."""
        return np.cumsum(self.change) + self._always

    @property
    def peak(self) -> int:
        """Most bytes held at once."""
        return max(self._always, int(self.held.max(initial=0)))

    @property
    def peak_at_us(self) -> Fraction:
        """The first time at which so much is held, in microseconds; 0 if all of it is there from the beginning."""
        return Fraction(0) if self._peak_place is None else self.us(int(self.times[self._peak_place]))

    def us(self, ticks: int) -> Fraction:
        """A time of this curve in microseconds."""
        return Fraction(ticks, self.ticks_per_us)

    @cached_property
    def make_up(self) -> Mapping[Part, int]:
        """Bytes of each part at the peak."""
        last = 0 if self._peak_place is None else self._peak_place + 1
        taken = {part: int(self.change[:last][self.part[:last] == code].sum()) for code, part in enumerate(PARTS)}
        return {part: self.lasting.get(part, 0) + taken[part] for part in PARTS}

    def steps(self) -> tuple[IntColumn, IntColumn]:
        """The curve to be drawn: distinct times, and the bytes held from each of them on."""
        last = np.ones(len(self.times), dtype=bool)
        last[:-1] = self.times[1:] != self.times[:-1]
        return self.times[last], self.held[last]

    @property
    def _always(self) -> int:
        return sum(self.lasting.values())

    @cached_property
    def _peak_place(self) -> int | None:
        """The change after which most is held; None where nothing that comes adds to what is there."""
        if not len(self.held) or int(self.held.max()) <= self._always:
            return None
        return int(self.held.argmax())
