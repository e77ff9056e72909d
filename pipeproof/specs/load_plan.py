"""Reading a plan: from a file or a dict to a ``PlanSpec``, or to all findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pydantic import ValidationError

from pipeproof.diagnostics.finding import Finding, Severity, file_order
from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, shortened
from pipeproof.diagnostics.source import PlanFileError, SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.pydantic_problems import problems_of

_NO_SETTINGS: Mapping[KeyPath, object] = MappingProxyType({})


@dataclass(frozen=True)
class LoadedPlan:
    """A valid plan and the text that it was read from (None for plans made in Python)."""

    spec: PlanSpec
    source: SourceMap | None = None


def load_plan(path: str | os.PathLike[str], settings: Mapping[KeyPath, object] = _NO_SETTINGS) -> LoadedPlan:
    """Read and validate a plan file (YAML or JSON).

    ``settings`` are values by key, which win over those of the file.

    Raises:
        PlanFileError: all findings in the order of the file, PP100 to PP109.
    """
    name = os.fspath(path)
    tree = parse_text(read_text(name), name)
    source = tree.source
    findings = [*tree.problems]
    spec = None
    if tree.complete:
        data, problems = with_settings(tree.data, settings)
        if not problems:
            spec, problems = _validate(data)
        findings += _without_repeats(_given_finding(problem, source, settings) for problem in problems)
    if findings or spec is None:
        raise PlanFileError(*sorted(findings, key=file_order), source=source)
    return LoadedPlan(spec, source)


def with_settings(data: object, settings: Mapping[KeyPath, object]) -> tuple[object, list[Problem]]:
    """Return a plan's data with values in place of those of the file, and a problem for each that has no place."""
    problems = []
    for path, value in settings.items():
        data, blocked = _with_setting(data, path, value, 0)
        if blocked is not None:
            message = f"`{dotted(path)}` cannot be set: `{dotted(blocked)}` is not a mapping of keys"
            problems.append(Problem("PP105", blocked, message))
    return data, problems


def _with_setting(data: object, path: KeyPath, value: object, depth: int) -> tuple[object, KeyPath | None]:
    if depth == len(path):
        return value, None
    if data is not None and not isinstance(data, Mapping):
        return data, path[:depth]
    old = data or {}
    inner, blocked = _with_setting(old.get(path[depth]), path, value, depth + 1)
    return {**old, path[depth]: inner}, blocked


def _given_finding(problem: Problem, source: SourceMap | None, settings: Mapping[KeyPath, object]) -> Finding:
    """A finding at its place in the file, or without one if its value is a setting, which its message then names."""
    given = next((path for path in settings if problem.path[: len(path)] == path), None)
    finding = _finding(problem, source)
    if given is None:
        return finding
    return replace(finding, message=f"{finding.message} (given by `--set {dotted(given)}=..`)", location=None)


def plan_from_dict(
    data: Mapping[str, object], settings: Mapping[KeyPath, object] = _NO_SETTINGS, *, source: SourceMap | None = None
) -> LoadedPlan:
    """Validate a plan made in Python; its keys and values are those of the file.

    ``settings`` are as for ``load_plan``; ``source`` gives locations, for a plan that was made from other files.

    Raises:
        PlanFileError: all findings, PP102 to PP109; they have locations only with ``source``.
    """
    spec = None
    changed, problems = with_settings(data, settings)
    if not problems:
        spec, problems = _validate(changed)
    if spec is None:
        findings = (_given_finding(problem, source, settings) for problem in problems)
        raise PlanFileError(*_without_repeats(findings), source=source)
    return LoadedPlan(spec, source)


def _validate(data: object) -> tuple[PlanSpec | None, list[Problem]]:
    """Return the spec, or all problems: one of the two is empty."""
    if not isinstance(data, Mapping):
        value = "nothing: the plan is empty" if data is None else describe_value(data)
        return None, [
            Problem(
                "PP105",
                (),
                f"a plan is a mapping of keys, found {value}",
                help="begin with `pipeproof: 1`, then model, topology and schedule",
            )
        ]
    later = _later_problems(data)
    try:
        sections = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
        spec = PlanSpec.model_validate(sections)
    except ValidationError as error:
        refused = {problem.path for problem in later}
        others = [problem for problem in problems_of(error) if not _is_below(problem.path, refused)]
        return None, [*later, *others]
    return (None, later) if later else (spec, [])


def _is_below(path: KeyPath, roots: set[KeyPath]) -> bool:
    return any(path[:length] in roots for length in range(1, len(path) + 1))


def _finding(problem: Problem, source: SourceMap | None) -> Finding:
    location = source.locate(problem.path, key=problem.at_key) if source is not None else None
    return Finding(problem.code, Severity.ERROR, problem.message, location, problem.help)


def _without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))


@dataclass(frozen=True, slots=True)
class LaterFeature:
    """Values of a key whose feature is planned for a later release; ``alternative`` is for this release.

    ``applies`` takes the section, and limits the row to some of its other values.
    """

    section: str
    key: str
    values: tuple[str, ...]
    applies: Callable[[Mapping[str, object]], bool]
    feature: str
    alternative: str


def _with_paddle(run: Mapping[str, object]) -> bool:
    return run.get("backend", "paddle") == "paddle"


LATER: tuple[LaterFeature, ...] = (
    LaterFeature(
        "run",
        "dtype",
        ("bfloat16", "float16"),
        _with_paddle,
        "16-bit types with Paddle",
        "use float32 or float64, or `backend: torch`",
    ),
)
"""Values that are refused with PP107, which explains more than PP106."""


def _later_problems(data: Mapping[str, object]) -> list[Problem]:
    """PP107 for each key of ``data`` (a plan before validation) whose feature is not in this release."""
    problems = []
    for row in LATER:
        section = data.get(row.section)
        if not isinstance(section, Mapping) or row.key not in section:
            continue
        value = section[row.key]
        if isinstance(value, str) and value in row.values and row.applies(section):
            problems.append(
                Problem(
                    "PP107",
                    (row.section, row.key),
                    f"`{row.section}.{row.key}: {shortened(value)}` comes in a later release, with {row.feature}",
                    help=f"in this release, {row.alternative}",
                )
            )
    return problems
