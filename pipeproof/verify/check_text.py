"""The report of a check as a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType

from rich.console import Console

from pipeproof.diagnostics.finding import Finding, Severity, by_cause, shown_path
from pipeproof.diagnostics.problems import listed
from pipeproof.diagnostics.text_output import Brevity, render_text
from pipeproof.diagnostics.units import size_text
from pipeproof.verify.check_plan import CHECK_CODES, Report

BRIEF = Brevity(
    findings_of_a_code=10, witness_lines=12, rest="`--all` shows all, `--format json` has them too", details=False
)
"""Size of a screen: many equal findings usually have one cause."""

WHOLE = Brevity(findings_of_a_code=None, witness_lines=None, rest="")
"""Everything that was found."""

_MOST_CODES = 8


def render_report(report: Report, console: Console, brevity: Brevity) -> None:
    """Print the findings, the verdict and the next step; in detail also the digest and the activations in flight."""
    render_text(report.findings, report.subject.source, console=console, brevity=brevity)
    if report.subject.lowered is not None and brevity.details:
        _render_in_flight(report, console)
    if report.suppressed:
        console.print(f"suppressed by the plan: {_suppressed_text(report)}", soft_wrap=True)
    if brevity.details:
        console.print(f"digest {report.digest}", soft_wrap=True)
    console.print(_verdict(report), soft_wrap=True)
    unchecked = _unchecked(report)
    if unchecked:
        console.print(unchecked, soft_wrap=True)
    console.print(f"next: {_next_step(report)}", soft_wrap=True)


def _next_step(report: Report) -> str:
    """Return the reader's next step after this verdict."""
    if report.undecided:
        helps = (finding.help for finding in report.findings if finding.code in ("PP176", "PP942") and finding.help)
        return f"{next(helps, 'give the value that decides').partition(';')[0]}, and check again"
    if report.errors:
        code = report.errors[0].code
        return f"apply the help of {code}, and check again; `pipeproof --explain {code}` has the reason"
    if report.subject.lowered is None:
        return "run it, or convert it for another tool (`pipeproof schedule convert`)"
    source = report.subject.source
    plan = "PLAN" if source is None else shown_path(source.file)
    simulate = f"`pipeproof simulate {plan}` predicts its time and memory"
    if report.subject.lowered.spec.is_custom:
        return f"{simulate}, a `Pipeline` with this plan trains by it"
    return f"{simulate}, `pipeproof run {plan}` executes it"


def _unchecked(report: Report) -> str:
    """A sentence about facts that a program alone does not state: no rule has checked them."""
    subject = report.subject
    if subject.lowered is not None or (subject.graph.scale != 0).any() or subject.facts.gradients is not None:
        return ""
    return (
        "not checked: no scale is stated and no loss is declared, so nothing shows that a loss is divided by its tokens"
    )


def _render_in_flight(report: Report, console: Console) -> None:
    mesh, global_rank = report.subject.plan.mesh, report.subject.graph.global_rank
    peaks = {mesh.coords(global_rank[figure.rank])["pp"]: figure for figure in report.in_flight}
    held = ", ".join(
        f"pp {pp}: {figure.peak_activations} ({size_text(figure.boundary_bytes)})" for pp, figure in peaks.items()
    )
    console.print("in flight at most, micro-batches of a stage held and the size of their boundary inputs:")
    console.print(f"  {held}", soft_wrap=True)


def _suppressed_text(report: Report) -> str:
    counts = Counter((s.finding.severity, s.finding.code) for s in report.suppressed)
    return ", ".join(f"{_counted(count, severity)} ({code})" for (severity, code), count in counts.items())


_OPEN = MappingProxyType({"PP176": "assumed value", "PP177": "unknown name", "PP942": "gap in the logs"})
"""Causes of an open verdict, by code."""


def _verdict(report: Report) -> str:
    size = _size(report)
    counted = _all_counted(report.findings)
    if report.undecided:
        open_codes = Counter(finding.code for finding in report.findings if finding.code in _OPEN)
        what = listed([f"{n} {_OPEN[code]}{'s' if n > 1 else ''} ({code})" for code, n in open_codes.items()], "and")
        return f"[bold yellow]undecided[/]: the answer depends on {what}; what is known, {size}, has {counted}"
    if report.errors:
        return f"[bold red]refused[/]: {counted} in {size}"
    if report.not_run:
        return (
            f"[bold yellow]incomplete[/]: {counted or 'no finding'} in {size}, but {len(report.not_run)} of "
            f"{len(CHECK_CODES)} rules did not run ({_codes_text(report.not_run)}): no certificate"
        )
    brings = f", with {counted}" if counted else ""
    return f"[bold green]proved[/]: {size} under {report.subject.backend.name}{brings}"


def _all_counted(findings: Sequence[Finding]) -> str:
    """``1 error and 2 notes (and 4 that follow)``; nothing for none."""
    groups = by_cause(findings)
    counts = Counter(finding.severity for finding, _ in groups)
    following = len(findings) - len(groups)
    tail = f" (and {following} that {'follows' if following == 1 else 'follow'})" if following else ""
    return listed([_counted(counts[s], s) for s in Severity if counts[s]], "and") + tail if counts else ""


def _size(report: Report) -> str:
    graph, lowered = report.subject.graph, report.subject.lowered
    if lowered is None:
        return f"{graph.num_ops} operations on {_plural(graph.num_ranks, 'rank')}, checked without a plan"
    if lowered.folded:
        ranks = f"{graph.num_ranks} of {lowered.mesh.num_ranks} ranks (the others repeat them)"
        return f"{graph.num_ops} operations on {ranks}"
    return f"{graph.num_ops} operations on {_plural(graph.num_ranks, 'rank')}"


def _codes_text(codes: tuple[str, ...]) -> str:
    more = f" and {len(codes) - _MOST_CODES} more" if len(codes) > _MOST_CODES else ""
    return ", ".join(codes[:_MOST_CODES]) + more


def _counted(count: int, severity: Severity) -> str:
    return _plural(count, str(severity))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
