"""``pipeproof check``: what is judged, by which rules, and how the outcome is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pipeproof import __version__
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import PipeproofError, Severity

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.specs.sarif import SarifResult
    from pipeproof.verify.check import Report
    from pipeproof.verify.selection import Selection

Form = Literal["text", "json", "sarif"]


def selection_of(select: Sequence[str], ignore: Sequence[str]) -> Selection:
    """The rules that the options leave.

    Raises:
        click.BadParameter: an option names what is no rule, or both together leave none.
    """
    from pipeproof.verify.check import CHECK_CODES
    from pipeproof.verify.selection import Selection, parse_codes

    parsed = []
    for option, texts in (("--select", select), ("--ignore", ignore)):
        try:
            parsed.append(parse_codes(texts, CHECK_CODES))
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    selection = Selection(*parsed)
    if not any(map(selection.picks, CHECK_CODES)):
        raise click.BadParameter("no rule is left to run", param_hint="--ignore")
    return selection


def exit_status_of(report: Report, *, strict: bool) -> ExitStatus:
    """Errors fail a check; with ``strict``, warnings that are not suppressed do too."""
    failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return ExitStatus.FAILED if any(f.severity in failing for f in report.findings) else ExitStatus.OK


def show_report(report: Report, form: Form, file: Path, status: int, console: Console, *, everything: bool) -> None:
    """Write what was found: text for the console, or one JSON document."""
    match form:
        case "text":
            from pipeproof.verify.render import BRIEF, WHOLE, render_report

            render_report(report, console, WHOLE if everything else BRIEF)
        case "json":
            _write(report.to_json())
        case "sarif":
            from pipeproof.specs.sarif import SarifResult

            suppressed = [SarifResult(s.finding, s.reason, s.location) for s in report.suppressed]
            results = [*map(SarifResult, report.findings), *suppressed]
            _write_sarif(
                results, file, status, digest=report.digest, certified=report.certificate is not None,
                not_run=report.not_run,
            )  # fmt: skip


def show_refusal(error: PipeproofError, form: Form, file: Path, status: int, console: Callable[[], Console]) -> None:
    """Write why nothing could be judged; as text it goes to the console for errors."""
    match form:
        case "text":
            from pipeproof.specs.render import render_text

            render_text(error.findings, getattr(error, "source", None), console=console())
        case "json":
            from pipeproof.specs.render import finding_to_json

            _write({"digest": None, "findings": [finding_to_json(finding) for finding in error.findings]})
        case "sarif":
            from pipeproof.specs.sarif import SarifResult

            _write_sarif([*map(SarifResult, error.findings)], file, status)


def _write_sarif(results: Sequence[SarifResult], file: Path, status: int, **about: Any) -> None:
    from pipeproof.explain import all_docs
    from pipeproof.specs.sarif import sarif_log

    _write(sarif_log(results, all_docs(), version=__version__, file=str(file), exit_status=status, **about))


def _write(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2))
