"""Fleet's run beside ours: equal or not, loss by loss, gradient by gradient, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeproof.exec.compare import StepResult
from pipeproof.exec.fleet.codes import NOT_AS_TRAINED
from pipeproof.exec.fleet.order import count_messages, order_findings
from pipeproof.exec.fleet.run import FleetRun
from pipeproof.exec.report import RunReport
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.render import finding_to_json

_ROUNDOFF = 2.0**-24
"""Of float32, in which Fleet can hand its loss on."""


@dataclass(frozen=True)
class FleetReport:
    """A plan, as we ran it and as Fleet did, both held against the same reference."""

    ours: RunReport
    fleet: FleetRun

    @property
    def loss_bound(self) -> float:
        """How far Fleet's loss may be from the reference's, relative to it; 0 where all bits must be equal.

        The plan multiplies the loss of each of M micro-batches by 1/M, which
        is rounded unless M is a power of two; Fleet divides by its number.
        Each of the M terms then has at most two roundings on one side and two
        on the other, and each sum M - 1, in units of u = 2^-24: 2 (M + 1) u,
        where the losses have one sign.
        """
        spec = self.ours.subject.plan.spec
        count = spec.schedule.num_micro_batches * spec.topology.dp
        return 0.0 if count & (count - 1) == 0 else 2 * (count + 1) * _ROUNDOFF

    @cached_property
    def order_findings(self) -> tuple[Finding, ...]:
        """Where Fleet's order is not the plan's, in all steps."""
        subject = self.ours.subject
        steps = zip(*self.fleet.stories, strict=True)
        return tuple(one for step, stories in enumerate(steps) for one in order_findings(subject, step, stories))

    @property
    def num_messages(self) -> int:
        """Activations and gradients that Fleet sent in one step."""
        return count_messages([of_rank[0] for of_rank in self.fleet.stories])

    @property
    def num_computed(self) -> int:
        """Forwards and backwards in one step, of all ranks."""
        return sum(len(of_rank[0].computed) for of_rank in self.fleet.stories)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with Fleet's run; ours has its own."""
        wrong = [step for step in self.fleet.steps if not self.is_right(step)]
        return (*(self._mismatch(step) for step in wrong), *self.order_findings)

    def is_right(self, step: StepResult) -> bool:
        """Whether Fleet's step is the reference's."""
        return all(gradient.bitwise for gradient in step.gradients) and loss_distance(step) <= self.loss_bound

    @property
    def matches(self) -> bool:
        """Whether both runs trained the same, in the plan's order."""
        return self.ours.passed and not self.findings

    def _mismatch(self, step: StepResult) -> Finding:
        different = [gradient for gradient in step.gradients if not gradient.bitwise]
        what = f"the loss is {float(step.loss)!r}, the reference's {float(step.reference_loss)!r}"
        if different:
            worst = max(different, key=lambda gradient: gradient.max_rel_diff)
            what = (
                f"{len(different)} of {len(step.gradients)} gradients differ from the reference, most "
                f"{worst.name} with {worst.max_rel_diff:.2g}; {what}"
            )
        return Finding(NOT_AS_TRAINED.code, Severity.ERROR, f"step {step.step} of Fleet: {what}")

    def to_json(self) -> dict[str, Any]:
        """As ``--report`` writes it."""
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
    """|a - b| / |b| of a step's loss and the reference's that adds in the same order; infinite for NaN."""
    ours, theirs = np.float64(step.loss), np.float64(step.reference_loss)
    if ours == theirs:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = abs(ours - theirs) / abs(theirs)
    return float(distance) if np.isfinite(distance) else float("inf")
