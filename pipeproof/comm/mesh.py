"""The device mesh: global ranks, their coordinates, and the groups along each axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from pipeproof.schedule.op_table import Group


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks; ``axes`` from fastest to slowest in the global rank, ``sizes`` alike.

    With ``axes = (tp, dp, pp)`` and ``sizes = (2, 1, 4)`` global rank 5 is
    ``tp 1, dp 0, pp 2``.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all sizes."""
        result = 1
        for size in self.sizes:
            result *= size
        return result

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.sizes[self.axes.index(axis)]

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of a global rank on each axis."""
        result = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, result[axis] = divmod(rank, size)
        return result

    def rank(self, coords: Mapping[str, int]) -> int:
        """The global rank at ``coords``, which names every axis."""
        result = 0
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            result = result * size + coords[axis]
        return result

    def groups(self, axis: str) -> Iterator[Group]:
        """The groups along ``axis``: members differ in that coordinate only, in its order."""
        others = [a for a in self.axes if a != axis]
        ranges = [range(self.size(a)) for a in reversed(others)]
        for point in product(*ranges):
            fixed = dict(zip(reversed(others), point, strict=True))
            yield Group(axis, tuple(self.rank({**fixed, axis: i}) for i in range(self.size(axis))))
