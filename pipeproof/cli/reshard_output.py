"""Output of ``pipeproof state reshard``: findings of the proof, progress, and the result."""

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

from pipeproof.cli.console import console_for, echo
from pipeproof.cli.progress import showing_progress
from pipeproof.diagnostics.finding import Finding, Severity

if TYPE_CHECKING:
    from pipeproof.state.reshard.execute_reshard import ReshardResult
    from pipeproof.state.reshard.shard_layout import ShardLayout

_LINE_EVERY_S = 10.0
"""Interval of progress lines without a terminal."""
_LARGE = 100_000_000
"""Fewest bytes for which the speed is shown."""
OnBegin = Callable[[int, int], None]
"""Called with the number of finished files of an earlier call, and the number of all files."""
OnProgress = Callable[[int, int], None]
"""Called with the number of written bytes, and the number of all bytes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a proof."""

    source: ShardLayout
    target: ShardLayout
    findings: tuple[Finding, ...]

    @property
    def proved(self) -> bool:
        """True if there is no error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


def show_findings(findings: tuple[Finding, ...]) -> None:
    """Print the findings of the proof."""
    if findings:
        from pipeproof.diagnostics.text_output import render_text

        render_text(findings, None, console=console_for(stderr=True))


def show_outcome(
    outcome: Outcome,
    as_json: bool,
    out: Path | None = None,
    result: ReshardResult | None = None,
    seconds: float = 0.0,
    plan: Path | None = None,
    md5: str | None = None,
) -> None:
    """Print the outcome, and the output with the command that resumes from it.

    ``md5`` is that of all tensors, where those of the output were compared with those of the source.
    """
    if as_json:
        click.echo(json.dumps(_to_json(outcome, out, result, seconds, md5), indent=2))
        return
    if not outcome.proved:
        num = sum(finding.severity is Severity.ERROR for finding in outcome.findings)
        echo(f"not proved: {num} {'error' if num == 1 else 'errors'}; nothing was written")
        return
    from pipeproof.diagnostics.units import size_text, time_text
    from pipeproof.state.region_text import counted

    tensors, shards = counted(len(outcome.target.tensors), "tensor"), counted(_num_parts(outcome.source), "part")
    echo(
        f"proved: {tensors}, {shards} of {outcome.source.name} to {_num_parts(outcome.target):,}: every element has "
        "its source"
    )
    if result is not None and out is not None:
        size = f"{size_text(result.size_bytes)} in {counted(result.num_files, 'file')}"
        if result.existed:
            echo(f"{out} already exists and is complete: {size}, written by an earlier call")
        else:
            before = f", {result.num_finished} of them from an earlier call" if result.num_finished else ""
            has_speed = result.size_bytes >= _LARGE and not before
            speed = f", {size_text(round(result.size_bytes / max(seconds, 1e-9)))}/s" if has_speed else ""
            echo(f"{out}: {size}{before}, {time_text(seconds * 1e6)}{speed}")
        if md5 is not None:
            echo(f"MD5 of {tensors}: {md5} in {outcome.source.name}, {md5} in {out}: equal")
        if plan is not None:
            click.echo(f"resume: {shlex.join(['pipeproof', 'run', str(plan), '--resume', str(out)])}")


@contextmanager
def showing_copy() -> Iterator[tuple[OnBegin, OnProgress]]:
    """Show progress in bytes on standard error: a bar, or now and then a line if that is not a terminal."""
    from pipeproof.diagnostics.units import size_text

    def on_begin(finished: int, num_files: int) -> None:
        if finished:
            echo(f"resuming: {finished} of {num_files} files exist from an earlier call", err=True)

    if sys.stderr is None or not sys.stderr.isatty():  # it may have been closed
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_EVERY_S:
                last = time.monotonic()
                echo(f"{size_text(done)} of {size_text(total)}", err=True)

        yield on_begin, line
        return
    with showing_progress("copying", count=size_text) as show:
        yield on_begin, lambda done, total: show("copying", done, total)


def _num_parts(side: ShardLayout) -> int:
    return sum(map(len, side.shards.values()))


def _to_json(
    outcome: Outcome, out: Path | None, result: ReshardResult | None, seconds: float, md5: str | None
) -> dict[str, Any]:
    from pipeproof.diagnostics.text_output import finding_to_json

    content: dict[str, Any] = {
        "proved": outcome.proved,
        "findings": [finding_to_json(finding) for finding in outcome.findings],
        "num_tensors": len(outcome.target.tensors),
        "num_parts": {"source": _num_parts(outcome.source), "target": _num_parts(outcome.target)},
    }
    if result is not None:
        content["output"] = {
            "path": str(out),
            "num_files": result.num_files,
            "num_files_from_before": result.num_finished,
            "size_bytes": result.size_bytes,
            "seconds": round(seconds, 3),
        }
        if md5 is not None:
            content["output"]["md5"] = md5
    return content
