"""Baselines of ``pipeproof check``: the file of known findings, and the comparison of findings with it.

An entry names the checked files relative to the baseline file, so that the
file can be committed and used from any directory. A known finding is shown
and does not fail a check; nothing else changes: a plan with a known error has
no certificate, and is not run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from pipeproof.diagnostics.finding import Finding, Location, code_order
from pipeproof.diagnostics.fingerprint import fingerprint
from pipeproof.diagnostics.rule_doc import ExampleKind, RuleDoc
from pipeproof.diagnostics.source import PlanFileError, SourceMap, read_text
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.diagnostics.yaml_tree import parse_text, read_model

_HEAD: Final = """\
# Findings that are known, for `pipeproof check --baseline`. `pipeproof check --write-baseline` writes this file anew
# and keeps the reasons. Give each entry a `reason`; remove the entry when the finding is fixed.
"""

NOT_A_BASELINE = RuleDoc(
    code="PP155",
    title="the file is not a baseline",
    explanation=(
        "`--baseline FILE` reads a file that `--write-baseline FILE` wrote: `pipeproof_baseline: 1` and a list of "
        "findings, each with the checked files, code, severity, fingerprint, count and message, and with a reason if "
        "somebody gave one. A file that cannot be read, is truncated, or has other keys or other types is refused, and "
        "no plan is checked: a baseline that is half read would fail known findings, or pass new ones."
    ),
    wrong="findings:\n  - {code: PP411, reason: it runs on gloo only}",
    right="pipeproof_baseline: 1\nfindings: []",
    kind=ExampleKind.OUTCOME,
)


class Entry(BaseModel):
    """Known findings of one fingerprint about one plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)] = Field(
        description="The checked files: a plan, a program, or files of another tool; relative to the baseline file."
    )
    code: Annotated[str, StringConstraints(pattern=r"^PP[1-9][0-9]{2}$")] = Field(description="Code of the findings.")
    severity: Literal["error", "warning", "note"] = Field(description="Severity of the findings.")
    fingerprint: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] = Field(
        description="Identity of the findings across checks; `partialFingerprints` in SARIF."
    )
    count: int = Field(ge=1, description="Number of known findings; one more is new.")
    message: str = Field(min_length=1, description="Message of the first one, for readers; it is not compared.")
    reason: Annotated[str, StringConstraints(pattern=r"\S")] | None = Field(
        default=None, description="Why they are accepted; kept when the file is written again."
    )


class Baseline(BaseModel):
    """Content of a baseline file."""

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


class BaselineError(PlanFileError):
    """A baseline that cannot be read."""


class LoadedBaseline:
    """A baseline with the location of each of its entries."""

    def __init__(self, path: Path, content: Baseline, source: SourceMap) -> None:
        self.path, self.entries, self._source = path, content.findings, source

    def location(self, index: int) -> Location:
        """Return the location of an entry: that of its code."""
        return self._source.locate(("findings", index, "code"))


def baseline_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Baseline.model_json_schema(mode="validation"),
        "title": "pipeproof check --write-baseline",
        "description": "Known findings, which do not fail `pipeproof check --baseline`.",
    }


def entry_files(files: Iterable[Path], baseline: Path) -> tuple[str, ...]:
    """Return file names as entries have them: relative to the directory of the baseline file, with slashes."""
    folder = Path(os.path.realpath(baseline)).parent  # ``resolve`` fails at links that lead to themselves
    return tuple(Path(os.path.relpath(file.resolve(), folder)).as_posix() for file in files)


def load_baseline(path: Path) -> LoadedBaseline:
    """Read a baseline.

    Raises:
        BaselineError: PP155, with locations in the file.
    """
    shown = str(path)
    try:
        tree = parse_text(read_text(shown), shown)
    except PlanFileError as error:
        raise BaselineError(*(_not_a_baseline(f.message, f.location) for f in error.findings)) from error
    content = read_model(tree, Baseline, "a baseline", _not_a_baseline)
    if isinstance(content, list):
        raise BaselineError(*content, source=tree.source)
    return LoadedBaseline(path, content, tree.source)


def _not_a_baseline(message: str, location: Location | None) -> Finding:
    fix = "`pipeproof check PLAN --write-baseline FILE` writes a baseline"
    return NOT_A_BASELINE.finding(message, location, fix)


def baseline_text(entries: Sequence[Entry]) -> str:
    """Return the text of a file with these entries, in a fixed order."""
    if not entries:
        return f"{_HEAD}pipeproof_baseline: 1\nfindings: []\n"
    lines = [f"{_HEAD}pipeproof_baseline: 1\nfindings:\n"]
    for entry in sorted(entries, key=lambda entry: (entry.files, entry.code, entry.fingerprint)):
        content = entry.model_dump(mode="json", exclude_none=True)
        for position, (key, value) in enumerate(content.items()):
            lines.append(f"{'    ' if position else '  - '}{key}: {_quoted(value)}\n")
    return "".join(lines)


