"""``pipeproof run``: a verified plan on real processes, compared with its reference; ``rehearse``: its communication.

The libraries of each command are imported when it runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from pipeproof.cli.console import console_for, not_nan, refusing_bad_plans, writable
from pipeproof.cli.option_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.cli.timeline_option import timeline_file, write_timeline

if TYPE_CHECKING:
    from pipeproof.exec.rank.job_files import CheckpointOptions, Fault, RunOptions

_Command: TypeAlias = Callable[..., Any]


def _rank_options(verb: str) -> Callable[[_Command], _Command]:
    """Give a command the argument ``options`` (``RunOptions``) with the options that both commands have."""
    options = (
        click.option("--unsafe", is_flag=True, help=f"{verb} a plan that does not pass check, and report the damage."),
        click.option("--timeout", "timeout_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True,
                     callback=not_nan, help="Seconds without progress after which a run counts as hung."),
        click.option("--logs", "--keep-logs", "logs", type=click.Path(path_type=Path, file_okay=False),
                     callback=writable, help="Keep the output of each worker here. (--logs is also an option of "
                     "torchrun, which reads it first.)"),
        click.option("--inject", "fault", metavar="RANK:OP:ACTION", callback=_fault,
                     help="Inject a failure: let RANK raise, die or hang at OP, as in 1:0F2:die."),
        click.option("--share-gpus", is_flag=True,
                     help="Run several ranks on one GPU, if there are fewer GPUs: NCCL uses its sockets, and times "
                     "mean nothing."),
    )  # fmt: skip

    def decorate(command: _Command) -> _Command:
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


def _state_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options ``--save*`` and ``--resume``, as one argument ``checkpoint``."""

    @click.option("--save", type=click.Path(path_type=Path, file_okay=False), callback=writable, metavar="DIR",
                  help="Save the state below DIR after the last step, for --resume.")  # fmt: skip
    @click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="Also save after each N-th step.")
    @click.option("--save-format", type=click.Choice(["pipeproof", "flex"]), default="pipeproof", show_default=True,
                  help="flex: Paddle's own checkpoint, written by Paddle, with our index.")  # fmt: skip
    @click.option("--resume", type=click.Path(path_type=Path), metavar="DIR",
                  help="Resume from a saved state, or from the newest one below DIR.")  # fmt: skip
    @functools.wraps(command)
    def wrapped(
        *, save: Path | None, save_every: int | None, save_format: str, resume: Path | None, **others: Any
    ) -> None:
        if save is None and save_every is not None:
            raise click.UsageError("--save-every needs --save DIR")
        if save is None and save_format != "pipeproof":
            raise click.UsageError("--save-format needs --save DIR")
        from pipeproof.exec.rank.job_files import CheckpointOptions

        command(checkpoint=CheckpointOptions(save, save_every, resume, by_paddle=save_format == "flex"), **others)

    return wrapped


def _record_directory(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    from pipeproof.analysis.align.record_format import RECORD_FILE

    for side in ("run", "reference"):
        if (value / side / RECORD_FILE).exists():
            raise click.BadParameter(f"{str(value)!r} holds a record already: name another directory, or remove it")
    return writable(context, parameter, value)


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options()
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=timeline_file,
              help="Write the measured timeline, in the forms of `simulate -o`.")  # fmt: skip
@click.option("--profile", "profile_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write measured times, for `cost: {profile: FILE}`; the reference runs afterwards.")  # fmt: skip
@click.option("--record", "record_directory", type=click.Path(path_type=Path, file_okay=False),
              callback=_record_directory, metavar="DIR",
              help="Record losses and gradients of run and reference in DIR, for `state align`.")  # fmt: skip
@click.option("--record-layers", is_flag=True,
              help="With --record: also the inputs and outputs of each layer, forward and backward.")  # fmt: skip
@click.option("--record-values", is_flag=True,
              help="With --record: also the tensor values (large), for distances in `state align`.")  # fmt: skip
@click.option("--watch", type=click.Path(path_type=Path, file_okay=False), callback=writable, metavar="DIR",
              envvar="PIPEPROOF_WATCH", help="Write each rank's operations below DIR, for `job hang DIR`.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Also print equal gradients, and how both sides computed.")
@_rank_options("Run")
@_state_options
def run(
    plan: Path,
    source: PlanSource,
    report_file: Path | None,
    output: Path | None,
    profile_file: Path | None,
    record_directory: Path | None,
    record_layers: bool,
    record_values: bool,
    watch: Path | None,
    verbose: bool,
    options: RunOptions,
    checkpoint: CheckpointOptions,
) -> None:
    """Run a verified plan on real processes and compare it with a single-process reference."""
    if options.share_gpus and profile_file is not None:
        raise click.UsageError("--profile: the times of ranks that share a GPU depend on each other")
    if record_directory is None and (record_layers or record_values):
        raise click.UsageError("--record-layers and --record-values need --record DIR")
    from pipeproof.exec.launch.run_console import run_command
    from pipeproof.exec.rank.job_files import RecordOptions
    from pipeproof.verify.check_plan import check

    with refusing_bad_plans("text", plan), showing_progress(f"checking {plan}") as on_progress:
        report = check(source.load(plan), on_progress=on_progress)
    record = None if record_directory is None else RecordOptions(record_directory, record_layers, record_values)
    has_timeline = any(file is not None for file in (report_file, output, profile_file))
    options = replace(options, profile=profile_file is not None, record=record, checkpoint=checkpoint,
                      timeline=has_timeline,
                      watch=None if watch is None else watch.absolute())  # fmt: skip
    write = None if output is None else partial(write_timeline, output, f"{plan.stem}, measured")
    with refusing_bad_plans("text", plan):
        status = run_command(report, options, console_for(), report_file, profile_file, write, verbose=verbose)
    sys.exit(status)


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options()
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write latency and bandwidth of every edge, and `cost.network` for the simulator.")  # fmt: skip
@_rank_options("Rehearse")
def rehearse(
    plan: Path,
    source: PlanSource,
    report_file: Path | None,
    output: Path | None,
    options: RunOptions,
) -> None:
    """Execute only the communication of a plan, on real processes, and check every element on arrival."""
    if options.share_gpus and output is not None:
        raise click.UsageError("--output: ranks that share a GPU communicate by sockets")
    from pipeproof.exec.rehearse.rehearsal_console import rehearse_command, rehearsed_plan
    from pipeproof.verify.check_plan import check

    with refusing_bad_plans("text", plan):
        with showing_progress(f"checking {plan}") as on_progress:
            report = check(rehearsed_plan(source.load(plan)), on_progress=on_progress)
        status = rehearse_command(report, replace(options, rehearses=True), console_for(), report_file, output)
    sys.exit(status)
