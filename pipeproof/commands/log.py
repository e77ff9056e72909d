"""``pipeproof check --log``: what a recorded program really issued."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from pipeproof.comm.capabilities import Queue

if TYPE_CHECKING:
    from pipeproof.verify.check import Report
    from pipeproof.verify.selection import Selection


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a check of logs."""
    for option in (
        click.option("--channels", type=click.Choice(get_args(Queue)),
                     help="With --log: which messages of a rank wait for each other, if not as on its backend."),
        click.option("--plan", "log_plan", metavar="PLAN", type=click.Path(path_type=Path),
                     help="With --log: compare the messages with those of this plan."),
        click.option("--log", metavar="DIR", type=click.Path(path_type=Path),
                     help="Judge the logs of a recorded program; `docs/recording.md` says how to record one."),
    ):  # fmt: skip
        command = option(command)
    return command


def codes_of_logs() -> list[str]:
    """The codes that a check of logs may report beside those of rules."""
    from pipeproof.interop.hang.codes import HANG_CYCLE, NEVER_ISSUED
    from pipeproof.interop.record.codes import RECORD_CODES

    return [doc.code for doc in (*RECORD_CODES, HANG_CYCLE, NEVER_ISSUED)]


def check_log(directory: Path, plan: Path | None, channels: Queue | None, selection: Selection) -> Report:
    """Judge the logs in a directory.

    Raises:
        PlanFileError: a log, or the plan, cannot be read.
    """
    from pipeproof.interop.record.judge import judge_log
    from pipeproof.specs.load import load_plan

    return judge_log(directory, plan=None if plan is None else load_plan(plan), channels=channels, selection=selection)