def _quoted(value: object) -> str:
    """A value as JSON on one line, printable: JSON is YAML, and its strings are never read as numbers or dates."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


STALE = RuleDoc(
    code="PP156",
    title="a baseline entry matches no finding",
    severity="note",
    explanation=(
        "The baseline lists a known finding, and the plan has no finding of that fingerprint, or fewer than its count; "
        "or the plan file no longer exists. An entry that stays would hide the finding if it came back. There is no "
        "note for a code whose rule did not run (`--select`, `--ignore`), nor for a plan that was not checked."
    ),
    wrong="baseline.yaml has PP411 for plan.yaml, which is a GPipe plan now and has no PP411",
    right="the entry is removed, by hand or by `pipeproof check plan.yaml --write-baseline baseline.yaml`",
    kind=ExampleKind.OUTCOME,
)

BASELINE_CODES = (NOT_A_BASELINE, STALE)


@dataclass(frozen=True, slots=True)
class KnownFinding:
    """A finding that is in the baseline, with the reason there (None without one)."""

    finding: Finding
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return an item of ``known``; see ``docs/schemas/check.schema.json``."""
        return {**finding_to_json(self.finding), "fingerprint": fingerprint(self.finding), "reason": self.reason}


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """Findings of one plan after a comparison with a baseline; ``new`` includes the notes about stale entries."""

    file: str
    new: tuple[Finding, ...]
    known: tuple[KnownFinding, ...]


def compare_with_baseline(
    baseline: LoadedBaseline, files: tuple[str, ...], findings: Sequence[Finding], picks: Callable[[str], bool]
) -> BaselineComparison:
    """Compare the findings of one plan with the baseline.

    Args:
        baseline: the known findings.
        files: the plan, as entries name it.
        findings: the findings of the check, of every severity.
        picks: selects rules that ran, by code; entries of other rules are never stale.
    """
    entries = {
        entry.fingerprint: (index, entry) for index, entry in enumerate(baseline.entries) if entry.files == files
    }
    left = {mark: entry.count for mark, (_, entry) in entries.items()}
    new: list[Finding] = []
    known: list[KnownFinding] = []
    for finding in findings:
        mark = fingerprint(finding)
        if left.get(mark, 0):
            left[mark] -= 1
            known.append(KnownFinding(finding, entries[mark][1].reason))
        else:
            new.append(finding)
    for mark, (index, entry) in entries.items():
        if left[mark] and picks(entry.code):
            new.append(_stale(baseline, index, entry, left[mark]))
    return BaselineComparison(str(baseline.path), tuple(sorted(new, key=code_order)), tuple(known))


def missing_file_notes(baseline: LoadedBaseline) -> tuple[Finding, ...]:
    """Return a note for each entry whose plan file no longer exists, so that no check can match it."""
    folder = Path(os.path.realpath(baseline.path)).parent
    return tuple(
        STALE.finding(
            f"{entry.code} is known of {' '.join(missing)}, which no longer exists",
            baseline.location(index),
            "remove the entry",
        )
        for index, entry in enumerate(baseline.entries)
        if (missing := [name for name in entry.files if not (folder / name).exists()])
    )


def _stale(baseline: LoadedBaseline, index: int, entry: Entry, missing: int) -> Finding:
    present = entry.count - missing
    number = f"only {present} of {entry.count} known findings" if present else "no such finding"
    fix = f"write `count: {present}`" if present else "remove the entry"
    message = f"{entry.code} is known of {' '.join(entry.files)}, and the check has {number}: {entry.message}"
    return STALE.finding(message, baseline.location(index), fix)


def updated_entries(
    checked: Mapping[tuple[str, ...], Sequence[Finding]],
    old: Sequence[Entry],
    picks: Callable[[str], bool],
    reason: str | None,
) -> list[Entry]:
    """Return the entries of a baseline that is written.

    Args:
        checked: the findings of each checked plan, by its files as entries name them.
        old: the entries of the file that is replaced. Their reasons are kept; entries of plans that were not checked,
            and of rules that did not run, are kept whole.
        picks: selects rules that ran, by code.
        reason: reason of entries without one.
    """
    reasons = {(entry.files, entry.fingerprint): entry.reason for entry in old}
    kept = [entry for entry in old if entry.files not in checked or not picks(entry.code)]
    entries = {(entry.files, entry.fingerprint): entry for entry in kept}
    for files, findings in checked.items():
        counts = Counter(map(fingerprint, findings))
        for finding in findings:
            key = files, fingerprint(finding)
            if key not in entries:
                entries[key] = Entry(
                    files=files,
                    code=finding.code,
                    severity=finding.severity.value,
                    fingerprint=key[1],
                    count=counts[key[1]],
                    message=finding.message,
                    reason=reasons.get(key) or reason,
                )
    return list(entries.values())
