"""End of a run under an external launcher: each host's comparison with its reference, and the report of all hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.compare.compare_gradients import StepResult
from pipeproof.exec.compare.reference_process import run_reference
from pipeproof.exec.host_part import HostPart, host_part, merged_report, read_records
from pipeproof.exec.launch.job_files import Job
from pipeproof.exec.launch.meeting import Meeting
from pipeproof.exec.measure.clock_correction import ClockCorrection
from pipeproof.exec.rank.worker import Emit
from pipeproof.exec.run_codes import NOT_EXECUTED
from pipeproof.exec.run_plan import StepCollector
from pipeproof.exec.run_report import RunReport
from pipeproof.verify.check_plan import Report


class RunConclusion:
    """A ``Conclusion`` of a run; ``on_step`` prints each compared step on rank 0."""

    def __init__(self, report: Report, on_step: Callable[[StepResult], None]) -> None:
        self._report, self._on_step = report, on_step

    def require_hosts(self, job: Job, num_hosts: int) -> None:
        """Refuse options that need all ranks on one host.

        Raises:
            PipeproofError: PP909.
        """
        if num_hosts > 1 and job.options.record is not None:
            raise PipeproofError(
                NOT_EXECUTED.finding(
                    f"--record writes whole tensors, and the ranks are on {num_hosts} hosts: no tensor crosses hosts",
                    help="record a run on one host, where the values are the same bits",
                )
            )

    def of_host(
        self, job: Job, meeting: Meeting, emit: Emit, threads: int, finish_clock: Callable[[], ClockCorrection]
    ) -> Any:
        """Run the reference and compare this host's ranks with it."""
        report, ranks = self._report, meeting.host.ranks
        clock = finish_clock()
        run_reference(job, lambda step: emit("reference", step=step), ranks)
        is_finite = report.certificate is not None
        collector = StepCollector(job, report.subject, job.options.record, requires_finite=is_finite, ranks=ranks)
        steps = collector.collect_parts(report.subject.plan.spec.run.steps)
        part = host_part(report, job, steps, ranks, threads, run=meeting.token, host=meeting.host.name, clock=clock)
        part.save(job.directory)
        return TypeAdapter(HostPart).dump_python(part, mode="json")

    def of_all(self, job: Job, meeting: Meeting, parts: Sequence[Any]) -> RunReport:
        """Return the report of all ranks, with the timeline of this host's."""
        read = [TypeAdapter(HostPart).validate_python(part) for part in parts]
        result = merged_report(self._report, job, read, read_records(job, meeting.host.ranks))
        for step in result.steps:
            self._on_step(step)
        return result
