"""Rehearsal of a plan: launch, read the ranks' results, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pipeproof.diagnostics.finding import Finding
from pipeproof.exec.executor_support import require_issuable
from pipeproof.exec.launch.external_launcher import execute_launched
from pipeproof.exec.launch.job_files import Fault, Job, dump_plan
from pipeproof.exec.launch.supervisor import Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rehearse.rehearsal_report import Rehearsal, read_rehearsal
from pipeproof.exec.rehearse.rehearsal_worker import rehearse_rank
from pipeproof.exec.run_plan import NotVerifiedError, require_environment, require_fault_op
from pipeproof.verify.check_plan import Report


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """Options of a rehearsal, see ``RunOptions``; ``scale`` is the factor of the scaled plan."""

    timeout_s: float = 60.0
    logs: Path | None = None
    fault: Fault | None = None
    unsafe: bool = False
    scale: Fraction = Fraction(1)
    share_gpus: bool = False


def rehearse(report: Report, options: RehearsalOptions, on_progress: Callable[[str], None]) -> Rehearsal:
    """Execute the communication of the plan of a check report on real processes of this machine.

    ``on_progress`` is called with the phase of set-up. The report's subject must be unfolded.

    Raises:
        NotVerifiedError: the report has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed, or its device is missing.
        PipeproofError: the plan has operations that cannot be issued, or the injected failure would never occur.
        WorkerFailedError: a worker died, raised or hung.
    """
    _require(report, options)
    with job_directory(options.logs) as directory:
        job = _job(directory, report, options)
        state = JobState(report.subject)
        launcher = Launcher(
            job, state, options.timeout_s, "pipeproof.exec.rehearse.rehearsal_worker", has_reference=False
        )

        def progressed() -> None:
            on_progress(next((rank.phase for rank in state.ranks if rank.phase != "running"), "running"))

        launcher.run(progressed)
        return read_rehearsal(report, job, options.scale)


def rehearse_launched(
    rank: int, report: Report, options: RehearsalOptions, on_hang: Callable[[Finding], None]
) -> Rehearsal | None:
    """Rehearse one rank under an external launcher; rank 0 returns the report of all ranks, the others return None.

    Raises:
        PipeproofError: see ``rehearse``, or the launcher does not fit the plan.
        WorkerFailedError: this rank failed, or another rank did not reach the end.
    """
    _require(report, options)
    return execute_launched(
        rank,
        report,
        options.timeout_s,
        on_hang,
        lambda directory: _job(directory, report, options),
        rehearse_rank,
        lambda job, _, __: read_rehearsal(report, job, options.scale),
    )


def _require(report: Report, options: RehearsalOptions) -> None:
    if report.certificate is None and not options.unsafe:
        raise NotVerifiedError(*report.errors)
    require_issuable(report.subject)
    require_environment(report.subject, share_gpus=options.share_gpus)
    require_fault_op(report.subject, options.fault)


def _job(directory: Path, report: Report, options: RehearsalOptions) -> Job:
    plan = dump_plan(report.subject.loaded)
    job = Job(directory, plan, report.conclusion, options.fault, share_gpus=options.share_gpus)
    job.save()
    return job
