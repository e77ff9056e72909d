"""Reasons of idle time, and the effect of a candidate on it, in numbers and in sentences.

A rank's idle time, on average, falls into three parts: what the busiest rank
computes more than the average (*overload*), messages that the critical path
waits for (*messages*), and the rest, in which the pipeline fills and drains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from pipeproof.analysis.advise.candidates import Changed
from pipeproof.analysis.advise.critical_path import CriticalPath
from pipeproof.analysis.advise.receive_timing import OtherPost
from pipeproof.analysis.advise.schedule_figures import Figures
from pipeproof.analysis.advise.search import Advice, Verified
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.deadlock.deadlock_rules import models_text
from pipeproof.views.timeline_text import format_us


class Cause(StrEnum):
    """Why ranks are idle."""

    OVERLOAD = "overload"
    MESSAGES = "messages"
    FILL = "fill"


@dataclass(frozen=True, slots=True)
class Idle:
    """The parts of an average rank's idle time, in microseconds."""

    overload: Fraction
    messages: Fraction
    fill: Fraction

    @property
    def largest(self) -> Cause | None:
        """The part that weighs most; None where no rank is ever idle."""
        parts = {Cause.OVERLOAD: self.overload, Cause.MESSAGES: self.messages, Cause.FILL: self.fill}
        cause = max(parts, key=lambda part: parts[part])
        return cause if parts[cause] else None


def idle_parts(figures: Figures, path: CriticalPath) -> Idle:
    """Parts of the idle time; they add up to it.

    Messages that the busiest rank works through cost nothing, so no more of
    them counts than lengthens the step beyond its work.
    """
    overload = figures.most_work_us - figures.work_us
    messages = min(Fraction(path.waiting), figures.makespan_us - figures.most_work_us)
    return Idle(overload, messages, figures.idle_us - overload - messages)


def why_now(figures: Figures, path: CriticalPath) -> str:
    """The critical rank or edge, in a sentence."""
    idle = idle_parts(figures, path)
    match idle.largest:
        case None:
            return "No rank is ever idle."
        case Cause.OVERLOAD:
            return (
                f"Rank {figures.busiest} is critical: it computes for {format_us(figures.most_work_us)} us, "
                f"{format_us(idle.overload)} us more than the ranks do on average."
            )
        case Cause.MESSAGES:
            text = f"Messages are critical: the critical path waits {format_us(Fraction(path.waiting))} us for them"
            if path.edge is not None:
                source, target = path.edge
                longest = format_us(Fraction(path.messages[path.edge]))
                text += f", longest on the edge from rank {source} to rank {target} ({longest} us)"
            return f"{text}."
        case _:
            return (
                f"Rank {path.rank} is critical: the critical path computes there for "
                f"{format_us(Fraction(path.compute[path.rank]))} us, after a warm-up of "
                f"{format_us(Fraction(path.warm_up))} us and before a cool-down of "
                f"{format_us(Fraction(path.cool_down))} us."
            )


def why_better(advice: Advice, verified: Verified) -> str:
    """The gain of a candidate over the plan, and its reason."""
    name, figures = name_of(verified.candidate.spec), verified.candidate.figures
    if advice.present is None or advice.path is None:
        return f"{name} takes {format_us(figures.makespan_us)} us; the plan's own schedule never ends."
    saved = advice.present.makespan_us - figures.makespan_us
    now, then = idle_parts(advice.present, advice.path), idle_parts(figures, verified.path)
    changes = {
        "filling and draining the pipeline": now.fill - then.fill,
        "waiting for messages": now.messages - then.messages,
        "the busiest rank's overload": now.overload - then.overload,
        "computing, by what runs side by side": advice.present.work_us - figures.work_us,
    }
    gains = [f"{format_us(gain)} us of {part}" for part, gain in changes.items() if gain > 0]
    losses = [f"{format_us(-gain)} us more of {part}" for part, gain in changes.items() if gain < 0]
    share = percent(abs(saved) / advice.present.makespan_us)
    if saved > 0:
        text = f"{name} saves {format_us(saved)} us of {format_us(advice.present.makespan_us)} ({share})"
    elif saved == 0:
        text = f"{name} takes as long and holds less"
    else:
        text = f"{name} takes {format_us(-saved)} us longer ({share}) and fits the memory limit"
    if gains:
        text += f": {' and '.join(gains)}"
    if losses:
        text += f", against {' and '.join(losses)}" if gains else f": {' and '.join(losses)}"
    return text + "."


def why_receives(advice: Advice, other: OtherPost) -> str:
    """The plan with another `transport.recv_order`, in a sentence."""
    assert advice.present is not None, "what has such advice has run"
    longer = other.makespan_us - advice.present.makespan_us
    text = f"With transport.recv_order: {other.recv_order} the step takes "
    if longer:
        by = f"{format_us(abs(longer))} us {'more' if longer > 0 else 'less'}"
        text += f"{format_us(other.makespan_us)} us, {by} ({percent(abs(longer) / advice.present.makespan_us)})"
    else:
        text += "as long"
    if other.failing:
        return (
            f"{text}; it is then conditional: safe on {advice.backend}, a deadlock with {models_text(other.failing)}."
        )
    text += ", and is robust: no channel model makes it wait for itself."
    if not other.slowdown:
        text += " What receives that are under way cost your device is not known here (cost.recv_slowdown)."
    return text


def caveats(advice: Advice, verified: Verified) -> list[str]:
    """Conditions and costs of a candidate, in sentences."""
    result = []
    present, peak, unit = advice.present, verified.candidate.figures.peak, advice.candidates.activation
    if present is not None and peak > present.peak:
        result.append(
            f"It needs more memory: {format_us(peak / unit)} activations in place of {format_us(present.peak / unit)}."
        )
    if verified.failing:
        result.append(f"Conditional: safe on {advice.backend}, but it deadlocks with {models_text(verified.failing)}.")
    changes = advice.candidates.changes(verified.candidate.choice)
    if Changed.COPIES in changes:
        result.append(
            "Every stage is on two ranks: weights, their gradients and optimizer states are held twice, and the "
            "time to add up both gradients is not counted."
        )
    if advice.candidates.spec.cost.analytic is not None:
        if changes & {Changed.CHUNKS, Changed.MICRO_BATCHES, Changed.SPLITS}:
            result.append("Its times are computed anew from the device's data sheet.")
        return result
    if Changed.CHUNKS in changes:
        result.append("The time of a stage is assumed to be spread evenly over its layers, which are cut anew.")
    if changes & {Changed.MICRO_BATCHES, Changed.SPLITS}:
        result.append("Times are taken to be in proportion to tokens; kernels on small inputs take longer.")
    return result


def name_of(spec: PlanSpec) -> str:
    """A schedule with its chunks and splits."""
    schedule = spec.schedule
    parts: list[str] = [schedule.kind]
    if schedule.num_chunks > 1:
        parts.append(f"v={schedule.num_chunks}")
    if isinstance(schedule.placement, str):
        parts.append(schedule.placement)
    if schedule.num_sequence_splits > 1:
        parts.append(f"splits={schedule.num_sequence_splits}")
    if schedule.turns is not None:
        parts.append(f"overlap={schedule.overlap if isinstance(schedule.overlap, str) else ','.join(schedule.turns)}")
    return " ".join(parts)


def percent(share: Fraction) -> str:
    """A share of 1 in percent with one digit after the point."""
    return f"{float(100 * share):.1f} %"
