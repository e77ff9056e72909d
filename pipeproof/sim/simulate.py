"""From a lowered plan to its predicted timeline and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import Literal

from pipeproof.comm.capabilities import BackendTable, declared_backend
from pipeproof.comm.lower import LoweredPlan
from pipeproof.schedule.optable import NONE, EdgeKind, OpGraph
from pipeproof.sim.costs import Durations, durations_of
from pipeproof.sim.errors import NOT_FAST, NOT_SIMULATED, refuse_unfinished
from pipeproof.sim.fast import NotTimedError, run_fast
from pipeproof.sim.fast_figures import figures_of_times, makespan_of_times
from pipeproof.sim.figures import RankFigures, figures_of
from pipeproof.sim.model import Outcome, TransferRules, run_model
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Timeline
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity

Engine = Literal["auto", "fast", "simpy"]


@dataclass(frozen=True)
class Simulation:
    """One simulated step: its timeline, the figures of each rank, and the makespan in exact microseconds.

    ``p2p`` is ``cost.p2p`` as the plan has it, ``send_completes`` what it came
    to, ``engine`` what gave the times.
    """

    figures: tuple[RankFigures, ...]
    makespan: Fraction
    p2p: str
    send_completes: str
    engine: Literal["fast", "simpy"]
    make_timeline: Callable[[], Timeline] = field(repr=False, compare=False)

    @cached_property
    def timeline(self) -> Timeline:
        """What ran when, made when it is first asked for: a span for each operation."""
        return self.make_timeline()


def simulate(lowered: LoweredPlan, backend: BackendTable | None = None, *, engine: Engine = "auto") -> Simulation:
    """Time one step of a plan's graph. Linear in operations, but for sorting.

    ``backend`` is read where ``cost.p2p`` is ``backend``; without it, the
    table of the backend that the plan declares.

    ``engine`` is ``fast`` (longest paths over columns), ``simpy`` (the
    reference model) or ``auto``: fast, and SimPy where that does not apply.
    Both give the same times to the last tick.

    Raises:
        SimulationError: the program cannot finish.
        BadPlanAtError: the backend's sends or queues are of a kind that is not simulated; or ``engine`` is ``fast``,
            and only the reference model times this plan.
        ValueError: there is no such engine.
    """
    if engine not in ("auto", "fast", "simpy"):
        raise ValueError(f"engine {engine!r} is not auto, fast or simpy")
    send_completes, rules = _transfer_rules(lowered, backend)
    durations = durations_of(lowered.graph, lowered.spec.cost)
    if engine == "simpy":
        return _by_model(lowered, durations, rules, send_completes)
    try:
        return _by_longest_paths(lowered, durations, rules, send_completes)
    except NotTimedError as reason:
        by_model = _by_model(lowered, durations, rules, send_completes)  # it words what never ends
        if engine == "fast":
            message = f"the fast engine does not time this plan: {reason}"
            mend = "leave the engine to `auto`, or choose `simpy`"
            raise BadPlanAtError(Finding(NOT_FAST.code, Severity.ERROR, message, help=mend), ("cost",)) from reason
        return by_model


def _by_longest_paths(
    lowered: LoweredPlan, durations: Durations, rules: TransferRules, send_completes: str
) -> Simulation:
    graph, ticks_per_us = lowered.graph, durations.ticks_per_us
    times = run_fast(graph, durations, rules)
    return Simulation(
        figures_of_times(graph, times, ticks_per_us, _coords(lowered)),
        makespan_of_times(times, ticks_per_us),
        lowered.spec.cost.p2p,
        send_completes,
        "fast",
        lambda: _timeline(lowered, durations, times.outcome(graph)),
    )


def _by_model(lowered: LoweredPlan, durations: Durations, rules: TransferRules, send_completes: str) -> Simulation:
    outcome = run_model(lowered.graph, durations, rules)
    refuse_unfinished(lowered.graph, outcome)
    timeline = _timeline(lowered, durations, outcome)
    p2p = lowered.spec.cost.p2p
    return Simulation(
        figures_of(timeline), timeline.makespan_us, p2p, send_completes, "simpy", make_timeline=lambda: timeline
    )


def _coords(lowered: LoweredPlan) -> tuple[Mapping[str, int], ...]:
    return tuple(lowered.mesh.coords(rank) for rank in lowered.graph.global_rank)


def _timeline(lowered: LoweredPlan, durations: Durations, outcome: Outcome) -> Timeline:
    return Timeline(
        spans=spans_of(lowered.graph, durations, outcome),
        ranks=_coords(lowered),
        matches=tuple((send, receive) for send, receive in lowered.graph.edges[EdgeKind.MATCH].tolist()),
    )


def _transfer_rules(lowered: LoweredPlan, backend: BackendTable | None) -> tuple[str, TransferRules]:
    """(how sends complete, by the words of the backend tables; the rules of the model)."""
    p2p = lowered.spec.cost.p2p
    if p2p == "async":
        return "eager", TransferRules(rendezvous=False)
    if p2p == "rendezvous":
        return "rendezvous", TransferRules(rendezvous=True)
    table = backend if backend is not None else declared_backend(lowered.spec)
    if table.send_completes == "slots" or table.queue != "directed_edge":
        message = f"{table.name} (send_completes {table.send_completes}, queue {table.queue}) is not simulated"
        mend = "set cost.p2p to async or rendezvous"
        raise BadPlanAtError(Finding(NOT_SIMULATED.code, Severity.ERROR, message, help=mend), ("cost", "p2p"))
    rendezvous = table.send_completes == "rendezvous"
    return table.send_completes, TransferRules(rendezvous, table.host_blocks_on_post)


def spans_of(graph: OpGraph, durations: Durations, outcome: Outcome) -> tuple[Span, ...]:
    """The spans of a finished outcome in microseconds, in order of op ids."""

    @cache
    def us(ticks: int) -> Fraction:
        """Many operations begin and end together."""
        return Fraction(ticks, durations.ticks_per_us)

    queues = {NONE: COMPUTE_QUEUE, **{number: str(channel) for number, channel in enumerate(graph.channels)}}
    by_op = zip(graph.ops, graph.rank.tolist(), graph.channel.tolist(), outcome.starts, outcome.ends, strict=True)
    spans = []
    for op_id, (op, rank, channel, start, end) in enumerate(by_op):
        assert start is not None
        assert end is not None
        spans.append(Span(rank, queues[channel], op_id, str(op), us(start), us(end)))
    return tuple(spans)
