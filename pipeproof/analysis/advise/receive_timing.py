"""Time and robustness of a plan with another ``transport.recv_order``.

An early receive may slow down the computations of its rank
(``cost.recv_slowdown``). A receive that is posted just in time may be queued
behind a send that waits for it, where both share a FIFO. So there is advice for
a plan that posts early and pays for it, and for one that deadlocks under some
channel model. At most two more plans are checked and timed for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from pipeproof.analysis.advise.schedule_figures import clock_of
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.sim.sim_codes import SimulationError
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.transport import RecvOrder
from pipeproof.verify.check_plan import Report, check
from pipeproof.verify.deadlock.deadlock_verdict import conditions

_LATER_IS_SAFER: tuple[RecvOrder, ...] = ("prefetch_one", "send_order")


@dataclass(frozen=True, slots=True)
class OtherPost:
    """A plan that differs in ``transport.recv_order`` alone, and passed its check.

    ``failing`` are the channel models under which it deadlocks, all of them
    safe on the plan's backend; ``slowdown`` is ``cost.recv_slowdown``.
    """

    recv_order: RecvOrder
    makespan_us: Fraction
    failing: tuple[ChannelModel, ...]
    slowdown: Fraction


def other_posts(loaded: LoadedPlan, report: Report, makespan_us: Fraction) -> tuple[OtherPost, ...]:
    """The better plans with another order of receives, fastest first.

    That is a shorter step than ``makespan_us``, just in time; or no deadlock
    under any channel model, as little ahead as that takes. ``report`` is of
    ``loaded``, without errors.
    """
    lowered, found = report.subject.plan, []
    if lowered.foreign is not None and not lowered.foreign.computes_only:
        return ()  # the order of its receives is that of its file
    now = lowered.spec.transport.recv_order
    if now != "just_in_time" and _slowdown(lowered):
        other = _posted(loaded, "just_in_time")
        if other is not None and other.makespan_us < makespan_us:
            found.append(other)
    if conditions(report.subject):
        found += _robust(loaded, [post for post in _LATER_IS_SAFER if post != now])
    return tuple(found)


def _robust(loaded: LoadedPlan, posts: list[RecvOrder]) -> list[OtherPost]:
    """The first of some that no channel model makes wait for itself."""
    for post in posts:
        other = _posted(loaded, post)
        if other is not None and not other.failing:
            return [other]
    return []


def _posted(loaded: LoadedPlan, recv_order: RecvOrder) -> OtherPost | None:
    """The plan with its receives posted so; None if it fails."""
    transport = loaded.spec.transport.model_copy(update={"recv_order": recv_order})
    report = check(replace(loaded, spec=loaded.spec.model_copy(update={"transport": transport})))
    if report.errors:
        return None
    lowered = report.subject.plan
    try:
        clock = clock_of(lowered)
    except SimulationError:
        return None
    makespan_us = Fraction(clock.timed.makespan) / clock.ticks_per_us
    return OtherPost(recv_order, makespan_us, conditions(report.subject), _slowdown(lowered))


def _slowdown(lowered: LoweredPlan) -> Fraction:
    return lowered.spec.cost.recv_slowdown or Fraction(0)
