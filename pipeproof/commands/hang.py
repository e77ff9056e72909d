"""``pipeproof hang``: the Flight Recorder dumps of a hung run, and what waits for what in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from pipeproof.commands.line import console_for, refusing_bad_plans
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import Severity


@click.command()
@click.argument("dumps", metavar="DUMP_DIR", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def hang(dumps: Path, form: Literal["text", "json"], color: str) -> None:
    """Say what a hung PyTorch run waits for, from its Flight Recorder dumps.

    DUMP_DIR has a file for each rank, whose name ends with the rank, as pickle or JSON. Messages are matched along
    their channels and collectives along their groups; what does not agree, what was never issued, and the cycle of
    waits are shown.
    """
    with refusing_bad_plans(form, dumps, color):
        from pipeproof.interop.hang.judge import judge_dumps

        report = judge_dumps(dumps)
    failed = any(finding.severity is Severity.ERROR for finding in report.findings)
    if form == "json":
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        from pipeproof.specs.render import render_text

        console = console_for(color=color)
        render_text(report.findings, None, console=console)
        launches = sum(len(dump.units) for dump in report.dumps)
        ranks = f"{len(report.dumps)} rank{'s' if len(report.dumps) > 1 else ''}"
        console.print(f"{ranks}, {launches} launches, {report.num_pending} of them not done")
    sys.exit(ExitStatus.FAILED if failed else ExitStatus.OK)
