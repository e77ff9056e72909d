"""Simulation of a lowered plan: predicted timeline and figures, their JSON form, and step times for many durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.backends import declared_backend
from pipeproof.comm.channel_models import ChannelModel, declared_model
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.step_error import StepError
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.columns import HOST_QUEUE
from pipeproof.schedule.formats.op_text import op_texts
from pipeproof.schedule.op_table import NONE, EdgeKind, OpGraph
from pipeproof.sim.fast_engine import NotTimedError, run_fast
from pipeproof.sim.longest_paths import COMPILED_ABOVE
from pipeproof.sim.memory_curve import MemoryCurve
from pipeproof.sim.op_durations import Durations, durations_of
from pipeproof.sim.outcome import NOT_FAST, Outcome, refuse_unfinished
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.step_memory import memory_of
from pipeproof.sim.timeline import (
    COMPUTE_QUEUE,
    RankFigures,
    Span,
    Timeline,
    figures_of,
    figures_of_times,
    figures_to_json,
    makespan_of_times,
    number_to_json,
)
from pipeproof.specs.cost import CostSource

Engine = Literal["auto", "fast", "simpy"]


@dataclass(frozen=True)
class Simulation:
    """One simulated step: its timeline, the figures of each rank, and the makespan in exact microseconds.

    ``p2p`` is the plan's ``cost.p2p``, ``send_completes`` the send semantics that
    it resolved to, ``engine`` the engine that gave the times.
    """

    figures: tuple[RankFigures, ...]
    makespan: Fraction
    p2p: str
    send_completes: str
    engine: Literal["fast", "simpy"]
    make_timeline: Callable[[], Timeline] = field(repr=False, compare=False)
    make_memory: Callable[[], tuple[MemoryCurve, ...]] = field(repr=False, compare=False)

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline with a span for each operation, built on first use."""
        return self.make_timeline()

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Memory of each rank over time, in bytes, built on first use."""
        return self.make_memory()


def simulate(lowered: LoweredPlan, backend: BackendTable | None = None, *, engine: Engine = "auto") -> Simulation:
    """Time one step of a plan's graph. Linear in operations, except sorting.

    ``backend`` is used if ``cost.p2p`` is ``backend``; the default is the table
    of the backend that the plan declares.

    ``engine`` is ``fast`` (longest paths over columns), ``simpy`` (the
    reference model) or ``auto``: the fast engine, and SimPy for plans that it
    does not support. Both give the same times to the last tick.

    Raises:
        SimulationError: the program cannot finish.
        BadPlanAtError: ``engine`` is ``fast``, and only the reference model supports this plan; or a stage's time is
            shorter than its collectives.
        ValueError: there is no such engine.
    """
    if engine not in ("auto", "fast", "simpy"):
        raise ValueError(f"engine {engine!r} is not auto, fast or simpy")
    model = channel_model_of(lowered, backend)
    durations = durations_of(lowered)
    if engine == "simpy":
        return _by_model(lowered, durations, model)
    try:
        return _by_longest_paths(lowered, durations, model)
    except NotTimedError as reason:
        by_model = _by_model(lowered, durations, model)  # its error names the operations that never end
        if engine == "fast":
            message = f"the fast engine does not support this plan: {reason}"
            finding = NOT_FAST.finding(message, help="use the engine `auto` or `simpy`")
            raise BadPlanAtError(finding, ("cost",)) from reason
        return by_model


def _by_longest_paths(lowered: LoweredPlan, durations: Durations, model: ChannelModel) -> Simulation:
    graph, ticks_per_us = lowered.graph, durations.ticks_per_us
    times = run_fast(graph, durations, model)
    return Simulation(
        figures_of_times(graph, times, ticks_per_us, _coords(lowered)),
        makespan_of_times(times, ticks_per_us),
        lowered.spec.cost.p2p,
        model.completes,
        "fast",
        lambda: _timeline(lowered, durations, times.outcome(graph)),
        lambda: memory_of(lowered, times.starts, times.ends, ticks_per_us),
    )


def _by_model(lowered: LoweredPlan, durations: Durations, model: ChannelModel) -> Simulation:
    outcome = run_model(lowered.graph, durations, model)
    refuse_unfinished(lowered.graph, outcome)
    timeline = _timeline(lowered, durations, outcome)
    p2p = lowered.spec.cost.p2p
    return Simulation(
        figures_of(timeline),
        timeline.makespan_us,
        p2p,
        model.completes,
        "simpy",
        make_timeline=lambda: timeline,
        make_memory=lambda: memory_of(lowered, outcome.starts, outcome.ends, durations.ticks_per_us),
    )


def _coords(lowered: LoweredPlan) -> tuple[Mapping[str, int], ...]:
    return tuple(lowered.mesh.coords(rank) for rank in lowered.graph.global_rank)


def _timeline(lowered: LoweredPlan, durations: Durations, outcome: Outcome) -> Timeline:
    return Timeline(
        spans=spans_of(lowered.graph, durations, outcome),
        ranks=_coords(lowered),
        matches=tuple((send, receive) for send, receive in lowered.graph.edges[EdgeKind.MATCH].tolist()),
    )


def channel_model_of(lowered: LoweredPlan, backend: BackendTable | None = None) -> ChannelModel:
    """Channel model of a plan's transfers; connections are open before the step."""
    p2p = lowered.spec.cost.p2p
    if p2p == "async":
        return ChannelModel("directed_edge", "eager")
    if p2p == "rendezvous":
        return ChannelModel("directed_edge", "rendezvous")
    return declared_model(backend if backend is not None else declared_backend(lowered.spec))


