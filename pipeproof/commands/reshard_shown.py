"""What ``pipeproof reshard`` says: what the proof found, how far the bytes are, and what became of it."""

from __future__ import annotations

import json
import shlex
import sys
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
    from pipeproof.state.mapping import StateMap
    from pipeproof.state.reshard.carry import Made
    from pipeproof.state.reshard.sides import Side

_TOLD_EVERY_S = 10.0
"""Where there is no terminal to draw a bar on."""
_LARGE = 100_000_000
"""Of fewer bytes a speed is not worth a word."""
Begun = Callable[[int, int], None]
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What was proved, or not."""

    source: Side
    target: Side
    findings: tuple[Finding, ...]
    picture: Path | None = None

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
    from pipeproof.state.reshard.words import counted, size_words

    tensors, parts = counted(len(outcome.target.tensors), "tensor"), counted(_num_parts(outcome.source), "part")
    click.echo(
        f"proved: {tensors}, {parts} of {outcome.source.name} to {_num_parts(outcome.target):,}: every element has "
        "its place"
    )
    if outcome.picture is not None:
        click.echo(f"picture written to {outcome.picture}")
    if made is not None and out is not None:
        size = f"{size_words(made.size_bytes)} in {counted(made.num_files, 'file')}"
        if made.was_there:
            click.echo(f"{out} is there already, and whole: {size} that this command made before it was ended")
        else:
            before = f", {made.num_finished} of them from before" if made.num_finished else ""
            has_speed = made.size_bytes >= _LARGE and not before
            speed = f", {size_words(round(made.size_bytes / max(seconds, 1e-9)))}/s" if has_speed else ""
            click.echo(f"{out}: {size}{before}, {seconds:.1f} s{speed}")
        if plan is not None:
            click.echo(f"go on: {shlex.join(['pipeproof', 'run', str(plan), '--resume', str(out)])}")


def draw(file: Path, source: Side, state_map: StateMap, target: Side) -> None:
    """Write the picture of what moves where.

    Raises:
        BadPlanError: PP924, there are more ranks or files than a picture can show.
        OSError: the file cannot be written.
    """
    from pipeproof.state.reshard.flows import flows_of
    from pipeproof.state.reshard.picture.page import flows_svg, require_few
    from pipeproof.state.reshard.picture.sides import Named

    require_few(source, target)
    sides = (Named(side.name, None if side.plan is None else side.plan.mesh) for side in (source, target))
    file.write_text(flows_svg(flows_of(source, state_map, target), *sides), encoding="utf-8")


@contextmanager
def showing_progress(num_bytes: int) -> Iterator[tuple[Begun, Tell]]:
    """A bar on standard error, or where that is no terminal a line now and then; what is told is bytes."""

    def begun(finished: int, num_files: int) -> None:
        if finished:
            click.echo(f"going on: {finished} of {num_files} files are there from an earlier call", err=True)

    if sys.stderr is None or not sys.stderr.isatty():  # it may have been closed
        from pipeproof.state.reshard.words import size_words

        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _TOLD_EVERY_S:
                last = time.monotonic()
                click.echo(f"{size_words(done)} of {size_words(total)}", err=True)

        yield begun, line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console_for(stderr=True),
        transient=True,
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
            "num_files": made.num_files,
            "num_files_from_before": made.num_finished,
            "size_bytes": made.size_bytes,
            "seconds": round(seconds, 3),
        }
    return content
