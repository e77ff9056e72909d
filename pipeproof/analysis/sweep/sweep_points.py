"""The points of a sweep: the keys of a plan that take several values, and the plan of each combination."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final, Literal

from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.problems import describe_value
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.cost import CostSource, cost_source, placeholder_note
from pipeproof.specs.exact_times import TIME_KEYS
from pipeproof.specs.load_plan import plan_from_dict

Settings = Mapping[str, Any]
"""Dotted plan keys with the values of a point."""

MAX_POINTS: Final = 100_000
"""Most points of a sweep."""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of a sweep: its settings, the whole plan as data, and the name of its result."""

    settings: Settings
    plan: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class Sweep:
    """The points of a plan and the keys that they set.

    ``plan_file`` is the plan's file; files that points name are relative to it.
    """

    plan_file: str
    keys: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def cost_source(self) -> CostSource | Literal["mixed"]:
        """Origin of the times of all points; mixed if they differ."""
        sources = {cost_source(keys) for keys in self._cost_keys}
        return sources.pop() if len(sources) == 1 else "mixed"

    @property
    def placeholder_note(self) -> str:
        """A sentence about times that points leave out, with the number of points if others have times.

        A placeholder is the time of a stage, so points with other numbers of stages have other work.
        """
        noted = [(note, point) for point, keys in zip(self.points, self._cost_keys, strict=True)
                 if (note := placeholder_note(keys))]  # fmt: skip
        if not noted:
            return ""
        note = noted[0][0]
        text = note if len(noted) == len(self.points) else f"{len(noted)} of {len(self.points)} points: {note}"
        if len({_num_stages(point) for _, point in noted}) == 1:
            return text
        return f"{text}; points with more stages have more work, unless `cost` gives the times of their stages"

    @property
    def _cost_keys(self) -> list[frozenset[str]]:
        """Keys of times that each point gives; a point without proper sections is refused later."""
        return [_cost_keys(point.plan) for point in self.points]


def _cost_keys(plan: Mapping[str, Any]) -> frozenset[str]:
    """Keys of ``cost``, or, if it has no times of computations, the keys of custom layers' times."""
    cost, model = ({} if not isinstance(plan.get(key), Mapping) else plan[key] for key in ("cost", "model"))
    keys = frozenset(key for key, value in cost.items() if value is not None)
    layers = model.get("layers")
    if keys.isdisjoint((*TIME_KEYS, "analytic", "profile")) and isinstance(layers, list | tuple) and layers:
        keys |= {key for key in TIME_KEYS if isinstance(layers[0], Mapping) and layers[0].get(key) is not None}
    return keys


def sweep_of_plan(plan: Mapping[str, Any], plan_file: str, values: Mapping[str, Sequence[Any]]) -> Sweep:
    """Return the sweep of all combinations of values; the first key changes slowest.

    If several combinations give the same plan, only the first is a point.

    Args:
        plan: The keys of the plan, as a plan file has them.
        plan_file: Its file, or where it would be.
        values: Values by dotted key. A mapping is laid over the mapping of the plan, and None removes a key.

    Raises:
        PlanFileError: all findings about the values.
    """
    findings = [*_findings(values)]
    if findings:
        raise PlanFileError(*findings)
    points: dict[str, Point] = {}
    for combination in product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        laid = laid_over(plan, settings)
        point = Point(settings, laid, digest_of(laid)[:16])
        points.setdefault(point.id, point)
    try:  # every point would report an unknown key; other errors are results of points
        plan_from_dict(next(iter(points.values())).plan)
    except PlanFileError as error:
        if unknown := [finding for finding in error.findings if finding.code == "PP102"]:
            raise PlanFileError(*unknown) from None
    return Sweep(plan_file, tuple(values), tuple(points.values()))


def laid_over(base: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The plan with the settings in it; ``base`` is not changed.

    A mapping is laid over the existing mapping, key by key; any other
    value replaces the existing one, and null removes it.
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


def _num_stages(point: Point) -> tuple[object, object]:
    """The pipeline ranks and the chunks of a point, as they are written."""
    topology, schedule = (point.plan.get(name) for name in ("topology", "schedule"))
    ranks = topology.get("pp", 1) if isinstance(topology, Mapping) else None
    return ranks, schedule.get("num_chunks", 1) if isinstance(schedule, Mapping) else None


def _findings(values: Mapping[str, Sequence[Any]]) -> Iterator[Finding]:
    """Errors of the values, reported once and not by every point."""
    for key, items in values.items():
        if not items:
            yield Finding("PP105", Severity.ERROR, f"`{key}` must have at least one value, found an empty list")
        for value in items:
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                message = f"`{key}` must be finite, found {describe_value(value)}"
                yield Finding("PP106", Severity.ERROR, message)
    num_points = prod(map(len, values.values()))
    if num_points > MAX_POINTS:
        message = f"the sweep has {num_points} points, and at most {MAX_POINTS} are taken"
        yield Finding("PP106", Severity.ERROR, message, help="give fewer values, or make several sweeps")
