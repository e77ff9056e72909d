"""``pipeproof check``: what is judged, by which rules, and how the outcome is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import click

from pipeproof import __version__
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import PipeproofError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.commands.judged import Judged
    from pipeproof.specs.sarif import SarifResult
    from pipeproof.verify.selection import Selection

Form = Literal["text", "json", "sarif"]


class Consoles(Protocol):
    """Makes the console for what is found, and the one for errors."""

    def __call__(self, *, stderr: bool) -> Console:
        """The console."""


def selection_of(select: Sequence[str], ignore: Sequence[str], others: Sequence[str] = ()) -> Selection:
    """The rules that the options leave; ``others`` are codes that they may name beside those of rules.

    Raises:
        click.BadParameter: an option names what is no rule, or both together leave none.
    """
    from pipeproof.verify.check import CHECK_CODES
    from pipeproof.verify.selection import Selection, parse_codes

    known = (*CHECK_CODES, *others)
    parsed = []
    for option, texts in (("--select", select), ("--ignore", ignore)):
        try:
            parsed.append(parse_codes(texts, known))
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    selection = Selection(*parsed)
    if not any(map(selection.picks, known)):
        raise click.BadParameter("no rule is left to run", param_hint="--ignore")
    return selection


def show_all(
    judged: Sequence[Judged], form: Form, console_for: Consoles, *, strict: bool, everything: bool
) -> ExitStatus:
    """Write what was found, of one plan or of several, and give the status of the whole.

    ``console_for`` makes the console that people read.
    """
    status = max(one.status(strict=strict) for one in judged)
    match form:
        case "text":
            _show_text(judged, console_for, everything=everything)
        case "json" if len(judged) == 1:
            _write(_json_of(judged[0]))
        case "json":
            _write({"plans": [{"file": str(one.files[0]), "report": _json_of(one)} for one in judged]})
        case "sarif":
            _show_sarif(judged, status)
    return status


def _show_text(judged: Sequence[Judged], console_for: Consoles, *, everything: bool) -> None:
    from pipeproof.specs.render import render_text
    from pipeproof.verify.render import BRIEF, WHOLE, render_report

    console = console_for(stderr=False)
    for one in judged:
        if len(judged) > 1:
            console.print(f"== {one.files[0]}", style="bold", markup=False, soft_wrap=True)
        if one.report is not None:
            render_report(one.report, console, WHOLE if everything else BRIEF, one.compared)
        elif one.refusal is not None:
            console.print("[bold red]cannot be judged[/]")
            render_text(one.refusal.findings, getattr(one.refusal, "source", None), console=console_for(stderr=True))
        if len(judged) > 1:
            console.print()
    if len(judged) > 1:
        unread = sum(one.report is None for one in judged)
        failed = sum(one.report is not None and one.status(strict=False) != ExitStatus.OK for one in judged)
        console.print(f"{len(judged)} plans: {failed} refused, {unread} that cannot be judged")


def _json_of(one: Judged) -> dict[str, Any]:
    from pipeproof.specs.render import finding_to_json

    if one.report is None:
        assert one.refusal is not None
        return {"digest": None, "findings": [finding_to_json(finding) for finding in one.refusal.findings]}
    content = one.report.to_json()
    if one.compared is not None:
        content["findings"] = [finding_to_json(finding) for finding in one.compared.new]
        content["known"] = [known.to_json() for known in one.compared.known]
    return content


def _show_sarif(judged: Sequence[Judged], status: int) -> None:
    results: list[SarifResult] = []
    plans = []
    for one in judged:
        results += _sarif_results(one)
        certified = one.report is not None and one.report.certificate is not None
        digest = None if one.report is None else one.report.digest
        plans.append({"file": str(one.files[0]), "digest": digest, "certified": certified})
    not_run = next((one.report.not_run for one in judged if one.report is not None), ())
    _write_sarif(
        results, judged[0].files[0], status, digest=plans[0]["digest"] if len(plans) == 1 else None,
        certified=all(plan["certified"] for plan in plans), not_run=not_run, plans=plans if len(plans) > 1 else (),
    )  # fmt: skip


def _sarif_results(one: Judged) -> list[SarifResult]:
    from pipeproof.specs.sarif import SarifResult

    file, compared = str(one.files[0]), one.compared
    if one.report is None:
        assert one.refusal is not None
        return [SarifResult(finding, file=file) for finding in one.refusal.findings]
    new = None if compared is None else False
    results = [SarifResult(finding, known=new, file=file) for finding in one.findings]
    if compared is not None:
        results += [SarifResult(k.finding, known=True, known_because=k.reason, file=file) for k in compared.known]
    known = None if compared is None else True  # a state for all or for none, and what the plan suppresses is not new
    results += [SarifResult(s.finding, s.reason, s.location, known, file=file) for s in one.report.suppressed]
    return results


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
