"""The points of a sweep: what each sets, and the plan data that comes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Settings = Mapping[str, Any]
"""Dotted plan keys with the values that a point gives them."""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of a sweep: what it sets, the whole plan as data, and the name that its result has."""

    settings: Settings
    plan: Mapping[str, Any]
    id: str


def grid_of(
    grid: Mapping[str, Sequence[Any]], zipped: Mapping[str, Sequence[Any]], include: Sequence[Settings]
) -> Iterator[Settings]:
    """The settings of all points: the product of the grid and the rows of ``zipped``, then the extra points.

    The first key changes slowest. The lists of ``zipped`` are equally long.
    """
    if grid or zipped:
        rows = list(zip(*zipped.values(), strict=True)) if zipped else [()]
        for values in product(*grid.values()):
            for row in rows:
                yield {**dict(zip(grid, values, strict=True)), **dict(zip(zipped, row, strict=True))}
    yield from include


def points_of(base: Mapping[str, Any], settings: Iterable[Settings]) -> tuple[Point, ...]:
    """A point for each settings, in order; of several that come to the same plan the first one stays."""
    points: dict[str, Point] = {}
    for one in settings:
        plan = laid_over(base, one)
        point = Point(one, plan, digest_of(plan)[:16])
        points.setdefault(point.id, point)
    return tuple(points.values())


def laid_over(base: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The plan with the settings in it; ``base`` stays as it is.

    A mapping is laid over the mapping that is there, key by key; any other
    value takes the place of what is there, and null removes it.
    """
    plan = _written_out(base)
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}  # from the innermost key outwards
        plan = _merged(plan, value)
    return plan


def _written_out(base: Mapping[str, Any]) -> dict[str, Any]:
    """The plan without the short forms whose keys may be set one by one."""
    plan = dict(base)
    if isinstance(plan.get("transport"), str):
        plan["transport"] = dict.fromkeys(("forward", "backward"), plan["transport"])
    cost = plan.get("cost")
    if isinstance(cost, Mapping) and isinstance(cost.get("analytic"), str):
        plan["cost"] = {**cost, "analytic": {"device": cost["analytic"]}}
    return plan


def digest_of(data: object) -> str:
    """SHA-256 of JSON data in hexadecimal; the order of keys does not count."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            there = merged.get(key)
            merged[key] = _merged(there if isinstance(there, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged
