"""Recipes of Megatron-Bridge's performance summaries: settings in addition to the columns of a summary.

The file has the settings of the recipes in the tags of Megatron-Bridge that its releases were made from: 26.02 is
v0.3.0, 26.02.01 v0.3.1, 26.04 v0.4.0, 26.04.01 v0.4.2, 26.06 v0.5.0, 26.06.01 v0.5.1 and 26.08 v0.6.0
(``scripts/performance/configs``, from 26.08 on ``perf_recipes``). They are facts of a release, not of a measurement.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

RECIPES = Path(__file__).parent / "measurements" / "megatron_bridge_recipes.csv"
_RELEASES = ("26.02", "26.02.01", "26.04", "26.04.01", "26.06", "26.06.01", "26.08")
_SIZES = ("TP", "PP", "VP", "EP", "MBS")
_REPLAYED = {"attn": "attention", "moe_router": "router"}


@dataclass(frozen=True)
class Recipe:
    """Settings of a recipe: the way of tokens to experts, and replayed, hidden, fused and recomputed parts.

    ``replayed`` has the parts of ``cost.analytic.replayed``; ``is_replayed_whole`` is true for graphs of whole steps.
    ``recomputed`` has modules of ``memory.recompute_modules``.
    """

    by_all_to_all: bool = False
    is_replayed_whole: bool = False
    replayed: tuple[str, ...] = ()
    overlaps_exchange: bool = False
    has_fused_experts: bool = False
    recomputed: tuple[str, ...] = ()


NO_RECIPE = Recipe()
"""Tokens go once to each rank, and the host starts each operation: for a model or device that has no recipe."""


def recipe_of(model: str, device: str, precision: str, release: str, sizes: Sequence[int]) -> Recipe:
    """Return the recipe with these ``sizes`` (tp, pp, chunks, ep and micro-batch) of a release, or of the nearest one.

    If no recipe has these sizes, return the nearest release's recipe for the model, device and precision.
    """
    known = _recipes().get((model, device, precision), ())
    if not known:
        return NO_RECIPE
    position = _RELEASES.index(release) if release in _RELEASES else len(_RELEASES) - 1

    def distance(entry: _Entry) -> tuple[bool, int]:
        nearest = min(abs(_RELEASES.index(name) - position) for name in entry.releases)
        return entry.sizes != tuple(sizes), nearest

    return min(known, key=distance).recipe


class _Entry(NamedTuple):
    """A recipe, its sizes and the releases that have it."""

    sizes: tuple[int, ...]
    releases: tuple[str, ...]
    recipe: Recipe


@cache
def _recipes() -> Mapping[tuple[str, str, str], list[_Entry]]:
    """The recipes by model, device and precision."""
    recipes: dict[tuple[str, str, str], list[_Entry]] = {}
    with RECIPES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            graphs = row["graphs"].split()
            recipe = Recipe(
                by_all_to_all=row["dispatcher"] == "alltoall",
                is_replayed_whole="full_iteration" in graphs,
                replayed=tuple(part for name, part in _REPLAYED.items() if name in graphs),
                overlaps_exchange=row["overlap"] == "yes",
                has_fused_experts=row["fused"] == "yes",
                recomputed=tuple(row["recompute"].split()),
            )
            key = row["model"].lower(), row["System"], row["Precision"]
            sizes = tuple(int(row[name]) for name in _SIZES)
            recipes.setdefault(key, []).append(_Entry(sizes, tuple(row["releases"].split()), recipe))
    return recipes
