"""Findings against a baseline: which are known, which are new, and which entries are of no use any more.

A known finding is shown and does not fail a check; nothing else changes. A
plan with a known error has no certificate, and is not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeproof.specs.baseline_file import NOT_A_BASELINE, Entry, LoadedBaseline
from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.fingerprint import fingerprint
from pipeproof.specs.render import finding_to_json

STALE = RuleDoc(
    code="PP156",
    title="a baseline entry is of a finding that is not there",
    severity="note",
    explanation=(
        "The baseline says that a finding is known, and the plan has none of that fingerprint, or fewer than it says; "
        "or the plan itself is gone. An entry that stays would hide the finding when it comes back. The note does not "
        "come for a code whose rule did not run (`--select`, `--ignore`), nor for plans that this check did not judge."
    ),
    wrong="baseline.yaml has PP411 for plan.yaml, which has become a GPipe plan, about which PP411 says nothing",
    right="the entry is removed, by hand or by `pipeproof check plan.yaml --write-baseline baseline.yaml`",
    kind=ExampleKind.OUTCOME,
)

BASELINE_CODES = (NOT_A_BASELINE, STALE)


@dataclass(frozen=True, slots=True)
class Known:
    """A finding that the baseline has, and the reason that it gives (None where nobody wrote one)."""

    finding: Finding
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """As ``known`` lists it; see ``docs/schemas/check.schema.json``."""
        return {**finding_to_json(self.finding), "fingerprint": fingerprint(self.finding), "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Compared:
    """The findings of one plan, held against a baseline; ``new`` has the notes about stale entries, too."""

    file: str
    new: tuple[Finding, ...]
    known: tuple[Known, ...]


def against(
    baseline: LoadedBaseline, files: tuple[str, ...], findings: Sequence[Finding], picks: Callable[[str], bool]
) -> Compared:
    """Hold the findings of one plan against the baseline.

    Args:
        baseline: what is known.
        files: the plan, as entries name it.
        findings: what the check found, whatever their severity.
        picks: whether the rule of a code ran: nothing is said of entries with others.
    """
    mine = {entry.fingerprint: (index, entry) for index, entry in enumerate(baseline.entries) if entry.files == files}
    left = {known: entry.count for known, (_, entry) in mine.items()}
    new: list[Finding] = []
    known: list[Known] = []
    for finding in findings:
        mark = fingerprint(finding)
        if left.get(mark, 0):
            left[mark] -= 1
            known.append(Known(finding, mine[mark][1].reason))
        else:
            new.append(finding)
    for mark, (index, entry) in mine.items():
        if left[mark] and picks(entry.code):
            new.append(_stale(baseline, index, entry, left[mark]))
    return Compared(str(baseline.path), tuple(sorted(new, key=lambda finding: finding.code)), tuple(known))


def of_missing_files(baseline: LoadedBaseline) -> tuple[Finding, ...]:
    """A note for each entry whose plan is not there any more, which no check could ever judge again."""
    folder = baseline.path.resolve().parent
    return tuple(
        Finding(
            STALE.code,
            Severity.NOTE,
            f"{entry.code} is known of {' '.join(gone)}, which is not there any more",
            baseline.place(index),
            "remove the entry",
        )
        for index, entry in enumerate(baseline.entries)
        if (gone := [name for name in entry.files if not (folder / name).exists()])
    )


def _stale(baseline: LoadedBaseline, index: int, entry: Entry, missing: int) -> Finding:
    there = entry.count - missing
    found = f"{there} of {entry.count} known findings are" if there else "nothing of the kind is"
    mend = f"write `count: {there}`" if there else "remove the entry"
    message = f"{entry.code} is known of {' '.join(entry.files)}, but {found} there: {entry.message}"
    return Finding(STALE.code, Severity.NOTE, message, baseline.place(index), mend)


def entries_of(
    judged: Mapping[tuple[str, ...], Sequence[Finding]],
    old: Sequence[Entry],
    picks: Callable[[str], bool],
    reason: str | None,
) -> list[Entry]:
    """The entries of a baseline that is written.

    Args:
        judged: of each plan, as entries name it, what was found.
        old: the entries of the file that is replaced. Their reasons are kept; entries of plans that were not judged,
            and of rules that did not run, are kept whole.
        picks: whether the rule of a code ran.
        reason: of the entries that had none.
    """
    reasons = {(entry.files, entry.fingerprint): entry.reason for entry in old}
    kept = [entry for entry in old if entry.files not in judged or not picks(entry.code)]
    entries = {(entry.files, entry.fingerprint): entry for entry in kept}
    for files, findings in judged.items():
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
