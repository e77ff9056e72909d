"""``pipeproof advise``: which schedule, chunks and micro-batches would make a plan's step shorter, and why.

It loads what it needs when it runs, as the commands of ``cli`` do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeproof.commands.complete import PlanFile
from pipeproof.commands.line import console_for, refusing_bad_plans
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.advice.advise import Progress


@click.command()
@click.argument("plan", metavar="PLAN", type=PlanFile())
@click.option("--memory-limit", type=click.IntRange(1, 10**9),
              help="Most activations of the largest stage that a rank may hold; overrides the plan's.")  # fmt: skip
@click.option("--top", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="How many candidates to list of each group.")  # fmt: skip
@click.option("--all", "everything", is_flag=True,
              help="Also list what needs more memory than there is, and say why schedules were left out.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def advise(plan: Path, memory_limit: int | None, top: int, everything: bool, form: Literal["text", "json"]) -> None:
    """Say which schedules, chunk counts and micro-batch counts are better for a plan, and why.

    Every candidate that is listed has passed the whole check. The exit status is 0 whether or not there is one.
    """
    with refusing_bad_plans(form, plan):
        from pipeproof.advice.advise import NoTrainingError
        from pipeproof.advice.advise import advise as find_advice
        from pipeproof.specs.load import load_plan

        loaded = load_plan(plan)
        try:
            with _showing_progress() as on_progress:
                advice = find_advice(loaded, memory_limit, top=top, with_over_limit=everything, on_progress=on_progress)
        except NoTrainingError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(ExitStatus.BAD_INPUT)
    if form == "json":
        from pipeproof.advice.report import advice_to_json

        click.echo(json.dumps(advice_to_json(advice), indent=2))
        return
    from pipeproof.advice.render import render_advice

    render_advice(advice, console_for(), all_reasons=everything)


@contextmanager
def _showing_progress() -> Iterator[Progress | None]:
    """Says on a line of standard error how far the work is; None where that is not a terminal."""
    console = console_for(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress as Bars

    with Bars(console=console, transient=True) as bars:
        task = bars.add_task("checking the plan", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total)
