"""Placement of a tensor over one axis of the device mesh.

The five placements over one axis: *Replicated* and *Invariant* hold equal
values on every rank (their gradients differ), *Sharded* holds a shard per
rank, *Partial* an addend per rank, *Varying* promises nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class PlacementKind(StrEnum):
    """The five placements of a tensor over one mesh axis."""

    REPLICATED = "replicated"
    INVARIANT = "invariant"
    SHARDED = "sharded"
    PARTIAL = "partial"
    VARYING = "varying"


_DUALS = {
    PlacementKind.REPLICATED: PlacementKind.PARTIAL,
    PlacementKind.INVARIANT: PlacementKind.INVARIANT,
    PlacementKind.SHARDED: PlacementKind.SHARDED,
    PlacementKind.PARTIAL: PlacementKind.REPLICATED,
    PlacementKind.VARYING: PlacementKind.VARYING,
}


@dataclass(frozen=True, slots=True)
class Placement:
    """One axis's placement; ``dim`` is the sharded tensor dim, None for the other kinds."""

    kind: PlacementKind
    dim: int | None = None

    def __post_init__(self) -> None:
        if (self.dim is not None) != (self.kind is PlacementKind.SHARDED):
            raise ValueError(f"placement {self.kind} with dim {self.dim}: exactly 'sharded' has a dim")

    @property
    def holds_equal_values(self) -> bool:
        """True if every rank of the axis holds the same values."""
        return self.kind in (PlacementKind.REPLICATED, PlacementKind.INVARIANT)

    @property
    def dual(self) -> Placement:
        """The placement of the gradient of a tensor with this placement."""
        return Placement(_DUALS[self.kind], self.dim)

    def local_shape(self, shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
        """Return the local shape on one of ``num_ranks`` ranks, for a tensor of global ``shape``.

        Raises:
            ValueError: the sharded dim does not divide by ``num_ranks``.
        """
        if self.kind is not PlacementKind.SHARDED:
            return shape
        assert self.dim is not None
        if shape[self.dim] % num_ranks:
            raise ValueError(f"dim {self.dim} of {shape} does not divide over {num_ranks} ranks")
        return tuple(n // num_ranks if d == self.dim else n for d, n in enumerate(shape))

    def __str__(self) -> str:
        return f"{self.kind}({self.dim})" if self.dim is not None else str(self.kind)


REPLICATED = Placement(PlacementKind.REPLICATED)
INVARIANT = Placement(PlacementKind.INVARIANT)
PARTIAL = Placement(PlacementKind.PARTIAL)
VARYING = Placement(PlacementKind.VARYING)


def sharded(dim: int) -> Placement:
    """Return the placement of a tensor that is sharded evenly along ``dim``, in rank order."""
    return Placement(PlacementKind.SHARDED, dim)


def parse_placement(text: str) -> Placement:
    """Read the text form: ``parse_placement(str(p)) == p`` for every placement.

    Raises:
        ValueError: ``text`` is not a placement.
    """
    name, bracket, rest = text.partition("(")
    digits = rest.removesuffix(")")
    is_sharded = bool(bracket) and rest.endswith(")") and digits.isdecimal()
    if name in tuple(PlacementKind) and is_sharded == (name == PlacementKind.SHARDED) and (is_sharded or not bracket):
        return Placement(PlacementKind(name), int(digits) if is_sharded else None)
    raise ValueError(f"{text!r} is not a placement; examples: invariant, sharded(0)")


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element, from the bits in a type's name (``bfloat16``); 1 without bits."""
    bits = re.search(r"\d+$", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
