"""Fleet's own pipeline run with a checked plan, beside the same reference that a run of ours has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeproof.exec.compare import StepResult
from pipeproof.exec.fleet.watch import Story
from pipeproof.exec.jobs import Job, dump_plan
from pipeproof.exec.launch import START_UP_TIMEOUT_S, Launcher, job_directory
from pipeproof.exec.own_layers import require_own_layers
from pipeproof.exec.run import Progress, StepCollector
from pipeproof.exec.watchdog import JobState
from pipeproof.verify.check import Report


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What Fleet trained: every step against the reference, and by rank and step what it did."""

    steps: tuple[StepResult, ...]
    stories: tuple[tuple[Story, ...], ...]
    scheduler: str
    """The class that Fleet chose."""


@dataclass(frozen=True, slots=True)
class Recording:
    """That Fleet's ranks are recorded into ``directory``, by ``module``, which they run in place of the worker."""

    module: str
    directory: Path


_RECORDED = "recorded_to"


def recorded_to(job: Job) -> Path:
    """Where the ranks of a job are recorded."""
    return Path((job.directory / _RECORDED).read_text())


def run_fleet(
    report: Report,
    timeout_s: float,
    logs: Path | None,
    on_progress: Callable[[Progress], None],
    recording: Recording | None = None,
) -> FleetRun:
    """Run a plan's layers with Fleet on real processes.

    Raises:
        PlanFileError: own layers cannot be built, or are not as declared.
        WorkerFailedError: a worker died, raised or hung.
        NotFiniteError: a step came to a loss or a gradient that is no number.
    """
    with job_directory(logs) as directory:
        job = Job(directory, dump_plan(report.subject.loaded), report.digest)
        job.save()
        require_own_layers(job, report.subject.loaded, max(timeout_s, START_UP_TIMEOUT_S))
        collector = StepCollector(job, report.subject)
        state = JobState(report.subject)
        if recording is not None:
            (directory / _RECORDED).write_text(str(recording.directory.resolve()))
        module = "pipeproof.exec.fleet.worker" if recording is None else recording.module
        launcher = Launcher(job, state, timeout_s, module)

        def progressed() -> None:
            done = min(rank.steps_done for rank in state.ranks)
            phase = next((rank.phase for rank in state.ranks if rank.phase != "running"), "running")
            on_progress(Progress(done, launcher.reference_steps, phase))
            collector.collect(min(done, launcher.reference_steps))

        launcher.run(progressed)
        progressed()
        left = [json.loads(job.log_file(rank).read_text()) for rank in range(report.subject.graph.num_ranks)]
        stories = tuple(tuple(Story.from_json(one) for one in of_rank["stories"]) for of_rank in left)
        return FleetRun(tuple(collector.results), stories, left[0]["scheduler"])
