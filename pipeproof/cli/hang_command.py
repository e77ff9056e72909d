"""``pipeproof job hang``: diagnosis of a hung run from its Flight Recorder dumps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from pipeproof.cli.console import console_for, format_option, refusing_bad_plans
from pipeproof.diagnostics.finding import Severity
from pipeproof.exit_status import ExitStatus


@click.command()
@click.argument("dumps", metavar="DUMP_DIR", type=click.Path(path_type=Path))
@format_option()
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def hang(dumps: Path, form: Literal["text", "json"], color: str) -> None:
    """Report the operations that a hung PyTorch run waits for, from its Flight Recorder dumps.

    DUMP_DIR has a file for each rank, whose name ends with the rank, as pickle or JSON. Messages are matched along
    their channels and collectives along their groups. The output has mismatches, operations that were never issued,
    and the cycle of waits.
    """
    with refusing_bad_plans(form, dumps, color):
        from pipeproof.interop.hang.diagnose_hang import diagnose_dumps

        report = diagnose_dumps(dumps)
    failed = any(finding.severity is Severity.ERROR for finding in report.findings)
    if form == "json":
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        from pipeproof.diagnostics.text_output import render_text

        console = console_for(color=color)
        render_text(report.findings, None, console=console)
        launches = sum(len(dump.launches) for dump in report.dumps)
        ranks = f"{len(report.dumps)} rank{'s' if len(report.dumps) > 1 else ''}"
        console.print(f"{ranks}, {launches} launches, {report.num_pending} of them not done")
    sys.exit(ExitStatus.FAILED if failed else ExitStatus.OK)
