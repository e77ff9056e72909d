"""Rehearsal of a plan: launch, read the ranks' results, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from pipeproof.exec.launch.job_files import Job, RunOptions
from pipeproof.exec.launch.meeting import Meeting
from pipeproof.exec.launch.supervisor import Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.measure.clock_correction import ClockCorrection
from pipeproof.exec.placement.placement_report import placement_report
from pipeproof.exec.placement.rank_placement import placement_from_json
from pipeproof.exec.rank.worker import Emit
from pipeproof.exec.rehearse.rehearsal_report import (
    Rehearsal,
    RehearsalPart,
    merged_rehearsal,
    read_rehearsal,
    rehearsal_part,
)
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


class RehearsalConclusion:
    """End of a rehearsal under an external launcher; a ``Conclusion``."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def require_hosts(self, job: Job, num_hosts: int) -> None:
        """Accept any number of hosts."""

    def of_host(
        self, job: Job, meeting: Meeting, emit: Emit, threads: int, finish_clock: Callable[[], ClockCorrection]
    ) -> Any:
        """Return what this host's ranks found."""
        host = meeting.host
        part = rehearsal_part(self._report, job, host.ranks, run=meeting.token, host=host.name)
        return TypeAdapter(RehearsalPart).dump_python(part, mode="json")

    def of_all(self, job: Job, meeting: Meeting, parts: Sequence[Any]) -> Rehearsal:
        """Return the report of all ranks."""
        read = [TypeAdapter(RehearsalPart).validate_python(part) for part in parts]
        places = [placement_from_json(place) for place in meeting.places]
        placement = placement_report(self._report.subject, places)
        return replace(merged_rehearsal(self._report, job, read), placement=placement)
