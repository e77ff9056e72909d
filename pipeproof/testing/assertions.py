"""The assertion that a plan is sound by ``pipeproof check``."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.diagnostics.text_output import render_text
from pipeproof.specs.load_plan import LoadedPlan, load_plan, plan_from_dict
from pipeproof.verify.check_plan import CHECK_CODES, Report, check
from pipeproof.verify.check_text import BRIEF, render_report

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.diagnostics.source import SourceMap


Plan = str | os.PathLike[str] | Mapping[str, object] | LoadedPlan
"""A plan file, its content, or a loaded plan."""


def assert_plan_sound(plan: Plan, *, allow: Collection[str] = (), strict: bool = False) -> Report:
    """Fail, with the text that ``pipeproof check`` prints, unless a plan is proved.

    Args:
        plan: a path, a mapping with the content of a plan file, or a loaded plan.
        allow: codes of allowed findings.
        strict: warnings fail, too, as with ``check --strict``; notes never do.

    Returns:
        The report, with the digest, the certificate and every finding.

    Raises:
        AssertionError: a finding that is not allowed, or the plan cannot be loaded.
        ValueError: ``allow`` names a code that ``check`` never gives.
    """
    unknown = set(allow) - set(CHECK_CODES)
    if unknown:
        raise ValueError(f"`check` has no code {', '.join(sorted(unknown))}; docs/codes.md lists all")
    try:
        report = check(loaded(plan))
    except BadPlanError as error:
        source = error.source if isinstance(error, PlanFileError) else None
        raise AssertionError(findings_text(error.findings, source)) from error
    if unfit(report, allow, strict=strict):
        raise AssertionError(report_text(report))
    return report


def loaded(plan: Plan) -> LoadedPlan:
    """Load the plan of a path or a mapping.

    Raises:
        PlanFileError: it cannot be loaded.
    """
    if isinstance(plan, LoadedPlan):
        return plan
    return plan_from_dict(plan) if isinstance(plan, Mapping) else load_plan(plan)


def unfit(report: Report, allow: Collection[str] = (), *, strict: bool = False) -> list[Finding]:
    """The findings that make a check fail."""
    failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return [f for f in report.findings if f.severity in failing and f.code not in allow]


def report_text(report: Report) -> str:
    """Return the text of ``pipeproof check`` for a report, without colours."""
    return _text(lambda console: render_report(report, console, BRIEF))


def findings_text(findings: Iterable[Finding], source: SourceMap | None) -> str:
    """Return the text of ``pipeproof check`` for a plan that cannot be loaded, without colours."""
    return _text(lambda console: render_text(findings, source, console=console))


def _text(show: Callable[[Console], None]) -> str:
    from rich.console import Console

    text = io.StringIO()
    show(Console(file=text, width=120, no_color=True, highlight=False))
    return text.getvalue().rstrip()
