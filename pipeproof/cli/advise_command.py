"""``pipeproof advise``: schedules, chunks and micro-batches that make a plan's step shorter, with reasons.

It imports what it needs when it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from pipeproof.cli.completion import PlanFile
from pipeproof.cli.console import console_for, echo, format_option, refusing_bad_plans
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus


@click.command()
@click.argument("plan", metavar="PLAN", type=PlanFile())
@plan_options(device=True)
@click.option("--memory-limit", type=click.IntRange(1, 10**9),
              help="Most activations of the largest stage that a rank may hold; overrides the plan's.")  # fmt: skip
@click.option("--top", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Number of listed candidates of each group.")  # fmt: skip
@click.option("--all", "everything", is_flag=True,
              help="Also try schedules that the plan's framework does not have, and list candidates over the memory "
                   "limit and why schedules were left out.")  # fmt: skip
@format_option()
def advise(
    plan: Path, source: PlanSource, memory_limit: int | None, top: int, everything: bool,
    form: Literal["text", "json"],
) -> None:  # fmt: skip
    """List better schedules, chunk counts and micro-batch counts for a plan, with reasons.

    Every listed candidate has passed the whole check. The exit status is 0 with or without candidates.
    """
    with refusing_bad_plans(form, plan):
        from pipeproof.analysis.advise.search import NoTrainingError
        from pipeproof.analysis.advise.search import advise as find_advice

        loaded = source.load(plan)
        try:
            with showing_progress("checking the plan") as on_progress:
                advice = find_advice(
                    loaded, memory_limit, top=top, with_over_limit=everything, every_schedule=everything,
                    on_progress=on_progress,
                )  # fmt: skip
        except NoTrainingError as error:
            echo(f"error: {error}", err=True)
            sys.exit(ExitStatus.BAD_INPUT)
    if form == "json":
        from pipeproof.analysis.advise.advice_report import advice_to_json

        click.echo(json.dumps(advice_to_json(advice), indent=2))
        return
    from pipeproof.analysis.advise.advice_text import render_advice

    render_advice(advice, console_for(), all_reasons=everything)
