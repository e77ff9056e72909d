"""All rules, in the order of their codes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.diagnostics.finding import Finding, Location, RuleDoc, Severity
from pipeproof.diagnostics.problems import listed
from pipeproof.verify import (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    content_rules,
    deadlock,
    fifo_matching,
    layouts,
    lifetime,
    memory_budget,
    message_contents,
    p2p_data_flow,
    placement,
)
from pipeproof.verify.gradients import gradient_rules, kept_elements
from pipeproof.verify.subject import Rule, Subject

_MODULES = (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    content_rules,
    deadlock,
    fifo_matching,
    kept_elements,
    gradient_rules,
    layouts,
    lifetime,
    memory_budget,
    message_contents,
    p2p_data_flow,
    placement,
)

RULES: tuple[Rule, ...] = tuple(
    sorted((rule for module in _MODULES for rule in module.RULES), key=lambda rule: rule.doc.code)
)


_PATTERN = re.compile(r"(?:PP)?(?:([1-9])(?:XX)?|([1-9][0-9])X?|([1-9][0-9]{2}))", re.ASCII | re.IGNORECASE)
"""``PP401``, ``PP40`` and ``40x``, ``PP4`` and ``4xx``; the letters may be missing."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The rules to run: those whose code begins with one of ``select`` (all, if it is empty) and none of ``ignore``."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def picks(self, code: str) -> bool:
        """Return True if the rule of this code runs."""
        return (not self.select or code.startswith(self.select)) and not code.startswith(self.ignore)


ALL_RULES = Selection()
"""All rules: a check without one of them gives no certificate."""


def parse_codes(texts: Iterable[str], rule_codes: Sequence[str]) -> tuple[str, ...]:
    """The prefixes of codes that comma-separated lists such as ``PP401,3xx`` name.

    Raises:
        ValueError: an entry is not a code, or not a prefix in ``rule_codes``; the message names similar codes.
    """
    return tuple(_beginning(part.strip(), rule_codes) for text in texts for part in text.split(","))


def _beginning(text: str, rule_codes: Sequence[str]) -> str:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a code; examples: PP401, PP40, 4xx")
    digits = next(group for group in match.groups() if group is not None)
    beginning = f"PP{digits}"
    if any(code.startswith(beginning) for code in rule_codes):
        return beginning
    family = [code for code in rule_codes if code.startswith(beginning[:3])]
    if family:
        raise ValueError(f"`check` has no rule {text!r}; in that family are {listed(family, 'and')}")
    families = sorted({f"{code[2]}xx" for code in rule_codes})
    raise ValueError(f"`check` has no rule {text!r}; its families are {listed(families, 'and')}")


IMPOSSIBLE = RuleDoc(
    code="PP150",
    title="a suppression names a code that cannot be suppressed",
    explanation=(
        "A plan can declare a warning or note of `check` as known and intended. An error cannot be "
        "suppressed: the plan would hang or compute something else, and a reason does not change that "
        "(`pipeproof run --unsafe` runs the plan anyway and reports the damage). The entry has to "
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
        "plan has changed since, or the code is not the intended one; a leftover entry would "
        "hide the finding when it comes back for another reason. The note does not appear if the "
        "code's rule did not run (`--select`, `--ignore`)."
    ),
    wrong="transport: full\nsuppress: [{code: PP202, reason: the same file serves larger topologies}]",
    right="transport: full",
)

SUPPRESSION_CODES = (IMPOSSIBLE, UNUSED)


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A finding that the plan suppresses, the reason, and its location in the plan."""

    finding: Finding
    reason: str
    location: Location | None


def suppress(
    subject: Subject, findings: Sequence[Finding], docs: Mapping[str, RuleDoc], run: Collection[str]
) -> tuple[tuple[Finding, ...], tuple[Suppressed, ...]]:
    """Set aside the findings that the plan suppresses.

    Args:
        subject: a plan with its suppressions; a graph alone has none.
        findings: the findings of the rules.
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
        origin = subject.locate("suppress", index, "code")
        selected = [finding for finding in kept if finding.code == code and finding.severity is not Severity.ERROR]
        if selected:  # also of a rule whose findings are errors elsewhere: its document has the worst case
            suppressed += [Suppressed(finding, entry.reason, origin) for finding in selected]
            kept = [finding for finding in kept if finding.code != code or finding.severity is Severity.ERROR]
        elif doc is None or doc.severity == Severity.ERROR:
            about.append(_impossible(code, doc, docs, origin))
        elif code in run:
            about.append(_unused(code, kept, suppressed, origin))
    return (*kept, *(f for f in about if f.code in run)), tuple(suppressed)


def _impossible(code: str, doc: RuleDoc | None, docs: Mapping[str, RuleDoc], origin: Location | None) -> Finding:
    if doc is not None:
        return IMPOSSIBLE.finding(
            f"{code} ({doc.title}) is an error, and errors cannot be suppressed",
            location=origin,
            help="fix the plan and remove the entry; `pipeproof run --unsafe` runs a plan that has errors",
        )
    possible = [other for other, doc in docs.items() if doc.severity != Severity.ERROR]
    return IMPOSSIBLE.finding(
        f"no rule of `check` has the code {code}",
        location=origin,
        help=f"codes that can be suppressed: {listed(sorted(possible))}",
    )


def _unused(code: str, kept: Sequence[Finding], suppressed: Sequence[Suppressed], origin: Location | None) -> Finding:
    if any(f.code == code for f in kept):
        message = f"{code} is suppressed, but here it is an error, and errors cannot be suppressed"
    elif any(s.finding.code == code for s in suppressed):
        message = f"{code} is suppressed, but an entry before this one has suppressed all of it"
    else:
        message = f"{code} is suppressed, but nothing with this code was found"
    return UNUSED.finding(message, location=origin, help="remove the entry")
