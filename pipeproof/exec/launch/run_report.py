"""Result of a run: the comparison with the reference, the findings and the measured timeline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from pipeproof.comm.accumulation_order import Accumulation
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.compare.compare_gradients import GradientResult, StepResult
from pipeproof.exec.compare.step_losses import main_loss, module_losses_to_json
from pipeproof.exec.rank.op_log import LogEntry, op_ids_of
from pipeproof.exec.store.run_codes import BEYOND_BOUND, MISMATCH, UNVERIFIED
from pipeproof.schedule.op_table import EdgeKind
from pipeproof.schedule.ops import PART_KINDS
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.specs.profile_file import Profile
from pipeproof.verify.subject import Subject

LogClock = Literal["host", "device", "issue"]
"""Clock of a log: the host's at the end of each operation, the GPU's, or the host's at the issue of each operation."""


def clock_of(run: RunSpec, *, is_timed: bool) -> LogClock:
    """Return the clock of a run's log: the host does not wait for a GPU unless the operations are timed."""
    if run.device == "cpu":
        return "host"
    return "device" if is_timed else "issue"


@dataclass(frozen=True)
class RunReport:
    """Report of a run.

    ``accumulation`` is the order in which weight gradients are added, ``threads`` the number of pinned compute threads
    per process, ``parallel_bound`` the stated bound on ``unpartitioned_max_rel_diff`` (0 if the plan must equal the
    unpartitioned model bit for bit).
    """

    subject: Subject
    digest: str
    verified: bool
    steps: Sequence[StepResult]
    log_findings: tuple[Finding, ...]
    timeline: Timeline
    parallel_bound: float
    threads: int
    accumulation: Accumulation
    is_checked_by_bound: bool = False
    """True if no reference adds in the plan's order: the bound then decides the verdict."""
    profile: Profile | None = None
    """The measured times, if they were requested."""
    clock: LogClock = "host"
    """The clock of the log's times."""
    num_logged_steps: int | None = None
    """Number of steps with a log; later steps were replays."""
    reference_from_state: bool = False
    """True if the reference started from the resumed state instead of training up to it."""

    @property
    def gradients(self) -> Iterator[GradientResult]:
        """All gradients of all steps, a step at a time."""
        return (gradient for step in self.steps for gradient in step.gradients)

    @cached_property
    def beyond_bound(self) -> tuple[GradientResult, ...]:
        """Gradients farther from the plain unpartitioned model than the stated bound, in order."""
        return tuple(
            gradient for gradient in self.gradients if not gradient.unpartitioned_max_rel_diff <= self.parallel_bound
        )

    @property
    def within_bound(self) -> bool:
        """True if the step from initial weights is within the bound, or was not run.

        The bound presumes layers that do not amplify relative errors. That holds for initial weights but not always for
        trained weights, so later steps beyond the bound are only a warning.
        """
        return not (self.starts_from_initial_weights and any(gradient.step == 0 for gradient in self.beyond_bound))

    @property
    def starts_from_initial_weights(self) -> bool:
        """True if the first step is from initial weights; step 0 from a state with only weights is not."""
        return self.steps[0].step == 0 and not self.reference_from_state

    @property
    def matches(self) -> bool:
        """True if losses, gradients and op log are correct."""
        return not self._differing and self.within_bound and not self.log_findings

    @cached_property
    def _differing(self) -> tuple[StepResult, ...]:
        bound = self.parallel_bound if self.is_checked_by_bound else None
        return tuple(step for step in self.steps if not (step.bitwise if bound is None else step.agrees(bound)))

    @property
    def passed(self) -> bool:
        """True if the exit status is 0: the plan was verified, and the run matches."""
        return self.verified and self.matches

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about the run."""
        findings = [*self.log_findings]
        if not self.verified:
            findings.append(UNVERIFIED.finding("the plan does not pass check; it ran unsafe"))
        findings += map(self._mismatch, self._differing)
        if self.beyond_bound:
            worst = max(self.beyond_bound, key=lambda g: g.unpartitioned_max_rel_diff)
            findings.append(
                Finding(
                    BEYOND_BOUND.code,
                    Severity.WARNING if self.within_bound else Severity.ERROR,
                    f"{len(self.beyond_bound)} of {sum(1 for _ in self.gradients)} gradients are farther from the "
                    f"plain unpartitioned model than the stated bound {self.parallel_bound:.3g}; the farthest is "
                    f"{worst.name} in step {worst.step} with {worst.unpartitioned_max_rel_diff:.3g}",
                )
            )
        return tuple(findings)

    def _mismatch(self, step: StepResult) -> Finding:
        if self.is_checked_by_bound:
            different = [gradient.name for gradient in step.gradients if not gradient.replicas_agree]
            replicas = f"; ranks with the same shard differ in {', '.join(different)}" if different else ""
            loss = (
                f"the loss is {step.loss_distance:.3g} from the unpartitioned model's, and the stated bound is "
                f"{self.parallel_bound:.3g}"
            )
            return MISMATCH.finding(f"step {step.step}: {loss}{replicas}")
        wrong = [g for g in step.gradients if not g.bitwise]
        loss = "the loss has the reference's bits" if step.loss_is_bitwise else "the loss differs"
        by_stage = ", ".join(
            f"{sum(g.stage == stage for g in wrong)} of {sum(g.stage == stage for g in step.gradients)} on "
            f"stage {stage}"
            for stage in range(len(self.subject.plan.stages))
        )
        example = ""
        if wrong:
            first = wrong[0]
            example = f" (first: {first.name}, md5 {first.md5}, reference {first.reference_md5})"
        return MISMATCH.finding(
            f"step {step.step}: {loss}; gradients that differ: {by_stage}{example}"
            + ("" if step.routers is None else step.routers.mismatch()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the form of ``run --report``; see ``docs/schemas/run.schema.json``."""
        return {
            "digest": self.digest,
            "verified": self.verified,
            "passed": self.passed,
            "accumulation": self.accumulation,
            "threads": self.threads,
            "dtype": self.subject.plan.spec.run.dtype,
            "parallel_bound": self.parallel_bound,
            "judged_by": "bound" if self.is_checked_by_bound else "bits",
            "reference_from": "state" if self.reference_from_state else "beginning",
            "clock": self.clock,
            "log_matches_graph": not self.log_findings,
            "steps": [
                _finite(
                    {
                        "step": step.step,
                        "loss": float(main_loss(step.loss)),
                        "reference_loss": float(main_loss(step.reference_loss)),
                        "uncut_loss": float(main_loss(step.unpartitioned_loss)),
                        **module_losses_to_json(step.loss, step.reference_loss, step.unpartitioned_loss),
                        "loss_is_bitwise": step.loss_is_bitwise,
                        "bitwise": step.bitwise,
                        **({} if step.routers is None else {"routers": step.routers.to_json()}),
                    }
                )
                for step in self.steps
            ],
            "gradients": [_finite(gradient.to_json()) for gradient in self.gradients],
            "findings": [finding_to_json(finding) for finding in self.findings],
            "timeline": [
                {
                    "step": span.step,
                    "rank": span.rank,
                    "queue": span.queue,
                    "op": span.op,
                    "start_us": float(self.timeline.us(span.start)),
                    "end_us": float(self.timeline.us(span.end)),
                }
                for span in self.timeline.spans
            ],
        }


