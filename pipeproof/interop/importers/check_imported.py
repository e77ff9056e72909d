"""Check of an imported plan: the rules' findings and the importer's own, with locations in the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.api.check_result import CheckResult
from pipeproof.diagnostics.finding import Finding, code_order, relinked
from pipeproof.diagnostics.problems import dotted
from pipeproof.interop.importers.import_codes import ASSUMED, NOT_SHOWN, UNDECIDED
from pipeproof.interop.importers.imported import Assumption, Imported
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.check_plan import OnProgress, check
from pipeproof.verify.registry import ALL_RULES, Selection


def load_imported(imported: Imported) -> LoadedPlan:
    """Load the imported plan; its source map points into the user's files.

    Raises:
        PlanFileError: the settings do not form a plan; with locations in those files, or the ``--set`` of a value.
    """
    return plan_from_dict(imported.plan, imported.settings, source=imported.source)


def check_imported(
    imported: Imported, selection: Selection = ALL_RULES, on_progress: OnProgress | None = None
) -> CheckResult:  # fmt: skip
    """Check an imported plan with every selected rule, and add the importer's findings.

    Raises:
        BadPlanError: the settings do not form a plan, or one that cannot be lowered.
    """
    report = CheckResult(**vars(check(load_imported(imported), selection, on_progress)))
    rephrase, spec = imported.rephrase, report.subject.plan.spec
    rule_findings: Sequence[Finding] = report.findings
    if rephrase is not None:
        rule_findings = relinked(rule_findings, rephrase(spec, report.findings))
    importer_findings = [finding for finding in import_findings(imported) if selection.picks(finding.code)]
    undecided = tuple(finding.message for finding in importer_findings if finding.code == UNDECIDED.code)
    findings = tuple(sorted([*rule_findings, *importer_findings], key=code_order))
    return replace(report, findings=findings, undecided=undecided)


def import_findings(imported: Imported) -> tuple[Finding, ...]:
    """Return the importer's findings: its own, one for all assumptions, and one for each setting that is not shown."""
    findings = list(imported.findings)
    if imported.assumptions:
        findings.append(_assumed(imported.assumptions))
    findings += [
        NOT_SHOWN.finding(f"`{setting.name}`: {setting.why}", setting.location) for setting in imported.ignored
    ]
    return tuple(findings)


def _assumed(assumptions: tuple[Assumption, ...]) -> Finding:
    by_reason: dict[str, list[str]] = {}
    for assumption in assumptions:
        by_reason.setdefault(assumption.why, []).append(f"{dotted(assumption.key)} {_plain(assumption.value)}")
    lines = [f"{', '.join(values)}: {why}" for why, values in by_reason.items()]
    keys = [dotted(assumption.key) for assumption in assumptions]
    return ASSUMED.finding(
        "\n".join((f"{len(keys)} value{'s were' if len(keys) > 1 else ' was'} assumed", *lines)),
        help=f"give them: `--set {keys[0]}=VALUE`, and so on",
    )


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
