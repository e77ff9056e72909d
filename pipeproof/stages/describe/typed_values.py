"""Types of values over mesh axes: the layout of a tensor, and of its gradient, over the ranks of an axis.

The five kinds are those of ``specs/axis_layout.py``. Here a cut names its dim (``S(s)``), because the dims of a value
change from operation to operation.

====== ============ ============================================== ========
letter kind         values on the ranks of the axis                gradient
====== ============ ============================================== ========
R      replicated   equal values                                   P
I      invariant    equal values                                   I
S(d)   sharded      parts along dim d, in rank order               S(d)
P      partial      addends                                        R
V      varying      different values, otherwise unknown            V
====== ============ ============================================== ========
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pipeproof.specs.axis_layout import Placement, PlacementKind

_LETTERS = {
    PlacementKind.REPLICATED: "R",
    PlacementKind.INVARIANT: "I",
    PlacementKind.PARTIAL: "P",
    PlacementKind.VARYING: "V",
}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_CUT = re.compile(r"S\((\w+)\)", re.ASCII)


@dataclass(frozen=True, slots=True)
class AxisType:
    """The layout of a value over one axis; ``dim`` is the dim of a cut, empty for the other kinds."""

    kind: PlacementKind
    dim: str = ""

    def __post_init__(self) -> None:
        if bool(self.dim) != (self.kind is PlacementKind.SHARDED):
            raise ValueError(f"type {self.kind} with dim {self.dim!r}: exactly 'sharded' has a dim")

    @property
    def is_equal(self) -> bool:
        """True if every rank of the axis has the same values."""
        return self.kind in (PlacementKind.REPLICATED, PlacementKind.INVARIANT)

    @property
    def is_cut(self) -> bool:
        """True if each rank has a part of the value."""
        return self.kind is PlacementKind.SHARDED

    @property
    def dual(self) -> AxisType:
        """The type of the gradient of a value of this type."""
        return AxisType(Placement(self.kind, 0 if self.is_cut else None).dual.kind, self.dim)

    def __str__(self) -> str:
        return f"S({self.dim})" if self.is_cut else _LETTERS[self.kind]


REPLICATED = AxisType(PlacementKind.REPLICATED)
INVARIANT = AxisType(PlacementKind.INVARIANT)
PARTIAL = AxisType(PlacementKind.PARTIAL)
VARYING = AxisType(PlacementKind.VARYING)


def cut(dim: str) -> AxisType:
    """Parts along ``dim``, in rank order."""
    return AxisType(PlacementKind.SHARDED, dim)


def axis_type(text: str) -> AxisType:
    """Read ``R``, ``I``, ``P``, ``V`` or ``S(dim)``.

    Raises:
        ValueError: another text.
    """
    if text in _KINDS:
        return AxisType(_KINDS[text])
    if match := _CUT.fullmatch(text):
        return cut(match[1])
    raise ValueError(f"{text!r} is not a type over an axis; examples: R, I, P, V, S(s)")


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor: its dims by name, and its type over each axis of the mesh (invariant by default).

    ``differentiable`` is False for values without a gradient: token ids, masks, positions, a detached maximum.
    """

    name: str
    dims: tuple[str, ...]
    types: Mapping[str, AxisType]
    differentiable: bool = True

    def over(self, axis: str) -> AxisType:
        """The value's type over ``axis``."""
        return self.types.get(axis, INVARIANT)

    def local_numel(self, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
        """Elements on one rank, with global ``sizes`` by dim and axis sizes ``mesh``.

        Raises:
            ValueError: the ranks that cut a dim do not divide it.
        """
        local = {dim: sizes[dim] for dim in self.dims}
        for axis, size in mesh.items():
            kind = self.over(axis)
            if not kind.is_cut:
                continue
            if local[kind.dim] % size:
                raise ValueError(f"{self.name}: dim {kind.dim} of {sizes[kind.dim]} does not divide over {axis} {size}")
            local[kind.dim] //= size
        return prod(local.values())
