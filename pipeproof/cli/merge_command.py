"""The group ``pipeproof job``, and ``job merge``: verdict and timeline of a run, from what its hosts kept."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from pipeproof.cli.console import console_for, refusing_bad_plans, require_separate_outputs, writable
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.progress import showing_progress
from pipeproof.cli.timeline_option import timeline_file, write_timeline


@click.group(cls=SuggestingGroup)
def job() -> None:
    """Examine jobs on several hosts and jobs that hang."""


@job.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True,
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report, as `run --report`.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=timeline_file,
              help="Write the measured timeline of all ranks, in the forms of `simulate -o`.")  # fmt: skip
@click.option("--profile", "profile_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write measured times, for `cost: {profile: FILE}`, of a run with `--profile`.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Print what is equal, too: every gradient, and how both computed.")
def merge(
    directories: tuple[Path, ...],
    report_file: Path | None,
    output: Path | None,
    profile_file: Path | None,
    verbose: bool,
) -> None:
    """Merge what the hosts of one run kept: the verdict of `run`, with the logs of all ranks.

    Each host of a run keeps a directory with the part of its ranks. Nothing is executed. The exit
    status is that of the run.
    """
    require_separate_outputs()
    from pipeproof.exec.launch.host_part import merge_directories, read_directories
    from pipeproof.exec.launch.run_console import result_or_status, show_run, step_lines

    with refusing_bad_plans("text", directories[0]), showing_progress("reading the directories"):
        report, hosts = read_directories(directories)
    if profile_file is not None and not hosts[0].job.options.profile:
        raise click.UsageError("--profile: the run measured no times for a profile (`run --profile`)")
    console = console_for()
    with showing_progress("merging"):
        result = result_or_status(lambda: merge_directories(report, hosts), report, console, "")
    if isinstance(result, int):
        sys.exit(result)
    for line in step_lines(result):
        console.print(line, soft_wrap=True)
    write = None if output is None else partial(write_timeline, output, f"{directories[0].name}, merged")
    with refusing_bad_plans("text", directories[0]):
        status = show_run(result, console, report_file, profile_file, write, verbose=verbose)
    sys.exit(status)


job.commands = LazyCommands({"hang": "hang_command:hang"}, job.commands, "job")
