"""Rehearsal of a plan: launch, read the ranks' results, report."""

from __future__ import annotations

from collections.abc import Callable

from pipeproof.diagnostics.finding import Finding
from pipeproof.exec.launch.external_launcher import execute_launched
from pipeproof.exec.launch.job_files import RunOptions
from pipeproof.exec.launch.launched_rank import LaunchedRank
from pipeproof.exec.launch.supervisor import Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rehearse.rehearsal_report import Rehearsal, read_rehearsal
from pipeproof.exec.run_plan import prepare_job, require_runnable
from pipeproof.verify.check_plan import Report


def rehearse(report: Report, options: RunOptions, on_progress: Callable[[str], None]) -> Rehearsal:
    """Execute the communication of the plan of a check report on real processes of this machine.

    ``on_progress`` is called with the phase of set-up. The report's subject must be unfolded.

    Raises:
        PipeproofError: see ``require_runnable``.
        WorkerFailedError: a worker died, raised or hung.
    """
    require_runnable(report, options)
    with job_directory(options.logs) as directory:
        job, state = prepare_job(report, options, directory), JobState(report.subject)
        Launcher(job, state, options.timeout_s, has_reference=False).run(lambda: on_progress(state.phase))
        return read_rehearsal(report, job)


def rehearse_launched(
    launched: LaunchedRank, report: Report, options: RunOptions, on_hang: Callable[[Finding], None]
) -> Rehearsal | None:
    """Rehearse one rank under an external launcher; rank 0 returns the report of all ranks, the others return None.

    Raises:
        PipeproofError: see ``execute_launched``.
        WorkerFailedError: this rank failed, or another rank did not reach the end.
    """
    return execute_launched(launched, report, options, on_hang, lambda job, _, __: read_rehearsal(report, job))
