"""What a plan's step takes, and whether it stays robust, if its receives are posted at another time.

An early receive may slow down what its rank computes beside it
(``cost.recv_slowdown``); one that is posted just in time may stand behind a
send that waits for it, where both share a FIFO. So there is something to say
of a plan that posts early and pays for it, and of one that deadlocks under
some channel model. At most two more plans are checked and timed for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from pipeproof.advice.figures import clock_of
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.sim.errors import SimulationError
from pipeproof.specs.load import LoadedPlan
from pipeproof.specs.receives import RecvPost
from pipeproof.verify.check import Report, check
from pipeproof.verify.deadlock.verdict import conditions

_LATER_IS_SAFER: tuple[RecvPost, ...] = ("one_ahead", "as_sent")


@dataclass(frozen=True, slots=True)
class OtherPost:
    """A plan that differs in ``transport.recv_post`` alone, and passed its check.

    ``failing`` are the channel models under which it deadlocks, all of them
    safe on the plan's backend; ``slowdown`` is ``cost.recv_slowdown``.
    """

    recv_post: RecvPost
    makespan_us: Fraction
    failing: tuple[ChannelModel, ...]
    slowdown: Fraction


def other_posts(loaded: LoadedPlan, report: Report, makespan_us: Fraction) -> tuple[OtherPost, ...]:
    """What posting receives at another time would change for the better, the fastest first.

    That is a shorter step than ``makespan_us``, just in time; or no deadlock
    under any channel model, as little ahead as that takes. ``report`` is of
    ``loaded``, without errors.
    """
    lowered, found = report.subject.plan, []
    if lowered.foreign is not None and not lowered.foreign.computes_only:
        return ()  # its receives stand where its file has them
    now = lowered.spec.transport.recv_post
    if now != "just_in_time" and _slowdown(lowered):
        other = _posted(loaded, "just_in_time")
        if other is not None and other.makespan_us < makespan_us:
            found.append(other)
    if conditions(report.subject):
        found += _robust(loaded, [post for post in _LATER_IS_SAFER if post != now])
    return tuple(found)


def _robust(loaded: LoadedPlan, posts: list[RecvPost]) -> list[OtherPost]:
    """The first of some that no channel model makes wait for itself."""
    for post in posts:
        other = _posted(loaded, post)
        if other is not None and not other.failing:
            return [other]
    return []


def _posted(loaded: LoadedPlan, recv_post: RecvPost) -> OtherPost | None:
    """The plan with its receives posted so; None if it fails."""
    transport = loaded.spec.transport.model_copy(update={"recv_post": recv_post})
    report = check(replace(loaded, spec=loaded.spec.model_copy(update={"transport": transport})))
    if report.errors:
        return None
    lowered = report.subject.plan
    try:
        clock = clock_of(lowered)
    except SimulationError:
        return None
    makespan_us = Fraction(clock.timed.makespan) / clock.ticks_per_us
    return OtherPost(recv_post, makespan_us, conditions(report.subject), _slowdown(lowered))


def _slowdown(lowered: LoweredPlan) -> Fraction:
    return lowered.spec.cost.recv_slowdown or Fraction(0)