def spans_of(graph: OpGraph, durations: Durations, outcome: Outcome) -> tuple[Span, ...]:
    """Spans of a finished outcome in microseconds, in order of op ids."""

    @cache
    def us(ticks: int) -> Fraction:
        """Exact microseconds, cached: many operations start and end together."""
        return Fraction(ticks, durations.ticks_per_us)

    texts = op_texts(graph.columns)
    by_op = zip(texts, graph.rank.tolist(), _queue_labels(graph), outcome.starts, outcome.ends, strict=True)
    spans = []
    for op_id, (text, rank, queue, start, end) in enumerate(by_op):
        assert start is not None
        assert end is not None
        spans.append(Span(rank, queue, op_id, text, us(start), us(end)))
    return tuple(spans)


def _queue_labels(graph: OpGraph) -> list[str]:
    """Queue label by op id: the named queue, else the channel of a transfer, else the compute queue."""
    channels = {NONE: COMPUTE_QUEUE, **{number: str(channel) for number, channel in enumerate(graph.channels)}}
    labels = [channels[channel] for channel in graph.channel.tolist()]
    for op_id in np.flatnonzero(graph.queue > HOST_QUEUE).tolist():
        labels[op_id] = graph.queues[int(graph.queue[op_id])]
    return labels


def simulation_to_json(
    simulation: Simulation, cost_source: CostSource, error: StepError | None = None
) -> dict[str, Any]:
    """The output of ``simulate --format json``; see ``docs/schemas/simulate.schema.json``.

    ``cost_source`` is the source in the plan file: a lowered plan only has explicit times. ``error`` has the errors of
    comparable measured steps.

    Times are in ``unit``. A whole number is a JSON integer. For a fraction
    without an exact binary form, an additional key with the suffix ``_exact``
    holds ``"numerator/denominator"``.
    """
    interval: dict[str, Any] | None = None
    if error is not None:
        low, high = error.interval(float(simulation.makespan))
        interval = {"low": low, "high": high, "kind": error.kind, "num_rows": error.num_rows}
    return {
        **number_to_json("makespan", simulation.makespan),
        "unit": "us",
        "cost_source": cost_source,
        **({"interval": interval} if cost_source == "analytic" else {}),
        "p2p": simulation.p2p,
        "send_completes": simulation.send_completes,
        "engine": simulation.engine,
        "ranks": [
            {
                "rank": figures.rank,
                "coords": dict(figures.coords),
                **figures_to_json(figures),
                "memory": {
                    "peak_bytes": curve.peak,
                    **number_to_json("peak_at", curve.peak_at_us),
                    **{f"{part}_bytes": num_bytes for part, num_bytes in curve.make_up.items()},
                },
            }
            for figures, curve in zip(simulation.figures, simulation.memory, strict=True)
        ],
    }


class StepTimer:
    """Times one graph repeatedly: by longest paths, or by the reference model if these do not apply.

    ``num_runs`` is the number of expected calls; many of them are compiled if numba is installed.
    """

    def __init__(self, graph: OpGraph, model: ChannelModel, num_runs: int) -> None:
        self._graph, self._model = graph, model
        # Compiling pays once all runs together have as many operations as one graph for which it pays.
        self._compiled = num_runs * graph.num_ops > COMPILED_ABOVE and find_spec("numba") is not None

    def makespan(self, durations: Durations) -> Fraction:
        """From the first start to the last end, in microseconds.

        Raises:
            SimulationError: the program cannot finish.
        """
        try:
            times = run_fast(self._graph, durations, self._model, compiled=self._compiled)
        except NotTimedError:
            outcome = run_model(self._graph, durations, self._model)
            refuse_unfinished(self._graph, outcome)
            starts = [start for start in outcome.starts if start is not None]
            ends = [end for end in outcome.ends if end is not None]
            return Fraction(max(ends) - min(starts), durations.ticks_per_us)
        return makespan_of_times(times, durations.ticks_per_us)
