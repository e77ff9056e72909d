"""Verdict on a schedule alone: correct or not, and the channel models under which it deadlocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.diagnostics.finding import Finding
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.verify.check_plan import check
from pipeproof.verify.deadlock.deadlock_rules import models_text
from pipeproof.verify.deadlock.deadlock_verdict import conditions


class Outcome(StrEnum):
    """Result of the check of a schedule."""

    ROBUST = "robust"
    """Correct, and safe under every channel model."""
    CONDITIONAL = "conditional"
    """Correct on the plan's backend; it deadlocks under other channel models."""
    WRONG = "wrong"
    """The check of its plan has errors."""


@dataclass(frozen=True, slots=True)
class ScheduleVerdict:
    """Errors of a plan, and the channel models of ``MODELS`` under which it deadlocks."""

    backend: str
    errors: tuple[Finding, ...]
    failing: tuple[ChannelModel, ...]

    @property
    def outcome(self) -> Outcome:
        """Result of the check."""
        if self.errors:
            return Outcome.WRONG
        return Outcome.CONDITIONAL if self.failing else Outcome.ROBUST

    @property
    def reason(self) -> str:
        """The reason, in a sentence without a full stop."""
        match self.outcome:
            case Outcome.WRONG:
                return "; ".join(f"{error.code}: {error.message}" for error in self.errors)
            case Outcome.CONDITIONAL:
                return (
                    f"safe on {self.backend}, but deadlocks under {len(self.failing)} of {len(MODELS)} channel models: "
                    f"{models_text(self.failing)}"
                )
            case _:
                return f"no deadlock under any of {len(MODELS)} channel models"


def check_schedule(plan: LoadedPlan) -> ScheduleVerdict:
    """Check a plan by every rule; only errors and conditional deadlocks count.

    Raises:
        PlanFileError: the schedule does not exist for the plan's sizes.
    """
    report = check(plan)
    return ScheduleVerdict(report.subject.backend.name, report.errors, conditions(report.subject))
