"""What the rules say of a schedule by itself: right or not, and under which channel models it deadlocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.specs.finding import Finding
from pipeproof.specs.load import LoadedPlan
from pipeproof.verify.check import check
from pipeproof.verify.deadlock.rules import models_text
from pipeproof.verify.deadlock.verdict import conditions


class Outcome(StrEnum):
    """How a schedule stands."""

    ROBUST = "robust"
    """Right, and no channel model makes it wait for itself."""
    CONDITIONAL = "conditional"
    """Right on the plan's backend; under other channel models it deadlocks."""
    WRONG = "wrong"
    """The check of its plan has errors."""


@dataclass(frozen=True, slots=True)
class ScheduleVerdict:
    """What checking a plan came to: its errors, and the channel models of ``MODELS`` under which it deadlocks."""

    backend: str
    errors: tuple[Finding, ...]
    failing: tuple[ChannelModel, ...]

    @property
    def outcome(self) -> Outcome:
        """How the schedule stands."""
        if self.errors:
            return Outcome.WRONG
        return Outcome.CONDITIONAL if self.failing else Outcome.ROBUST

    @property
    def reason(self) -> str:
        """Why, in a sentence without a stop."""
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


def judge_schedule(plan: LoadedPlan) -> ScheduleVerdict:
    """Check a plan by every rule; only what is wrong or conditional counts.

    Raises:
        PlanFileError: the schedule does not exist for the plan's sizes.
    """
    report = check(plan)
    return ScheduleVerdict(report.subject.backend.name, report.errors, conditions(report.subject))
