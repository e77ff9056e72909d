"""``pipeproof job hang``: the cause of a hang, from dumps or from the rings of a watched job; and the group ``job``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import click

from pipeproof.cli.console import console_for, format_option, refusing_bad_plans
from pipeproof.cli.help_sections import SuggestingGroup
from pipeproof.cli.progress import showing_progress
from pipeproof.diagnostics.finding import Severity
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.exec.monitor.job import JobNow
    from pipeproof.exec.monitor.verdict import RankStacks, Verdict


@click.group(cls=SuggestingGroup)
def job() -> None:
    """Examine jobs that hang."""


@job.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--ras", metavar="HOST[:PORT]", help="Ask the RAS server of NCCL on a host of the job; port 28028.")
@click.option("--stacks", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Directory of py-spy dumps, one per rank; without it, an installed py-spy is called.")  # fmt: skip
@click.option("--follow", is_flag=True, help="Watch the rings of a running job until it hangs or ends.")
@click.option(
    "--timeout",
    "patience_s",
    type=click.FloatRange(min=0.5, max=86400),
    default=5.0,
    show_default=True,
    help="Seconds that a rank waits before the job is reported as hung.",
)
@click.option(
    "--slow-after",
    "slow_s",
    type=click.FloatRange(min=0.5, max=86400),
    default=60.0,
    show_default=True,
    help="Seconds before a computing rank, or a fully issued operation, is reported as slow.",
)
@click.option(
    "--duration",
    "timeout_s",
    type=click.FloatRange(min=0.5),
    default=None,
    help="Seconds after which --follow ends, with status 0.",
)
@format_option()
def hang(
    directory: Path | None, ras: str | None, stacks: Path | None, follow: bool, patience_s: float, slow_s: float,
    timeout_s: float | None, form: Literal["text", "json"],
) -> None:  # fmt: skip
    """Report which rank is the cause of a hang, and what the others wait for.

    DIR has one of: the rings of a job that called `watch` of pipeproof.torch or pipeproof.paddle (one file per rank,
    also in one directory per host); Flight Recorder dumps (pickle or JSON); dumps of py-spy. The name of a dump ends
    with the rank. The output lists mismatches, operations that were never issued, and the cycle of waits.
    """
    if timeout_s is not None and not follow:
        raise click.UsageError("--duration needs --follow")
    if (directory is None) == (ras is None):
        raise click.UsageError("name either a directory DIR or --ras HOST")
    output = _Output(stacks, form)
    if ras is not None:
        with refusing_bad_plans(form, Path(ras)):
            _from_ras(ras, follow, patience_s, timeout_s, output)
    assert directory is not None
    with refusing_bad_plans(form, directory):
        from pipeproof.exec.monitor.job import ring_files
        from pipeproof.interop.hang.py_spy import stack_files

        if not follow and not ring_files(directory):
            if stacks is None and stack_files(directory):
                _from_stacks(directory, form)
            _from_dumps(directory, output)
        _from_rings(directory, follow, (patience_s, slow_s, timeout_s), output)


def _from_dumps(directory: Path, output: _Output) -> NoReturn:
    from pipeproof.exec.monitor.verdict import RankStacks
    from pipeproof.interop.hang.diagnose_hang import diagnose_dumps
    from pipeproof.interop.hang.py_spy import read_stacks

    rank_stacks = RankStacks({} if output.stacks is None else read_stacks(output.stacks))
    with showing_progress(f"reading the dumps in {directory}"):
        report = diagnose_dumps(directory)
    failed = any(finding.severity is Severity.ERROR for finding in report.findings)
    if output.form == "json":
        click.echo(json.dumps(report.to_json() | {"stacks": rank_stacks.to_json()}, indent=2))
    else:
        from pipeproof.diagnostics.text_output import render_text

        console = console_for()
        render_text(report.findings, None, console=console)
        for line in (*report.lines(), *rank_stacks.lines(sorted(rank_stacks.stacks))):
            console.print(line, markup=False, soft_wrap=True)
        launches = sum(len(dump.launches) for dump in report.dumps)
        ranks = f"{len(report.dumps)} rank{'s' if len(report.dumps) > 1 else ''}"
        console.print(f"{ranks}, {launches} launches, {report.num_pending} of them not done")
    sys.exit(ExitStatus.FAILED if failed else ExitStatus.OK)


def _from_stacks(directory: Path, form: Literal["text", "json"]) -> NoReturn:
    from pipeproof.exec.monitor.verdict import RankStacks
    from pipeproof.interop.hang.py_spy import read_stacks

    rank_stacks = RankStacks(read_stacks(directory))
    if form == "json":
        report = {
            "outside": list(rank_stacks.outside),
            "different": list(rank_stacks.different),
            "stacks": rank_stacks.to_json(),
        }
        click.echo(json.dumps(report, indent=2))
    else:
        console = console_for()
        for line in (*rank_stacks.lines(sorted(rank_stacks.stacks)), rank_stacks.comparison()):
            console.print(line, markup=False, soft_wrap=True)
    sys.exit(ExitStatus.OK)


def _from_ras(ras: str, follows: bool, patience_s: float, timeout_s: float | None, output: _Output) -> NoReturn:
    from pipeproof.exec.monitor.follow import follow
    from pipeproof.exec.monitor.ras_verdict import RasFollower
    from pipeproof.interop.hang.nccl_ras import PORT

    host, _, port = ras.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and int(port) < 1 << 16)):
        raise click.UsageError(f"--ras takes HOST or HOST:PORT, not {ras!r}")
    follower = RasFollower(host, int(port or PORT), patience_s)
    if follows:
        output.end(follow(follower.look, report=output.report, timeout_s=timeout_s, poll_s=patience_s / 2))
    follower.look()
    time.sleep(patience_s)
    output.end(follower.look())


def _from_rings(directory: Path, follows: bool, limits: tuple[float, float, float | None], output: _Output) -> NoReturn:
    from pipeproof.exec.monitor.check_job import check_job
    from pipeproof.exec.monitor.follow import Follower, follow
    from pipeproof.exec.monitor.job import read_job, ring_files

    patience_s, slow_s, timeout_s = limits
    if follows:
        follower = Follower(directory, patience_s, slow_s)
        output.end(follow(follower.look, report=output.report, timeout_s=timeout_s))
    with showing_progress(f"reading the rings in {directory}"):
        job = read_job(ring_files(directory))
        verdict = check_job(job, patience_s=patience_s, slow_s=slow_s)
    output.end((verdict, job))


@dataclass
class _Output:
    """Options of the output, and the last printed text."""

    stacks: Path | None
    form: Literal["text", "json"]
    is_slow: bool = False

    def report(self, verdict: Verdict | None, job: JobNow | None) -> None:
        """Print the first verdict of a slow phase."""
        from pipeproof.exec.monitor.verdict import Status

        if verdict is None:
            return
        is_slow = verdict.status is Status.SLOW
        if is_slow and not self.is_slow and self.form == "text":
            self._print(verdict)
        self.is_slow = is_slow

    def end(self, result: tuple[Verdict, JobNow | None] | None) -> NoReturn:
        """Print the last verdict, and exit with the status."""
        from pipeproof.exec.monitor.verdict import FAILURES

        if result is None:
            console_for(stderr=True).print("no hang in that time")
            sys.exit(ExitStatus.OK)
        verdict, job = result
        if verdict.status in FAILURES:
            verdict = replace(verdict, stacks=self._stacks(verdict, job))
        if self.form == "json":
            click.echo(json.dumps(verdict.to_json(), indent=2))
        else:
            self._print(verdict)
        sys.exit(ExitStatus.FAILED if verdict.status in FAILURES else ExitStatus.OK)

    def _stacks(self, verdict: Verdict, job: JobNow | None) -> RankStacks:
        from pipeproof.exec.monitor.verdict import RankStacks, ask_for_causes
        from pipeproof.interop.hang.py_spy import read_stacks

        if self.stacks is not None:
            return RankStacks(read_stacks(self.stacks))
        return RankStacks({}) if job is None else ask_for_causes(job, verdict.causes)

    def _print(self, verdict: Verdict) -> None:
        from pipeproof.diagnostics.text_output import render_text

        console = console_for()
        render_text(verdict.findings, None, console=console)
        for line in verdict.lines():
            console.print(line, markup=False, soft_wrap=True)
