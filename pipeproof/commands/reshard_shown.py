"""What ``pipeproof reshard`` says: what the proof found, how far the bytes are, and what became of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeproof.commands.line import console_for
from pipeproof.specs.finding import Finding, Severity

if TYPE_CHECKING:
    from pipeproof.state.reshard.carry import Made
    from pipeproof.state.reshard.sides import Side

_TOLD_EVERY_S = 10.0
"""Where there is no terminal to draw a bar on."""
Begun = Callable[[int, int], None]
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What was proved, or not."""

    source: Side
    target: Side
    findings: tuple[Finding, ...]

    @property
    def proved(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


def show_findings(findings: tuple[Finding, ...]) -> None:
    """What the proof found, to people."""
    if findings:
        from pipeproof.specs.render import render_text

        render_text(findings, None, console=console_for(stderr=True))


def show_outcome(
    outcome: Outcome,
    as_json: bool,
    out: Path | None = None,
    made: Made | None = None,
    seconds: float = 0.0,
    plan: Path | None = None,
) -> None:
    """The end of it: proved or not, and what was made, with the command that goes on."""
    if as_json:
        click.echo(json.dumps(_to_json(outcome, out, made, seconds), indent=2))
        return
    if not outcome.proved:
        num = sum(finding.severity is Severity.ERROR for finding in outcome.findings)
        click.echo(f"not proved: {num} {'error' if num == 1 else 'errors'}; nothing was written")
        return
    click.echo(
        f"proved: {len(outcome.target.tensors):,} tensors, {_num_parts(outcome.source):,} parts of "
        f"{outcome.source.name} to {_num_parts(outcome.target):,}: every element has one place"
    )
    if made is not None and out is not None:
        rate = made.size_bytes / 1e9 / max(seconds, 1e-9)
        files = f"{len(made.files)} files" if len(made.files) != 1 else "1 file"
        before = f", {made.num_finished} of them from before" if made.num_finished else ""
        click.echo(f"{out}: {made.size_bytes / 1e9:.3f} GB in {files}{before}, {seconds:.1f} s, {rate:.2f} GB/s")
        if plan is not None:
            click.echo(f"go on: pipeproof run {plan} --resume {out}")


@contextmanager
def showing_progress(num_bytes: int) -> Iterator[tuple[Begun, Tell]]:
    """A bar on standard error, or where that is no terminal a line now and then; what is told is bytes."""
    console = console_for(stderr=True)

    def begun(finished: int, num_files: int) -> None:
        if finished:
            click.echo(f"going on: {finished} of {num_files} files are there from an earlier call", err=True)

    if not console.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _TOLD_EVERY_S:
                last = time.monotonic()
                click.echo(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB", err=True)

        yield begun, line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bars:
        task = bars.add_task("bytes", total=num_bytes)
        yield begun, lambda done, total: bars.update(task, completed=done, total=total)


def _num_parts(side: Side) -> int:
    return sum(map(len, side.parts.values()))


def _to_json(outcome: Outcome, out: Path | None, made: Made | None, seconds: float) -> dict[str, Any]:
    from pipeproof.specs.render import finding_to_json

    content: dict[str, Any] = {
        "proved": outcome.proved,
        "findings": [finding_to_json(finding) for finding in outcome.findings],
        "num_tensors": len(outcome.target.tensors),
        "num_parts": {"source": _num_parts(outcome.source), "target": _num_parts(outcome.target)},
    }
    if made is not None:
        content["output"] = {
            "path": str(out),
            "num_files": len(made.files),
            "num_files_from_before": made.num_finished,
            "size_bytes": made.size_bytes,
            "seconds": round(seconds, 3),
        }
    return content
