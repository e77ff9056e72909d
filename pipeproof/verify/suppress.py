"""Suppressions: findings that a plan says are known and wanted, each with a reason.

Only warnings and notes can be suppressed. Nothing is hidden: a suppressed
finding is counted, and reports for programs list it with its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.problems import listed
from pipeproof.verify.subject import Subject, finding

IMPOSSIBLE = RuleDoc(
    code="PP150",
    title="a suppression names what cannot be suppressed",
    severity="error",
    explanation=(
        "A plan can say of a warning or note of `check` that it is known and wanted. An error cannot be "
        "suppressed: the plan would hang or compute something else, and a reason does not change that "
        "(`pipeproof run --unsafe` runs it all the same, and says what the damage was). The entry has to "
        "name one whole code of a warning or note; a code that does not exist would suppress nothing, "
        "and nobody would notice."
    ),
    wrong="transport: partial\nsuppress: [{code: PP201, reason: it trains all the same}]",
    right="transport: partial\nsuppress: [{code: PP202, reason: the same file serves larger topologies}]",
)

UNUSED = RuleDoc(
    code="PP151",
    title="a suppression suppresses nothing",
    severity="note",
    explanation=(
        "No warning or note with this code was found that another entry had not taken already. The "
        "plan has changed since, or the code is not the one that was meant; an entry that stays would "
        "hide the finding when it comes back for another reason. The note does not come where the "
        "code's rule did not run (`--select`, `--ignore`)."
    ),
    wrong="transport: full\nsuppress: [{code: PP202, reason: the same file serves larger topologies}]",
    right="transport: full",
)

SUPPRESSION_CODES = (IMPOSSIBLE, UNUSED)


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A finding that the plan suppresses, why, and where the plan says so."""

    finding: Finding
    reason: str
    location: Location | None


def suppress(
    subject: Subject, findings: Sequence[Finding], docs: Mapping[str, RuleDoc], run: Collection[str]
) -> tuple[tuple[Finding, ...], tuple[Suppressed, ...]]:
    """Set aside what the plan suppresses.

    Args:
        subject: a plan with its suppressions; a graph alone has none.
        findings: what the rules found.
        docs: the documents of the rules, by code.
        run: the codes of the rules that ran, of this module's two included.

    Returns:
        The findings that count, with those about the suppressions themselves, and the suppressed ones.
    """
    entries = subject.lowered.spec.suppress if subject.lowered is not None else ()
    kept = list(findings)
    suppressed: list[Suppressed] = []
    about: list[Finding] = []
    for index, entry in enumerate(entries):
        code, doc = entry.code, docs.get(entry.code)
        place = subject.locate("suppress", index, "code")
        mine = [found for found in kept if found.code == code and found.severity is not Severity.ERROR]
        if mine:  # also of a rule whose findings are errors elsewhere: its document has the worst case
            suppressed += [Suppressed(found, entry.reason, place) for found in mine]
            kept = [found for found in kept if found.code != code or found.severity is Severity.ERROR]
        elif doc is None or doc.severity == Severity.ERROR:
            about.append(_impossible(code, doc, docs, place))
        elif code in run:
            about.append(_unused(code, kept, suppressed, place))
    return (*kept, *(f for f in about if f.code in run)), tuple(suppressed)


def _impossible(code: str, doc: RuleDoc | None, docs: Mapping[str, RuleDoc], place: Location | None) -> Finding:
    if doc is not None:
        return finding(
            IMPOSSIBLE,
            f"{code} ({doc.title}) is an error, and errors cannot be suppressed",
            location=place,
            help="mend the plan and remove the entry; `pipeproof run --unsafe` runs a plan that has errors",
        )
    possible = [known for known, doc in docs.items() if doc.severity != Severity.ERROR]
    return finding(
        IMPOSSIBLE,
        f"no rule of `check` has the code {code}",
        location=place,
        help=f"what can be suppressed: {listed(sorted(possible))}",
    )


def _unused(code: str, kept: Sequence[Finding], suppressed: Sequence[Suppressed], place: Location | None) -> Finding:
    if any(f.code == code for f in kept):
        message = f"{code} is suppressed, but here it is an error, and errors cannot be suppressed"
    elif any(s.finding.code == code for s in suppressed):
        message = f"{code} is suppressed, but an entry before this one has suppressed all of it"
    else:
        message = f"{code} is suppressed, but nothing with this code was found"
    return finding(UNUSED, message, location=place, help="remove the entry")
