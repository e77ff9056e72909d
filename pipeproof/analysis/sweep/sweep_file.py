"""Reading a sweep file: the plan that it starts from, and which keys of it take which values.

What is wrong with it has a code, a line and a column, as in a plan file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from pipeproof.analysis.sweep.plan_keys import near_key, unknown_part
from pipeproof.analysis.sweep.sweep_points import Point, digest_of, grid_of, points_of
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, nearest_name
from pipeproof.diagnostics.source import PlanFileError, read_text
from pipeproof.diagnostics.yaml_tree import Tree, parse_text
from pipeproof.specs.cost import CostSource, cost_source, placeholder_note
from pipeproof.specs.load_plan import load_plan, with_settings
from pipeproof.version import __version__

MAX_POINTS: Final = 100_000
"""Most points of a sweep."""

_KEYS: Final = ("plan", "grid", "zip", "include")
_OF_THE_FILE: Final = frozenset({"PP100", "PP101", "PP102", "PP103", "PP105", "PP107"})
"""Codes that no value of another key can fix; a base plan may lack keys that the sweep gives, or be inconsistent."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was read.

    ``plan_file`` is the base plan; ``keys`` are the dotted keys that points set, in the order of the file. ``digest``
    is the same where all points, the files that they name and pipeproof's version are the same.
    """

    file: str
    plan_file: str
    keys: tuple[str, ...]
    points: tuple[Point, ...]
    digest: str

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
        """Keys that each point gives in its section ``cost``; a point without a proper section is refused later."""
        sections = [point.plan.get("cost") for point in self.points]
        given = [section if isinstance(section, Mapping) else {} for section in sections]
        return [frozenset(key for key, value in section.items() if value is not None) for section in given]


BasePlan = Callable[[str], Mapping[str, Any]]
"""Reader of the file that a sweep names: it returns the keys of a plan, of which points replace some."""


def load_sweep(path: str | os.PathLike[str], base_plan: BasePlan | None = None) -> Sweep:
    """Read a sweep file (YAML or JSON) and the plan that it names, which is relative to it.

    ``base_plan`` reads that plan; without it, it is a plan file.

    Raises:
        PlanFileError: all findings about the sweep file, and those about its plan that no point can fix.
    """
    name = os.fspath(path)
    tree = _parse(name)
    problems = list(_problems(tree.data))
    if problems:
        source = tree.source
        findings = [
            Finding(p.code, Severity.ERROR, p.message, source.locate(p.path, key=p.at_key), p.help) for p in problems
        ]
        raise PlanFileError(*dict.fromkeys(findings), source=source)
    assert isinstance(tree.data, Mapping)
    data: Mapping[str, Any] = tree.data
    plan_file = str(Path(name).parent / data["plan"])
    return _sweep(name, plan_file, (base_plan or read_base_plan)(plan_file), data)


def sweep_of_plan(plan: Mapping[str, Any], plan_file: str, grid: Mapping[str, Sequence[object]]) -> Sweep:
    """Return the sweep of a plan made in Python; files that it names are relative to ``plan_file``.

    Raises:
        PlanFileError: all findings about the grid.
    """
    data = {"plan": plan_file, "grid": {key: list(values) for key, values in grid.items()}}
    problems = [Finding(p.code, Severity.ERROR, p.message, None, p.help) for p in _problems(data)]
    if problems:
        raise PlanFileError(*dict.fromkeys(problems))
    return _sweep(plan_file, plan_file, plan, data)


def _sweep(name: str, plan_file: str, base: Mapping[str, Any], data: Mapping[str, Any]) -> Sweep:
    grid, zipped, include = data.get("grid", {}), data.get("zip", {}), data.get("include", [])
    points = points_of(base, grid_of(grid, zipped, include))
    keys = tuple(dict.fromkeys(key for one in (grid, zipped, *include) for key in one))
    return Sweep(name, plan_file, keys, points, _digest(points, Path(plan_file).parent))


def _parse(name: str) -> Tree:
    """The data of a file.

    Raises:
        PlanFileError: it cannot be read, or is no YAML.
    """
    tree = parse_text(read_text(name), name)
    if tree.problems:
        raise PlanFileError(*tree.problems, source=tree.source)
    return tree


def read_base_plan(name: str, settings: Mapping[KeyPath, object] | None = None) -> Mapping[str, Any]:
    """Return the data of a plan file, with ``settings`` in place of some values.

    Raises:
        PlanFileError: no point can be a plan, with any values.
    """
    settings = settings or {}
    try:
        load_plan(name, settings)
    except PlanFileError as error:
        lasting = [finding for finding in error.findings if finding.code in _OF_THE_FILE]
        if lasting:
            raise PlanFileError(*lasting, source=error.source) from error
    data, _ = with_settings(_parse(name).data, settings)
    assert isinstance(data, Mapping)  # or it would not be a plan: PP105
    return data


def _digest(points: Sequence[Point], folder: Path) -> str:
    named = sorted({str(path) for point in points for path in _named_files(point)})
    files = {path: _file_digest(folder / path) for path in named}
    return digest_of([__version__, [point.id for point in points], files])


def _num_stages(point: Point) -> tuple[object, object]:
    """The pipeline ranks and the chunks of a point, as they are written."""
    topology, schedule = (point.plan.get(name) for name in ("topology", "schedule"))
    ranks = topology.get("pp", 1) if isinstance(topology, Mapping) else None
    return ranks, schedule.get("num_chunks", 1) if isinstance(schedule, Mapping) else None


def _named_files(point: Point) -> Iterator[object]:
    """The schedule and the profile of a point, where it names them."""
    for section, key in (("schedule", "path"), ("cost", "profile")):
        keys = point.plan.get(section)
        if isinstance(keys, Mapping) and keys.get(key) is not None:
            yield keys[key]


def _file_digest(path: Path) -> str | None:
    """None for a plan that cannot be read: its points are refused with the reason."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def _problems(data: object) -> Iterator[Problem]:
    """Problems of the data of a sweep file, in the order of its parts."""
    if not isinstance(data, Mapping):
        found = "nothing: the file is empty" if data is None else describe_value(data)
        fix = "begin with `plan: base.yaml`, then `grid:`"
        yield Problem("PP105", (), f"a sweep is a mapping of keys, found {found}", fix)
        return
    for key in data:
        if key not in _KEYS:
            near = nearest_name(key, _KEYS)
            fix = f"did you mean `{near}`?" if near else f"known here: {', '.join(_KEYS)}"
            if unknown_part(key) is None:
                fix = f"keys of the plan belong below `grid`: `grid: {{{key}: [...]}}`"
            yield Problem("PP102", (key,), f"a sweep has no key `{key}`", fix, at_key=True)
    if "plan" not in data:
        yield Problem("PP104", ("plan",), "`plan` is missing", "add `plan: base.yaml`, relative to this file")
    elif not isinstance(data["plan"], str) or not data["plan"]:
        yield _wrong(("plan",), "the name of a plan file", data["plan"])
    if not any(key in data for key in _KEYS[1:]):
        fix = "add `grid:` with keys of the plan and a list of values for each"
        yield Problem("PP104", ("grid",), "the sweep has no points: `grid`, `zip` and `include` are missing", fix)
    axes = [*_axes_problems(data, "grid"), *_axes_problems(data, "zip"), *_include_problems(data)]
    yield from axes or _size_problems(data)


