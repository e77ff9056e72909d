"""Variants and sizes for which each kind of schedule exists; readable without loading a generator.

A condition is a Python expression in ``p`` (ranks) and ``m`` (micro-batches);
the tests compare it with what the generators refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VARIANTS = ("torch", "megatron", "fleet", "fleet_fthenb", "fleet_balanced")
"""Variants of interleaved 1F1B; the first is the default."""

ANY_SIZES = "any"
"""In place of a condition: every number of ranks and micro-batches will do."""

_ROUNDS = "m % max(1, m // p) == 0"

_CONDITIONS: Mapping[tuple[str, str | None], str] = MappingProxyType(
    {
        ("interleaved", "torch"): _ROUNDS,
        ("interleaved", "megatron"): "m % p == 0",
        ("interleaved", "fleet"): "m == p or m >= 2 * p",
        ("interleaved", "fleet_fthenb"): "m == p",
        ("interleaved", "fleet_balanced"): "m >= p",
        ("interleaved_zb", None): _ROUNDS,
        ("dualpipe", None): "p % 2 == 0 and m % 2 == 0 and m >= 2 * p",
        ("dualpipe_v", None): "m >= 2 * p",
        ("chimera", None): "p % 2 == 0",
    }
)


def sizes_of(kind: str, variant: str | None = None) -> str:
    """The condition of a kind, or of one of its variants; ``ANY_SIZES`` where there is none."""
    return _CONDITIONS.get((kind, variant), ANY_SIZES)
