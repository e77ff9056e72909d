"""The baseline file of ``pipeproof check --baseline``: findings that a team knows of, each with the reason.

Entries name the files that were judged, relative to the baseline file, so
that it may be checked in and used from any directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import BadPlanError, Finding, Location, Severity
from pipeproof.specs.load import PlanFileError, read_text
from pipeproof.specs.problems import describe_value, dotted
from pipeproof.specs.source import SourceMap
from pipeproof.specs.yaml_tree import parse_text

_MOST_FINDINGS = 5
_HEAD: Final = """\
# Findings that are known, for `pipeproof check --baseline`. `pipeproof check --write-baseline` writes this file anew
# and keeps the reasons. Give each entry a `reason`; remove the entry when the finding is mended.
"""

NOT_A_BASELINE = RuleDoc(
    code="PP155",
    title="the file is no baseline",
    explanation=(
        "`--baseline FILE` reads what `--write-baseline FILE` wrote: `pipeproof_baseline: 1` and a list of findings, "
        "each with the files that were judged, code, severity, fingerprint, count and message, and with a reason if "
        "somebody gave one. What cannot be read, was cut short, has other keys or other types is refused, and nothing "
        "is judged: a baseline that is half read would fail what is known, or pass what is new."
    ),
    wrong="findings:\n  - {code: PP411, reason: it runs on gloo only}",
    right="pipeproof_baseline: 1\nfindings: []",
    kind=ExampleKind.OUTCOME,
)


class Entry(BaseModel):
    """Findings of one fingerprint about one plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)] = Field(
        description="What was judged: a plan, a program, or the files of another tool; relative to the baseline file."
    )
    code: Annotated[str, StringConstraints(pattern=r"^PP[1-9][0-9]{2}$")] = Field(description="The findings' code.")
    severity: Literal["error", "warning", "note"] = Field(description="Their severity.")
    fingerprint: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] = Field(
        description="What they are known by; SARIF has it as `partialFingerprints`."
    )
    count: int = Field(ge=1, description="How many of them are known; one more is new.")
    message: str = Field(min_length=1, description="What the first of them said, for people; nothing compares it.")
    reason: Annotated[str, StringConstraints(pattern=r"\S")] | None = Field(
        default=None, description="Why they may stay, as somebody wrote it; kept when the file is written anew."
    )


class Baseline(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pipeproof_baseline: Literal[1] = Field(description="Version of this format.")
    findings: Annotated[tuple[Entry, ...], Field(strict=False)] = Field(description="By files, code and fingerprint.")

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        keys = [(entry.files, entry.fingerprint) for entry in self.findings]
        twice = [index for index, key in enumerate(keys) if key in keys[:index]]
        if twice:
            raise ValueError(f"`findings[{twice[0]}]` has the files and the fingerprint of one before it")
        return self


class BaselineError(BadPlanError):
    """A baseline that cannot be read, with its text (None if there is none)."""

    def __init__(self, *findings: Finding, source: SourceMap | None = None) -> None:
        super().__init__(*findings)
        self.source = source


class LoadedBaseline:
    """A baseline with the place of each of its entries."""

    def __init__(self, path: Path, content: Baseline, source: SourceMap) -> None:
        self.path, self.entries, self._source = path, content.findings, source

    def place(self, index: int) -> Location:
        """Where an entry stands: its code, in which a reader recognises it."""
        return self._source.locate(("findings", index, "code"))


def baseline_json_schema() -> dict[str, Any]:
    """The JSON Schema of the file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Baseline.model_json_schema(mode="validation"),
        "title": "pipeproof check --write-baseline",
        "description": "Findings that are known, and do not fail `pipeproof check --baseline`.",
    }


def named(files: Iterable[Path], baseline: Path) -> tuple[str, ...]:
    """The files as entries name them: relative to the baseline file's directory, with slashes."""
    folder = baseline.resolve().parent
    return tuple(Path(os.path.relpath(file.resolve(), folder)).as_posix() for file in files)


def load_baseline(path: Path) -> LoadedBaseline:
    """Read a baseline.

    Raises:
        BaselineError: PP155, with places in the file.
    """
    shown = str(path)
    try:
        tree = parse_text(read_text(shown), shown)
    except PlanFileError as error:
        raise BaselineError(*(_wrong(found.message, found.location) for found in error.findings)) from error
    source = tree.source
    if tree.problems:
        raise BaselineError(
            *(_wrong(problem.message, source.at(problem.span)) for problem in tree.problems), source=source
        )
    if not isinstance(tree.data, dict):
        found = "nothing" if tree.data is None else describe_value(tree.data)
        raise BaselineError(_wrong(f"a baseline is a mapping of keys, found {found}", source.locate(())), source=source)
    try:
        content = Baseline.model_validate(tree.data)
    except ValidationError as error:
        raise BaselineError(*_found(error, source), source=source) from error
    return LoadedBaseline(path, content, source)


def _found(error: ValidationError, source: SourceMap) -> list[Finding]:
    details = error.errors(include_url=False)
    findings = []
    for detail in details[:_MOST_FINDINGS]:
        at, words = detail["loc"], detail["msg"]
        where = dotted(at) if at else source.file
        findings.append(_wrong(f"`{where}`: {words[:1].lower()}{words[1:]}", source.locate(at)))
    if len(details) > len(findings):
        findings.append(_wrong(f"{len(details) - len(findings)} more of the kind", source.locate(())))
    return findings


def _wrong(message: str, location: Location | None) -> Finding:
    mend = "`pipeproof check PLAN --write-baseline FILE` writes a baseline"
    return Finding(NOT_A_BASELINE.code, Severity.ERROR, message, location, mend)


def baseline_text(entries: Sequence[Entry]) -> str:
    """The text of a file with these entries, in one order whatever theirs is."""
    if not entries:
        return f"{_HEAD}pipeproof_baseline: 1\nfindings: []\n"
    lines = [f"{_HEAD}pipeproof_baseline: 1\nfindings:\n"]
    for entry in sorted(entries, key=lambda entry: (entry.files, entry.code, entry.fingerprint)):
        content = entry.model_dump(mode="json", exclude_none=True)
        for position, (key, value) in enumerate(content.items()):
            lines.append(f"{'    ' if position else '  - '}{key}: {_quoted(value)}\n")
    return "".join(lines)


def _quoted(value: object) -> str:
    """A value as JSON, which is YAML as well and never taken for a number or a date; on one line, and printable."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