def _axes_problems(data: Mapping[str, Any], section: str) -> Iterator[Problem]:
    if section not in data:
        return
    axes = data[section]
    if not isinstance(axes, Mapping) or not axes:
        yield _wrong((section,), "a mapping of plan keys to lists of values", axes)
        return
    for key, values in axes.items():
        path = (section, key)
        yield from _key_problems(path)
        if not isinstance(values, list) or not values:
            fix = None if isinstance(values, list | Mapping) or values is None else f"write [{values}]"
            yield _wrong(path, "a list of values", values, fix)
            continue
        for index, value in enumerate(values):
            yield from _value_problems((*path, index), value)


def _include_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    if "include" not in data:
        return
    include = data["include"]
    if not isinstance(include, list) or not include:
        yield _wrong(("include",), "a list of points", include)
        return
    for index, settings in enumerate(include):
        if not isinstance(settings, Mapping) or not settings:
            yield _wrong(("include", index), "a mapping of plan keys to values", settings)
            continue
        for key, value in settings.items():
            yield from _key_problems(("include", index, key))
            yield from _value_problems(("include", index, key), value)


def _size_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems between lists that are correct by themselves."""
    grid, zipped, include = data.get("grid", {}), data.get("zip", {}), data.get("include", [])
    for key in zipped:
        if key in grid:
            yield Problem("PP106", ("zip", key), f"`{key}` is in `grid` as well", "keep one of the two", at_key=True)
    lengths = {key: len(values) for key, values in zipped.items()}
    first = next(iter(zipped), None)
    for key, length in lengths.items():
        assert first is not None
        if length != lengths[first]:
            message = f"the lists of `zip` go side by side: `{key}` has {length} values, `{first}` has {lengths[first]}"
            yield Problem("PP106", ("zip", key), message, "give each as many values")
    num_rows = max(lengths.values(), default=1)
    num_points = (prod(map(len, grid.values())) * num_rows if grid or zipped else 0) + len(include)
    if num_points > MAX_POINTS:
        message = f"the sweep has {num_points} points, and at most {MAX_POINTS} are taken"
        yield Problem(
            "PP106", ("grid",), message, "give fewer values, or cut the sweep into several files", at_key=True
        )


def _key_problems(path: KeyPath) -> Iterator[Problem]:
    key = str(path[-1])
    wrong = unknown_part(key)
    if wrong is not None:
        near = near_key(key)
        fix = f"did you mean `{near}`?" if near else "keys are those of a plan file, such as `schedule.kind`"
        yield Problem("PP102", path, f"a plan has no key `{wrong}`", fix, at_key=True)


def _value_problems(path: KeyPath, value: object) -> Iterator[Problem]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        yield Problem("PP106", path, f"`{dotted(path)}` must be finite, found {describe_value(value)}")


def _wrong(path: KeyPath, expected: str, value: object, help: str | None = None) -> Problem:
    empty = isinstance(value, Mapping | list) and not value
    found = "an empty one" if empty else describe_value(value)
    return Problem("PP105", path, f"`{dotted(path)}` must be {expected}, found {found}", help)
