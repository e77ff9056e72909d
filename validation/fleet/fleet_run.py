"""A checked plan trained by Fleet's own pipeline, and its comparison with pipeproof's run and the same reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.compare.compare_gradients import StepResult
from pipeproof.exec.launch.custom_layers_check import require_custom_layers
from pipeproof.exec.launch.job_files import Job, dump_plan, load_json
from pipeproof.exec.launch.supervisor import START_UP_TIMEOUT_S, Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.run_plan import Progress, StepCollector
from pipeproof.exec.run_report import RunReport
from pipeproof.verify.check_plan import Report
from validation.fleet.fleet_codes import NOT_AS_TRAINED
from validation.fleet.fleet_order import FleetLog, RankEvents, count_messages, order_findings
from validation.fleet.fleet_worker import save_record_directory

_ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


@dataclass(frozen=True, slots=True)
class FleetRun:
    """Result of Fleet's run: every step compared with the reference, and the events by rank and step."""

    steps: tuple[StepResult, ...]
    events: tuple[tuple[RankEvents, ...], ...]
    scheduler: str
    """The scheduler class that Fleet chose."""


def run_fleet(
    report: Report,
    timeout_s: float,
    logs: Path | None,
    on_progress: Callable[[Progress], None],
    record_directory: Path | None = None,
) -> FleetRun:
    """Train a plan's layers with Fleet on real processes; record their calls into ``record_directory`` if it is given.

    Raises:
        PlanFileError: custom layers cannot be built, or differ from their declaration.
        WorkerFailedError: a worker died, raised or hung.
        NotFiniteError: a loss or a gradient of a step is not finite.
    """
    with job_directory(logs) as directory:
        job = Job(directory, dump_plan(report.subject.loaded), report.conclusion)
        job.save()
        require_custom_layers(job, report.subject.loaded, max(timeout_s, START_UP_TIMEOUT_S))
        collector = StepCollector(job, report.subject)
        state = JobState(report.subject)
        if record_directory is not None:
            save_record_directory(directory, record_directory)
        # Workers look for modules in no working directory, and `validation` is not installed.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        launcher = Launcher(job, state, timeout_s, "validation.fleet.fleet_worker")

        def progressed() -> None:
            done = min(rank.steps_done for rank in state.ranks)
            on_progress(Progress(done, launcher.reference_steps, state.phase))
            collector.collect(min(done, launcher.reference_steps))

        launcher.run(progressed)
        progressed()
        logs_by_rank = [
            load_json(job.rank_file(rank, "log"), FleetLog) for rank in range(report.subject.graph.num_ranks)
        ]
        events = tuple(tuple(log.events) for log in logs_by_rank)
        return FleetRun(tuple(collector.results), events, logs_by_rank[0].scheduler)


_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32, the type in which Fleet passes its loss on."""


@dataclass(frozen=True)
class FleetReport:
    """A plan run by pipeproof and by Fleet, both compared with the same reference."""

    ours: RunReport
    fleet: FleetRun

    @property
    def loss_bound(self) -> float:
        """Largest relative distance of Fleet's loss to the reference's; 0 where all bits must be equal.

        The plan multiplies the loss of each of M micro-batches by 1/M, which is rounded unless M is a power of two;
        Fleet divides by M. Each of the M terms then has at most two roundings on either side, and each sum M - 1, in
        units of u = 2^-24: 2 (M + 1) u, if all losses have one sign.
        """
        spec = self.ours.subject.plan.spec
        count = spec.schedule.num_micro_batches * spec.topology.dp
        return 0.0 if count & (count - 1) == 0 else 2 * (count + 1) * _ROUNDOFF

    @cached_property
    def order_findings(self) -> tuple[Finding, ...]:
        """Differences between Fleet's order and the plan's, of all steps."""
        subject = self.ours.subject
        steps = zip(*self.fleet.events, strict=True)
        return tuple(finding for step, ranks in enumerate(steps) for finding in order_findings(subject, step, ranks))

    @property
    def num_messages(self) -> int:
        """Number of activations and gradients that Fleet sent in one step."""
        return count_messages([steps[0] for steps in self.fleet.events])

    @property
    def num_computed(self) -> int:
        """Number of forwards and backwards of all ranks in one step."""
        return sum(len(steps[0].computed) for steps in self.fleet.events)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about Fleet's run; pipeproof's run has its own."""
        mismatches = [self._mismatch(step) for step in self.fleet.steps if not self.matches_reference(step)]
        return (*mismatches, *self.order_findings)

    def matches_reference(self, step: StepResult) -> bool:
        """Return True if a step of Fleet's matches the reference."""
        return all(gradient.bitwise for gradient in step.gradients) and loss_distance(step) <= self.loss_bound

    @property
    def matches(self) -> bool:
        """True if both runs trained the same, in the plan's order."""
        return self.ours.passed and not self.findings

    def _mismatch(self, step: StepResult) -> Finding:
        different = [gradient for gradient in step.gradients if not gradient.bitwise]
        text = f"the loss is {float(step.loss)!r}, the reference's {float(step.reference_loss)!r}"
        if different:
            worst = max(different, key=lambda gradient: gradient.max_rel_diff)
            text = (
                f"{len(different)} of {len(step.gradients)} gradients differ from the reference, most of all "
                f"{worst.name} by {worst.max_rel_diff:.2g}; {text}"
            )
        return NOT_AS_TRAINED.finding(f"step {step.step} of Fleet: {text}")

    def to_json(self) -> dict[str, Any]:
        """Return the form that ``--report`` writes."""
        return {
            "digest": self.ours.digest,
            "matches": self.matches,
            "scheduler": self.fleet.scheduler,
            "messages_per_step": self.num_messages,
            "computed_per_step": self.num_computed,
            "loss_bound": self.loss_bound,
            "ours_matches": self.ours.passed,
            "steps": [
                {
                    "step": theirs.step,
                    "loss": float(ours.loss),
                    "fleet_loss": float(theirs.loss),
                    "reference_loss": float(theirs.reference_loss),
                    "loss_is_bitwise": theirs.loss_is_bitwise,
                    "gradients": [gradient.to_json() for gradient in theirs.gradients],
                }
                for ours, theirs in zip(self.ours.steps, self.fleet.steps, strict=True)
            ],
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def loss_distance(step: StepResult) -> float:
    """|a - b| / |b| of a step's loss a and the ordered reference's loss b; infinite for NaN."""
    ours, theirs = np.float64(step.loss), np.float64(step.reference_loss)
    if ours == theirs:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = abs(ours - theirs) / abs(theirs)
    return float(distance) if np.isfinite(distance) else float("inf")
