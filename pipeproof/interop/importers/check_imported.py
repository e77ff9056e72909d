"""Check of an imported plan: the rules' findings and the importer's own, with locations in the user's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeproof.api.check_result import CheckResult
from pipeproof.diagnostics.finding import BadPlanError, Finding, code_order, relinked
from pipeproof.diagnostics.problems import dotted
from pipeproof.interop.importers.import_codes import ASSUMED, ASSUMED_DECIDES, NOT_SHOWN, UNDECIDED
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

    Assumed facts that are true or false are also tried with the opposite value: if the verdict changes, it is
    undecided.

    Raises:
        BadPlanError: the settings do not form a plan, or one that cannot be lowered.
    """
    report = _checked(imported, selection, on_progress)
    deciding = list(_deciding(imported, report, selection)) if selection.picks(ASSUMED_DECIDES.code) else []
    undecided = (*report.undecided, *(finding.message for finding in deciding))
    findings = tuple(sorted([*report.findings, *deciding], key=code_order))
    return replace(report, findings=findings, undecided=undecided)


def _checked(imported: Imported, selection: Selection, on_progress: OnProgress | None = None) -> CheckResult:
    """The check of a plan with the importer's assumptions."""
    report = CheckResult(**vars(check(load_imported(imported), selection, on_progress)))
    rephrase, spec = imported.rephrase, report.subject.plan.spec
    rule_findings: Sequence[Finding] = report.findings
    if rephrase is not None:
        rule_findings = relinked(rule_findings, rephrase(spec, report.findings))
    importer_findings = [finding for finding in import_findings(imported) if selection.picks(finding.code)]
    undecided = tuple(finding.message for finding in importer_findings if finding.code == UNDECIDED.code)
    findings = tuple(sorted([*rule_findings, *importer_findings], key=code_order))
    return replace(report, findings=findings, undecided=undecided)


def _deciding(imported: Imported, report: CheckResult, selection: Selection) -> Iterator[Finding]:
    """Assumed facts whose opposite value changes the verdict."""
    for assumption in imported.assumptions:
        if imported.again is None or not isinstance(assumption.value, bool):
            continue
        errors: Sequence[Finding]
        try:
            errors = _checked(imported.again({assumption.key: not assumption.value}), selection).errors
        except BadPlanError as error:
            errors = error.findings
        if bool(errors) == bool(report.errors):
            continue
        key = dotted(assumption.key)
        answers = ((assumption.value, report.errors), (not assumption.value, errors))
        shown = "; ".join(f"{_plain(value)}: {_answer(faults)}" for value, faults in answers)
        first = next(iter((*report.errors, *errors)))
        yield ASSUMED_DECIDES.finding(
            f"`{key}` is not in the files, and decides. {shown}",
            first.location,
            f"give `--set {key}=true` or `--set {key}=false`"
            + (f"; or {first.help.partition(';')[0]}" if first.help else ""),
        )


def _answer(errors: Sequence[Finding]) -> str:
    """``proved``, or how many errors refuse."""
    if not errors:
        return "proved"
    codes = ", ".join(sorted({finding.code for finding in errors}))
    return f"refused, {len(errors)} error{'s' if errors[1:] else ''} ({codes})"


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
