"""Who holds the parts of a side, in the words of a picture."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.comm.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Named:
    """A side: its name, and the mesh of its ranks where that is known."""

    name: str
    mesh: Mesh | None = None

    def words(self, holder: str) -> str:
        """``rank 3 (tp 1, pp 1)``: axes of one rank say nothing."""
        rank = number_of(holder)
        if self.mesh is None or not rank:
            return holder
        sizes = dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))
        place = ", ".join(f"{axis} {at}" for axis, at in self.mesh.coords(int(rank)).items() if sizes[axis] > 1)
        return f"{holder} ({place})" if place else holder


def number_of(holder: str) -> str:
    """Of a rank; nothing of a file."""
    return holder.removeprefix("rank ") if holder.startswith("rank ") else ""
