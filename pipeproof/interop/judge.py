"""Judging an imported plan: the rules' findings beside the importer's own, all with places in the user's files."""

from __future__ import annotations

from dataclasses import replace

from pipeproof.interop.codes import ASSUMED, NOT_SHOWN
from pipeproof.interop.imported import Assumption, Imported
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.load import LoadedPlan, plan_from_dict
from pipeproof.specs.problems import dotted
from pipeproof.verify.check import Report, check
from pipeproof.verify.selection import ALL_RULES, Selection


def load_imported(imported: Imported) -> LoadedPlan:
    """The imported plan, whose keys are found in the user's own files.

    Raises:
        PlanFileError: the settings make no plan, with places in those files.
    """
    return plan_from_dict(imported.plan, source=imported.source)


def check_imported(imported: Imported, selection: Selection = ALL_RULES) -> Report:
    """Judge an imported plan by every selected rule, and add what importing it found.

    Raises:
        BadPlanError: the settings make no plan, or one that cannot be lowered.
    """
    report = check(load_imported(imported), selection)
    retell, spec = imported.retell, report.subject.plan.spec
    told = report.findings if retell is None else retell(spec, report.findings)
    own = [finding for finding in import_findings(imported) if selection.picks(finding.code)]
    return replace(report, findings=tuple(sorted([*told, *own], key=lambda finding: finding.code)))


def import_findings(imported: Imported) -> tuple[Finding, ...]:
    """The importer's own findings, one about all that was assumed, and one about each setting that is not shown."""
    found = list(imported.findings)
    if imported.assumptions:
        found.append(_assumed(imported.assumptions))
    found += [
        Finding(NOT_SHOWN.code, Severity.NOTE, f"`{setting.name}`: {setting.why}", setting.location)
        for setting in imported.ignored
    ]
    return tuple(found)


def _assumed(assumptions: tuple[Assumption, ...]) -> Finding:
    by_reason: dict[str, list[str]] = {}
    for assumption in assumptions:
        by_reason.setdefault(assumption.why, []).append(f"{dotted(assumption.key)} {_plain(assumption.value)}")
    lines = [f"{', '.join(values)}: {why}" for why, values in by_reason.items()]
    keys = [dotted(assumption.key) for assumption in assumptions]
    return Finding(
        ASSUMED.code,
        Severity.NOTE,
        "\n".join((f"{len(keys)} value{'s were' if len(keys) > 1 else ' was'} assumed", *lines)),
        help=f"say them: `--set {keys[0]}=VALUE`, and so on",
    )


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
