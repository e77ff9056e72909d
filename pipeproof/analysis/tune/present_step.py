"""The step of an unchanged plan: its time, its critical path, and why ranks are idle.

A rank's idle time, on average, falls into three parts: the busiest rank's work above the average (*overload*),
messages that the critical path waits for (*messages*), and the rest, in which the pipeline fills and
drains. The path ends with the last computation: it does not include reductions of gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

from pipeproof.analysis.tune.critical_path import CriticalPath
from pipeproof.analysis.tune.evaluate_layout import parts_of_step, peak_bytes_of
from pipeproof.analysis.tune.step_clock import Figures, asap_clock, block_sequences, clock_of, figures_of
from pipeproof.diagnostics.units import time_text
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.memory_curve import GIB
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.sim.timeline import number_to_json
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.check_plan import check


class TuneError(ValueError):
    """Wrong options of a search, or a plan that only runs forwards; the message has the remedy."""


class Cause(StrEnum):
    """Why ranks are idle."""

    OVERLOAD = "overload"
    MESSAGES = "messages"
    FILL = "fill"


@dataclass(frozen=True)
class PresentStep:
    """The step of a plan: its time in microseconds, its parts, and the waits of its computations.

    All of them are None if the schedule never ends. ``errors`` are the codes of errors in the check of the plan.
    """

    spec: PlanSpec
    errors: tuple[str, ...] = ()
    step_us: Fraction | None = None
    parts_us: Mapping[str, Fraction] | None = None
    peak_bytes: int | None = None
    figures: Figures | None = None
    path: CriticalPath | None = None

    @property
    def parts_s(self) -> Mapping[str, float] | None:
        """The parts of the step in seconds."""
        return None if self.parts_us is None else {name: float(us) / 10**6 for name, us in self.parts_us.items()}

    @property
    def why(self) -> str | None:
        """The critical rank or edge, in a sentence."""
        return None if self.figures is None or self.path is None else why_idle(self.figures, self.path)

    def to_json(self) -> dict[str, Any]:
        """The form of ``present`` in the result of a search; times are in seconds, in ``critical`` in us."""
        return {
            "errors": list(self.errors),
            **({"step_s": None} if self.step_us is None else number_to_json("step_s", self.step_us / 10**6)),
            "parts_s": self.parts_s,
            "peak_gib": None if self.peak_bytes is None else self.peak_bytes / GIB,
            "why": self.why,
            "critical": self._critical(),
        }

    def _critical(self) -> dict[str, Any] | None:
        if self.figures is None or self.path is None:
            return None
        path, idle = self.path, idle_parts(self.figures, self.path)
        phases = {"warm_up": path.warm_up, "steady": path.steady, "cool_down": path.cool_down}
        result: dict[str, Any] = {
            "cause": largest_part(idle),
            "rank": path.rank,
            "edge": None if path.edge is None else list(path.edge),
        }
        for name, time in (*idle.items(), *phases.items()):
            result |= number_to_json(str(name), Fraction(time))
        return result


def present_step(loaded: LoadedPlan) -> PresentStep:
    """Check and time a plan.

    Raises:
        BadPlanError: it cannot be lowered, or its ``cost.p2p`` is not simulated.
        TuneError: it has no backwards, and is not comparable with plans that have.
    """
    report = check(loaded)
    lowered = report.subject.plan
    if not any(op.kind is not OpKind.FORWARD for program in lowered.programs for op in program):
        raise TuneError("the plan's schedule has no backward, and tune compares training steps")
    errors = tuple(dict.fromkeys(error.code for error in report.errors))
    try:
        asap_clock(lowered.schedule, lowered.spec)
        clock, simulation = clock_of(lowered), simulate(lowered)
    except (SimulationError, ValueError):  # it never ends; other schedules may
        return PresentStep(loaded.spec, errors)
    return PresentStep(
        loaded.spec, errors, simulation.makespan, parts_of_step(loaded.spec, lowered, simulation),
        peak_bytes_of(simulation), figures_of(clock, block_sequences(loaded.spec)), clock.path(),
    )  # fmt: skip


def idle_parts(figures: Figures, path: CriticalPath) -> dict[Cause, Fraction]:
    """Parts of an average rank's idle time, in microseconds; they add up to it.

    Messages that the busiest rank works through cost nothing, so only the part
    that lengthens the step beyond its work counts.
    """
    overload = figures.most_work_us - figures.work_us
    messages = min(Fraction(path.waiting), figures.makespan_us - figures.most_work_us)
    fill = figures.idle_us - overload - messages
    return {Cause.OVERLOAD: overload, Cause.MESSAGES: messages, Cause.FILL: fill}


def largest_part(idle: Mapping[Cause, Fraction]) -> Cause | None:
    """The largest part of the idle time; None if no rank is ever idle."""
    cause = max(idle, key=idle.__getitem__)
    return cause if idle[cause] else None


def why_idle(figures: Figures, path: CriticalPath) -> str:
    """The critical rank or edge, in a sentence."""
    idle = idle_parts(figures, path)
    match largest_part(idle):
        case None:
            return "No rank is ever idle."
        case Cause.OVERLOAD:
            return (
                f"Rank {figures.busiest} is critical: it computes for {time_text(figures.most_work_us)}, "
                f"{time_text(idle[Cause.OVERLOAD])} more than the ranks do on average."
            )
        case Cause.MESSAGES:
            text = f"Messages are critical: the critical path waits {time_text(Fraction(path.waiting))} for them"
            if path.edge is not None:
                source, target = path.edge
                longest = time_text(Fraction(path.messages[path.edge]))
                text += f", longest on the edge from rank {source} to rank {target} ({longest})"
            return f"{text}."
        case _:
            return (
                f"Rank {path.rank} is critical: the critical path computes there for "
                f"{time_text(Fraction(path.compute[path.rank]))}, after a warm-up of "
                f"{time_text(Fraction(path.warm_up))} and before a cool-down of "
                f"{time_text(Fraction(path.cool_down))}."
            )
