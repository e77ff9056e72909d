"""Options of commands that start ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from pipeproof.cli.console import not_nan, writable

if TYPE_CHECKING:
    from pipeproof.exec.rank.job_files import Fault

Command: TypeAlias = Callable[..., Any]


timeout = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True, callback=not_nan,
    help="Seconds without progress after which a run counts as hung.",
)  # fmt: skip
logs = click.option(
    "--logs", "--keep-logs", "logs", type=click.Path(path_type=Path, file_okay=False), callback=writable,
    help="Keep the output of each worker here. (torchrun takes --logs for an option of its own.)",
)  # fmt: skip


def rank_options(verb: str) -> Callable[[Command], Command]:
    """Give a command the argument ``options`` (``RunOptions``) with the options that all commands with ranks have.

    ``verb`` is for the help texts: ``Run`` or ``Rehearse``.
    """
    options = (
        click.option("--unsafe", is_flag=True, help=f"{verb} a plan that does not pass check, and report the damage."),
        timeout,
        logs,
        click.option("--inject", "fault", metavar="RANK:OP:ACTION", callback=_fault,
                     help="Inject a failure: let RANK raise, die or hang at OP, as in 1:0F2:die."),
        click.option("--share-gpus", is_flag=True,
                     help="Run several ranks on one GPU, if there are fewer GPUs: NCCL uses its sockets, and times "
                     "mean nothing."),
    )  # fmt: skip

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(
            *, unsafe: bool, timeout_s: float, logs: Path | None, fault: Fault | None, share_gpus: bool, **others: Any
        ) -> Any:
            from pipeproof.exec.rank.job_files import RunOptions

            return command(options=RunOptions(timeout_s, logs, fault, unsafe, share_gpus=share_gpus), **others)

        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _fault(context: click.Context, parameter: click.Parameter, value: str | None) -> Fault | None:
    if value is None:
        return None
    from pipeproof.exec.rank.job_files import Fault

    rank, _, rest = value.partition(":")
    op, _, action = rest.rpartition(":")
    if not rank.isdecimal() or not op or action not in ("raise", "die", "hang"):
        raise click.BadParameter(f"{value!r} is not RANK:OP:ACTION, such as 1:0F2:die (or raise, hang)")
    return Fault(int(rank), op, action)
