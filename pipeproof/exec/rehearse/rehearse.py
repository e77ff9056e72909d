"""Rehearsing a plan: launch, read what the ranks found, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pipeproof.exec.carried_out import require_issued
from pipeproof.exec.jobs import Fault, Job, dump_plan
from pipeproof.exec.launch import Launcher, job_directory
from pipeproof.exec.launched import carry_out_launched
from pipeproof.exec.rehearse.report import Rehearsal, read_rehearsal
from pipeproof.exec.rehearse.worker import rehearse_rank
from pipeproof.exec.run import NotVerifiedError, require_environment, require_fault_op
from pipeproof.exec.watchdog import JobState
from pipeproof.specs.finding import Finding
from pipeproof.verify.check import Report


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """How to rehearse: as ``RunOptions`` has it; ``scale`` is what the plan was made smaller by."""

    timeout_s: float = 60.0
    logs: Path | None = None
    fault: Fault | None = None
    unsafe: bool = False
    scale: Fraction = Fraction(1)
    share_gpus: bool = False


def rehearse(report: Report, options: RehearsalOptions, on_progress: Callable[[str], None]) -> Rehearsal:
    """Carry out the communication of the plan of a check report on real processes of this machine.

    ``on_progress`` is told what set-up is at. Every rank of the report's subject stands for itself.

    Raises:
        NotVerifiedError: the report has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed, or its device is not there.
        PipeproofError: the plan has operations that cannot be issued, or the planted failure would never strike.
        WorkerFailedError: a worker died, raised or hung.
    """
    _require(report, options)
    with job_directory(options.logs) as directory:
        job = _job(directory, report, options)
        state = JobState(report.subject)
        launcher = Launcher(job, state, options.timeout_s, "pipeproof.exec.rehearse.worker", has_reference=False)

        def progressed() -> None:
            on_progress(next((rank.phase for rank in state.ranks if rank.phase != "running"), "running"))

        launcher.run(progressed)
        return read_rehearsal(report, job, options.scale)


def rehearse_launched(
    rank: int, report: Report, options: RehearsalOptions, on_hang: Callable[[Finding], None]
) -> Rehearsal | None:
    """Rehearse one rank under a launcher that is not ours; rank 0 returns the report of all, the others None.

    Raises:
        PipeproofError: as ``rehearse``, or the launcher started another number of processes than the plan has ranks.
        WorkerFailedError: this rank failed, or the others did not come to their end.
    """
    _require(report, options)
    return carry_out_launched(
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
    require_issued(report.subject)
    require_environment(report.subject, share_gpus=options.share_gpus)
    require_fault_op(report.subject, options.fault)


def _job(directory: Path, report: Report, options: RehearsalOptions) -> Job:
    plan = dump_plan(report.subject.loaded)
    job = Job(directory, plan, report.digest, options.fault, share_gpus=options.share_gpus)
    job.save()
    return job
