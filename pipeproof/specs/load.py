"""Reading a plan: from a file or a dict to a ``PlanSpec``, or to every finding about it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeproof.specs.finding import BadPlanError, Finding, Location, Severity
from pipeproof.specs.later import later_problems
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import KeyPath, Problem, describe_value, nearest_name
from pipeproof.specs.pydantic_problems import problems_of
from pipeproof.specs.source import LINE_BREAK, SourceMap
from pipeproof.specs.yaml_tree import parse_text

MAX_BYTES = 2**20
"""Largest plan file."""


@dataclass(frozen=True)
class LoadedPlan:
    """A valid plan and the text that it came from (None for plans made in Python)."""

    spec: PlanSpec
    source: SourceMap | None = None


class PlanFileError(BadPlanError):
    """A plan that cannot be loaded, with the text to show beside the findings (None if there is none)."""

    def __init__(self, *findings: Finding, source: SourceMap | None = None) -> None:
        super().__init__(*findings)
        self.source = source


def load_plan(path: str | os.PathLike[str]) -> LoadedPlan:
    """Read and validate a plan file (YAML or JSON).

    Raises:
        PlanFileError: with everything found wrong, in the order of the file: PP100 to PP109.
    """
    name = os.fspath(path)
    tree = parse_text(read_text(name), name)
    source = tree.source
    findings = [
        Finding(problem.code, Severity.ERROR, problem.message, source.at(problem.span), problem.help)
        for problem in tree.problems
    ]
    spec = None
    if tree.complete:
        spec, problems = _validate(tree.data)
        findings += _without_repeats(_finding(problem, source) for problem in problems)
    if findings or spec is None:
        raise PlanFileError(*sorted(findings, key=_place), source=source)
    return LoadedPlan(spec, source)


def plan_from_dict(data: Mapping[str, object], *, source: SourceMap | None = None) -> LoadedPlan:
    """Validate a plan made in Python; its keys and values are those of the file.

    ``source`` says where they stand, for a plan that was made from other files.

    Raises:
        PlanFileError: with everything found wrong, PP102 to PP109; without places, unless a source has them.
    """
    spec, problems = _validate(data)
    if spec is None:
        raise PlanFileError(*_without_repeats(_finding(problem, source) for problem in problems), source=source)
    return LoadedPlan(spec, source)


def _validate(data: object) -> tuple[PlanSpec | None, list[Problem]]:
    """The spec, or every problem; exactly one of the two is there."""
    if not isinstance(data, Mapping):
        found = "nothing: the plan is empty" if data is None else describe_value(data)
        return None, [
            Problem(
                "PP105",
                (),
                f"a plan is a mapping of keys, found {found}",
                help="begin with `pipeproof: 1`, then model, topology and schedule",
            )
        ]
    later = later_problems(data)
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


def _place(finding: Finding) -> tuple[int, int, str]:
    location = finding.location
    return (location.line, location.column, finding.code) if location is not None else (0, 0, finding.code)


def read_text(name: str) -> str:
    """The text of a plan file, or of one like it; a byte order mark is left out.

    Raises:
        PlanFileError: PP100.
    """
    try:
        with Path(name).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot read `{name}`: {reason[:1].lower()}{reason[1:]}"
        raise _unreadable(message, help=_what_to_name(Path(name), error)) from error
    if len(content) > MAX_BYTES:
        raise _unreadable(f"`{name}` has more than {MAX_BYTES} bytes, which no plan needs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = LINE_BREAK.split(content[: error.start].decode("utf-8-sig"))
        raise _unreadable(
            f"byte 0x{content[error.start]:02x} is not UTF-8 text",
            Location(name, len(before), len(before[-1]) + 1),
            help="save the file as UTF-8",
        ) from error


def _what_to_name(path: Path, error: Exception) -> str | None:
    if isinstance(error, IsADirectoryError):
        return "name a file in it"
    if isinstance(error, PermissionError):
        return "give this user leave to read it"
    if not isinstance(error, FileNotFoundError):
        return None
    try:
        near = nearest_name(path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.is_file()))
    except OSError:
        near = None
    return f"did you mean `{path.with_name(near)}`?" if near else "name a file that is there, as seen from here"


def _unreadable(message: str, location: Location | None = None, help: str | None = None) -> PlanFileError:
    return PlanFileError(Finding("PP100", Severity.ERROR, message, location, help))
