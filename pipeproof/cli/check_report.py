"""The checks of one ``pipeproof check``: their results and the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import click

from pipeproof.diagnostics.finding import BadPlanError, Finding, PipeproofError, Severity
from pipeproof.exit_status import ExitStatus
from pipeproof.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.diagnostics.sarif_output import SarifResult
    from pipeproof.verify.check_plan import OnProgress, Report
    from pipeproof.verify.registry import Selection

Form = Literal["text", "json", "sarif"]


class ConsoleFactory(Protocol):
    """Factory of the consoles for results and for errors."""

    def __call__(self, *, stderr: bool) -> Console:
        """Return a console."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one plan, one program, or the files of one imported plan: a report, or the refusal of the input."""

    files: tuple[Path, ...]
    report: Report | None = None
    refusal: PipeproofError | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, without ignored and suppressed ones."""
        return () if self.report is None else self.report.findings

    def status(self, *, strict: bool) -> ExitStatus:
        """Return the exit status: errors and open verdicts fail a check; with ``strict``, warnings do too."""
        if self.report is None:
            return ExitStatus.BAD_INPUT if isinstance(self.refusal, BadPlanError) else ExitStatus.FAILED
        if self.report.undecided:
            return ExitStatus.FAILED
        failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return ExitStatus.FAILED if any(f.severity in failing for f in self.findings) else ExitStatus.OK


CheckTask = tuple[tuple[Path, ...], Callable[["OnProgress"], "Report"]]
"""The files of one check, and the function that runs it, which takes a callback for progress."""


def run_checks(tasks: Sequence[CheckTask], on_progress: OnProgress) -> list[CheckResult]:
    """Run all checks; with several, the refusal of one input does not stop the others.

    Raises:
        PipeproofError: the only input is refused.
    """
    results = []
    for files, run_check in tasks:
        on_progress(f"checking {files[0]}", 0, 0)
        try:
            results.append(CheckResult(files, run_check(on_progress)))
        except PipeproofError as error:
            if len(tasks) == 1:
                raise
            results.append(CheckResult(files, refusal=error))
    return results


def selection_of(select: Sequence[str], ignore: Sequence[str], others: Sequence[str]) -> Selection:
    """Return the rules that the options select; ``others`` are codes besides rules that they may name.

    Raises:
        click.BadParameter: an option names an unknown code, or both together leave no rule.
    """
    from pipeproof.verify.check_plan import CHECK_CODES
    from pipeproof.verify.registry import Selection, parse_codes

    all_codes = (*CHECK_CODES, *others)
    parsed = []
    for option, texts in (("--select", select), ("--ignore", ignore)):
        try:
            parsed.append(parse_codes(texts, all_codes))
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    selection = Selection(*parsed)
    if not any(map(selection.picks, all_codes)):
        raise click.BadParameter("no rule is left to run", param_hint="--ignore")
    return selection


def show_all(
    results: Sequence[CheckResult], form: Form, console_for: ConsoleFactory, *, strict: bool, everything: bool
) -> ExitStatus:
    """Write the findings of one plan or of several, and return the exit status of all."""
    status = max(result.status(strict=strict) for result in results)
    match form:
        case "text":
            _show_text(results, console_for, everything=everything)
        case "json" if len(results) == 1:
            _write(_to_json(results[0]))
        case "json":
            _write({"plans": [{"file": str(result.files[0]), "report": _to_json(result)} for result in results]})
        case "sarif":
            _show_sarif(results, status)
    return status


def _show_text(results: Sequence[CheckResult], console_for: ConsoleFactory, *, everything: bool) -> None:
    from pipeproof.diagnostics.text_output import render_text
    from pipeproof.verify.check_text import BRIEF, WHOLE, render_report

    console = console_for(stderr=False)
    for result in results:
        if len(results) > 1:
            console.print(f"== {result.files[0]}", style="bold", markup=False, soft_wrap=True)
        if result.report is not None:
            render_report(result.report, console, WHOLE if everything else BRIEF)
        elif result.refusal is not None:
            console.print("[bold red]cannot be checked[/]")
            source = getattr(result.refusal, "source", None)
            render_text(result.refusal.findings, source, console=console_for(stderr=True))
        if len(results) > 1:
            console.print()
    if len(results) > 1:
        unread = sum(result.report is None for result in results)
        failed = sum(result.report is not None and result.status(strict=False) != ExitStatus.OK for result in results)
        console.print(f"{len(results)} plans: {failed} refused, {unread} that cannot be checked")


def _to_json(result: CheckResult) -> dict[str, Any]:
    from pipeproof.diagnostics.text_output import finding_to_json

    if result.report is None:
        assert result.refusal is not None
        return {"digest": None, "findings": [finding_to_json(finding) for finding in result.refusal.findings]}
    return result.report.to_json()


def _show_sarif(results: Sequence[CheckResult], status: int) -> None:
    sarif_results: list[SarifResult] = []
    plans = []
    for result in results:
        sarif_results += _sarif_results(result)
        certified = result.report is not None and result.report.certificate is not None
        digest = None if result.report is None else result.report.digest
        plans.append({"file": str(result.files[0]), "digest": digest, "certified": certified})
    not_run = next((result.report.not_run for result in results if result.report is not None), ())
    _write_sarif(
        sarif_results, results[0].files[0], status, digest=plans[0]["digest"] if len(plans) == 1 else None,
        certified=all(plan["certified"] for plan in plans), not_run=not_run, plans=plans if len(plans) > 1 else (),
    )  # fmt: skip


def _sarif_results(result: CheckResult) -> list[SarifResult]:
    from pipeproof.diagnostics.sarif_output import SarifResult

    file = str(result.files[0])
    if result.report is None:
        assert result.refusal is not None
        return [SarifResult(finding, file=file) for finding in result.refusal.findings]
    sarif_results = [SarifResult(finding, file=file) for finding in result.findings]
    return sarif_results + [SarifResult(s.finding, s.reason, s.location, file=file) for s in result.report.suppressed]


def show_refusal(error: PipeproofError, form: Form, file: Path, status: int, console: Callable[[], Console]) -> None:
    """Write the findings of a refused input; as text, they go to the console for errors."""
    match form:
        case "text":
            from pipeproof.diagnostics.text_output import BRIEF_WITNESSES, render_text
            from pipeproof.sim.outcome import SimulationError

            brevity = BRIEF_WITNESSES
            if isinstance(error, SimulationError):
                brevity = replace(brevity, findings_of_a_code=10, rest="`pipeproof check --all` shows all")
            render_text(error.findings, getattr(error, "source", None), console=console(), brevity=brevity)
        case "json":
            from pipeproof.diagnostics.text_output import finding_to_json

            _write({"digest": None, "findings": [finding_to_json(finding) for finding in error.findings]})
        case "sarif":
            from pipeproof.diagnostics.sarif_output import SarifResult

            _write_sarif([*map(SarifResult, error.findings)], file, status)


def _write_sarif(results: Sequence[SarifResult], file: Path, status: int, **properties: Any) -> None:
    from pipeproof.cli.code_registry import all_docs
    from pipeproof.diagnostics.sarif_output import sarif_log

    _write(sarif_log(results, all_docs(), version=__version__, file=str(file), exit_status=status, **properties))


def _write(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2))
