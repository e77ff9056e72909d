"""The result of a run: what matched, what did not, and the measured timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pipeproof.comm.accumulation import Accumulation
from pipeproof.exec.codes import BEYOND_BOUND, MISMATCH, UNVERIFIED
from pipeproof.exec.compare import GradientResult, StepResult
from pipeproof.exec.losses import main_loss, module_losses_to_json
from pipeproof.exec.oplog import LogEntry, op_ids_of
from pipeproof.schedule.optable import EdgeKind
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.plan import RunSpec
from pipeproof.specs.profile_file import Profile
from pipeproof.specs.render import finding_to_json
from pipeproof.verify.subject import Subject

LogClock = Literal["host", "device", "issue"]
"""Times of a log: as the host saw each operation end, as the GPU did, or when the host issued it to a GPU."""


def clock_of(run: RunSpec, *, is_timed: bool) -> LogClock:
    """What the times of a run's log are of: a host does not wait for a GPU, unless it is to know its times."""
    if run.device == "cpu":
        return "host"
    return "device" if is_timed else "issue"


@dataclass(frozen=True)
class RunReport:
    """Everything that a run has to show.

    ``accumulation`` says in which order weight gradients came, ``threads`` the pinned compute threads per process,
    ``parallel_bound`` the stated bound on ``uncut_max_rel_diff`` (0 where the
    plan must equal the uncut model bit for bit).
    """

    subject: Subject
    digest: str
    verified: bool
    steps: tuple[StepResult, ...]
    log_findings: tuple[Finding, ...]
    timeline: Timeline
    parallel_bound: float
    threads: int
    accumulation: Accumulation
    is_by_bound: bool = False
    """Whether there is no reference that adds in the plan's order, so that the bound is the verdict."""
    profile: Profile | None = None
    """The measured times, where they were asked for."""
    clock: LogClock = "host"
    """What the times of the log are of."""
    num_logged_steps: int | None = None
    """Steps that have a log, where it is not all of them: later ones were replays."""
    reference_from_state: bool = False
    """Whether the reference, too, began with the state that the run went on from, instead of training up to it."""

    @property
    def gradients(self) -> tuple[GradientResult, ...]:
        """All gradients of all steps."""
        return tuple(gradient for step in self.steps for gradient in step.gradients)

    @property
    def beyond_bound(self) -> tuple[GradientResult, ...]:
        """Gradients farther from the plain uncut model than the stated bound, in order."""
        return tuple(g for g in self.gradients if not g.uncut_max_rel_diff <= self.parallel_bound)

    @property
    def within_bound(self) -> bool:
        """Whether the step from initial weights, where it was run, keeps the bound.

        The bound presumes layers that do not amplify relative errors. Initial weights are such; what training
        makes of them need not be, so other steps beyond it are a warning only.
        """
        return not (self.begins_initial and any(gradient.step == 0 for gradient in self.beyond_bound))

    @property
    def begins_initial(self) -> bool:
        """Whether the first step is from initial weights; a step 0 from a state of weights alone is not."""
        return self.steps[0].step == 0 and not self.reference_from_state

    @property
    def matches(self) -> bool:
        """Whether losses, gradients and op log are what they must be."""
        return all(map(self._is_right, self.steps)) and self.within_bound and not self.log_findings

    def _is_right(self, step: StepResult) -> bool:
        """But for how far gradients are from the uncut model."""
        return step.agrees(self.parallel_bound) if self.is_by_bound else step.bitwise

    @property
    def passed(self) -> bool:
        """Whether the run deserves exit status 0: it was verified, and it matches."""
        return self.verified and self.matches

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the run, as findings."""
        found = list(self.log_findings)
        if not self.verified:
            found.append(Finding(UNVERIFIED.code, Severity.WARNING, "the plan does not pass check; it ran unsafe"))
        found += [self._mismatch(step) for step in self.steps if not self._is_right(step)]
        if self.beyond_bound:
            worst = max(self.beyond_bound, key=lambda g: g.uncut_max_rel_diff)
            found.append(
                Finding(
                    BEYOND_BOUND.code,
                    Severity.WARNING if self.within_bound else Severity.ERROR,
                    f"{len(self.beyond_bound)} of {len(self.gradients)} gradients are farther from the plain uncut "
                    f"model than the stated bound {self.parallel_bound:.3g}; farthest is {worst.name} in step "
                    f"{worst.step} with {worst.uncut_max_rel_diff:.3g}",
                )
            )
        return tuple(found)

    def _mismatch(self, step: StepResult) -> Finding:
        if self.is_by_bound:
            apart = [gradient.name for gradient in step.gradients if not gradient.replicas_agree]
            of_ranks = f"; ranks that hold the same part differ in {', '.join(apart)}" if apart else ""
            return Finding(
                MISMATCH.code,
                Severity.ERROR,
                f"step {step.step}: the loss is {step.loss_distance:.3g} from the uncut model's, and the stated bound "
                f"is {self.parallel_bound:.3g}{of_ranks}",
            )
        wrong = [g for g in step.gradients if not g.bitwise]
        loss = "the loss has the reference's bits" if step.loss_is_bitwise else "the loss differs"
        by_stage = ", ".join(
            f"{sum(g.stage == stage for g in wrong)} of {sum(g.stage == stage for g in step.gradients)} on "
            f"stage {stage}"
            for stage in range(len(self.subject.plan.stages))
        )
        where = ""
        if wrong:
            first = wrong[0]
            where = f" (first: {first.name}, md5 {first.md5}, reference {first.reference_md5})"
        return Finding(
            MISMATCH.code,
            Severity.ERROR,
            f"step {step.step}: {loss}; gradients that differ: {by_stage}{where}"
            + ("" if step.routers is None else step.routers.mismatch()),
        )

    def to_json(self) -> dict[str, Any]:
        """The form of ``run --report``; see ``docs/schemas/run.schema.json``."""
        return {
            "digest": self.digest,
            "verified": self.verified,
            "passed": self.passed,
            "accumulation": self.accumulation,
            "threads": self.threads,
            "dtype": self.subject.plan.spec.run.dtype,
            "parallel_bound": self.parallel_bound,
            "judged_by": "bound" if self.is_by_bound else "bits",
            "reference_from": "state" if self.reference_from_state else "beginning",
            "clock": self.clock,
            "log_matches_graph": not self.log_findings,
            "steps": [
                _finite(
                    {
                        "step": step.step,
                        "loss": float(main_loss(step.loss)),
                        "reference_loss": float(main_loss(step.reference_loss)),
                        "uncut_loss": float(main_loss(step.uncut_loss)),
                        **module_losses_to_json(step.loss, step.reference_loss, step.uncut_loss),
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
    """JSON has neither infinity nor NaN: a loss or distance that is not finite becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in result.items()
    }


def measured_timeline(subject: Subject, logs: Mapping[int, Sequence[LogEntry]]) -> Timeline:
    """The op logs of all ranks as one timeline, from the first start on; ticks are nanoseconds."""
    graph = subject.graph
    origin = min((entry.start_ns for entries in logs.values() for entry in entries), default=0)
    spans = []
    for rank, entries in sorted(logs.items()):
        spans += [
            Span(rank, e.queue, op_id, e.op, e.start_ns - origin, e.end_ns - origin, e.step)
            for op_id, e in zip(op_ids_of(graph, rank, entries), entries, strict=True)
            if op_id is not None
        ]
    return Timeline(
        tuple(spans),
        tuple(subject.plan.mesh.coords(rank) for rank in range(graph.num_ranks)),
        clock="measured",
        tick_us=Fraction(1, 1000),
        matches=tuple((int(a), int(b)) for a, b in graph.edges[EdgeKind.MATCH].tolist()),
    )
