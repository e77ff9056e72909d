"""What one ``pipeproof check`` judged, a plan or several, held against a baseline where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import BadPlanError, Finding, PipeproofError, Severity

if TYPE_CHECKING:
    from pipeproof.specs.baseline_file import LoadedBaseline
    from pipeproof.verify.baseline import Compared
    from pipeproof.verify.check import Report
    from pipeproof.verify.selection import Selection


@dataclass(frozen=True, slots=True)
class Judged:
    """One plan, one program, or the files of one imported plan: its report, or why there is none."""

    files: tuple[Path, ...]
    report: Report | None = None
    refusal: PipeproofError | None = None
    compared: Compared | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What counts: with a baseline, what is new."""
        if self.report is None:
            return ()
        return self.report.findings if self.compared is None else self.compared.new

    def status(self, *, strict: bool) -> ExitStatus:
        """Errors fail a check; with ``strict``, warnings that are not suppressed do too."""
        if self.report is None:
            return ExitStatus.BAD_INPUT if isinstance(self.refusal, BadPlanError) else ExitStatus.FAILED
        failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return ExitStatus.FAILED if any(f.severity in failing for f in self.findings) else ExitStatus.OK


Item = tuple[tuple[Path, ...], Callable[[], "Report"]]
"""The files of what is to be judged, and what judges them."""


def judge_all(items: Sequence[Item]) -> list[Judged]:
    """Judge each item; of several, one that cannot be judged does not keep the others from it.

    Raises:
        PipeproofError: the only item cannot be judged.
    """
    judged = []
    for files, judge in items:
        try:
            judged.append(Judged(files, judge()))
        except PipeproofError as error:
            if len(items) == 1:
                raise
            judged.append(Judged(files, refusal=error))
    return judged


def held_against(baseline: LoadedBaseline, judged: Sequence[Judged], selection: Selection) -> list[Judged]:
    """The same with what is known told from what is new; the first has the notes about plans that are gone."""
    from pipeproof.specs.baseline_file import named
    from pipeproof.verify.baseline import against, of_missing_files

    gone = of_missing_files(baseline)
    compared = []
    for one in judged:
        if one.report is None:
            compared.append(one)
            continue
        result = against(baseline, named(one.files, baseline.path), one.report.findings, selection.picks)
        compared.append(replace(one, compared=replace(result, new=(*gone, *result.new))))
        gone = ()
    return compared


def write_baseline(path: Path, judged: Sequence[Judged], selection: Selection, reason: str | None) -> LoadedBaseline:
    """Write what was found as a baseline and say so; what the file had of other plans, and its reasons, are kept.

    Raises:
        BaselineError: the file is there, and is no baseline: it is left as it is.
        OSError: it cannot be written.
    """
    from pipeproof.specs.baseline_file import baseline_text, load_baseline, named
    from pipeproof.verify.baseline import entries_of

    old = load_baseline(path).entries if path.exists() else ()
    found = {named(one.files, path): one.report.findings for one in judged if one.report is not None}
    entries = entries_of(found, old, selection.picks, reason)
    written = path.with_name(f".{path.name}.{os.getpid()}")  # a process that is ended here leaves the old file whole
    try:
        written.write_text(baseline_text(entries), encoding="utf-8")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    before, after = ({(entry.files, entry.fingerprint) for entry in one} for one in (old, entries))
    click.echo(f"{path}: {len(after)} entries, {len(after - before)} new, {len(before - after)} removed", err=True)
    return load_baseline(path)
