"""What a person says of index maps: which elements ranks hold, which an operation takes them for, what is loaded where.

Maps are made with ``pipeproof.stages.describe.index_map``: from a layout, from
the helpers for experts, tokens and fused weights there, or piece by piece from
a checkpoint's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeproof.stages.describe.index_map import IndexMap


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of ``numel`` elements that ranks hold, save or load in parts: each element is there ``copies`` times."""

    name: str
    numel: int
    parts: Mapping[int, IndexMap]
    copies: int = 1


@dataclass(frozen=True, slots=True)
class MapUse:
    """What the ranks hold of a tensor, and what an operation, a loader or the other side takes it for."""

    name: str
    holds: Mapping[int, IndexMap]
    taken_for: Mapping[int, IndexMap]


@dataclass(frozen=True, slots=True)
class LoadedParameter:
    """On ``rank``, values for ``parameter`` are read into ``target``; the model computes with ``memory``.

    Both are names of memory: equal names are the same memory.
    """

    parameter: str
    rank: int
    target: str
    memory: str