def _finite(result: dict[str, Any]) -> dict[str, Any]:
    """Replace values that are not finite by None, because JSON has neither infinity nor NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in result.items()
    }


def measured_timeline(subject: Subject, logs: Mapping[int, Sequence[LogEntry]]) -> Timeline:
    """Return the op logs of all ranks as one timeline that begins with the first start; ticks are nanoseconds.

    A computation in parts, whose log entry takes no time, lasts until the end of its last part, as in a simulation.
    """
    graph = subject.graph
    origin = min((entry.start_ns for entries in logs.values() for entry in entries), default=0)
    spans = []
    for rank, entries in sorted(logs.items()):
        logged_ops = [
            (op_id, e) for op_id, e in zip(op_ids_of(graph, rank, entries), entries, strict=True) if op_id is not None
        ]
        ends: dict[tuple[int, int], int] = {}
        for op_id, e in logged_ops:
            if graph.ops[op_id].kind in PART_KINDS:
                computation = e.step, int(graph.parent[op_id])
                ends[computation] = max(e.end_ns, ends.get(computation, 0))
        spans += [
            Span(rank, e.queue, i, e.op, e.start_ns - origin, ends.get((e.step, i), e.end_ns) - origin, e.step)
            for i, e in logged_ops
        ]
    return Timeline(
        tuple(spans),
        tuple(subject.plan.mesh.coords(rank) for rank in range(graph.num_ranks)),
        clock="measured",
        tick_us=Fraction(1, 1000),
        matches=tuple((int(a), int(b)) for a, b in graph.edges[EdgeKind.MATCH].tolist()),
    )
