"""Statements as data. Places do not count when two are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeproof.specs.finding import Location

NOTHING = "_"
"""The name that stands for no tensor: ``_ -> A`` adds one of zeros, ``A -> _`` leaves one out."""
IDS = ("$LAYER_ID_OFFSET", "$LAYER_ID", "$EXPERT_ID")
"""What stands for a number in names; the longer first. ``$LAYER_ID_OFFSET`` is one less to the right of the arrow."""
STAR = "*"
CAST_TYPES = ("float16", "float32", "bfloat16")
"""The types that Paddle's language casts to."""
FusedKind = Literal["fused_qkv", "fused_qkv_old", "fused_ffn"]
FUSED_KINDS: tuple[FusedKind, ...] = ("fused_qkv", "fused_qkv_old", "fused_ffn")


@dataclass(frozen=True, slots=True)
class Name:
    """One name as it is written: ``NAME``, ``NAME^T``, or ``NAME[0:4]`` for NAME_0, .., NAME_3."""

    text: str
    transposed: bool = False
    numbers: tuple[int, int] | None = None
    place: Location | None = field(default=None, compare=False, repr=False)

    @property
    def is_nothing(self) -> bool:
        """Whether it stands for no tensor."""
        return self.text == NOTHING

    @property
    def may_be_many(self) -> bool:
        """Whether it can stand for several tensors of one statement."""
        return STAR in self.text or self.numbers is not None

    @property
    def ids(self) -> tuple[str, ...]:
        """Which of the numbers' names it has, in their order in the text."""
        found, position = [], self.text.find("$")
        while position >= 0:
            found.append(next(tag for tag in IDS if self.text.startswith(tag, position)))
            position = self.text.find("$", position + 1)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Cast:
    """To which type, and from which, where the statement says that."""

    target: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """Heads of queries, keys and values in one tensor, or a gate beside its up projection."""

    kind: FusedKind
    num_heads: int = 0
    num_groups: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """One line. ``permutation`` is empty for all dims in reverse; ``axis`` None where none is written."""

    left: tuple[Name, ...]
    right: tuple[Name, ...]
    axis: int | None = None
    permutation: tuple[int, ...] | None = None
    cast: Cast | None = None
    fused: Fused | None = None
    place: Location | None = field(default=None, compare=False, repr=False)

    @property
    def names(self) -> tuple[Name, ...]:
        """Those of both sides, without ``_``."""
        return tuple(name for name in (*self.left, *self.right) if not name.is_nothing)


@dataclass(frozen=True, slots=True)
class Program:
    """Statements in the order in which they are carried out."""

    statements: tuple[Statement, ...]
    file: str = field(default="", compare=False)
