"""``pipeproof.simulate``: the predicted step of a plan, with its timeline, records and a page."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pipeproof.api.given_plan import GivenPlan, Settings, load_given, name_of
from pipeproof.api.result import Records, Result, html_table, noted
from pipeproof.atomic_write import write_output
from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.generated_schedule import sample_plan
from pipeproof.comm.lower import blaming_plan, lower_loaded
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.step_error import StepError, step_error_of
from pipeproof.diagnostics.units import size_text, time_text
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.sim.simulate import Engine, Simulation, simulation_to_json
from pipeproof.sim.simulate import simulate as simulate_lowered
from pipeproof.sim.timeline import Timeline
from pipeproof.specs.cost import CostSource
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.check_plan import require_whole_step
from pipeproof.views.schedule_svg import schedule_svg, timed_of

MOST_RANKS, MOST_OPS = 32, 4000
"""Ranks and computations that a picture shows."""


def timeline_image(timeline: Timeline, title: str) -> str:
    """Return an ``<img>`` of the computations of one replica's pipeline ranks; a sentence if they are too many."""
    timed = timed_of(timeline)
    if len(timed.programs) > MOST_RANKS or sum(map(len, timed.programs)) > MOST_OPS:
        return "<p>The timeline is too large for a picture here: <code>save('timeline.html')</code> writes it.</p>"
    picture = b64encode(schedule_svg(timed, title, in_us=True).encode()).decode()
    return f'<img alt="{escape(title)}: timeline" src="data:image/svg+xml;base64,{picture}"/>'


_GIB = 2**30


@dataclass(frozen=True, repr=False)
class SimulateResult(Simulation, Result):
    """Result of ``simulate``: the step, with the tables ``ranks`` and ``ops``; times in microseconds.

    ``makespan`` and the figures of ``figures`` are exact; ``makespan_us`` and ``idle_ratio`` are floats.
    """

    name: str = "plan"
    plan: LoweredPlan = field(kw_only=True, compare=False)
    cost_source: CostSource = field(kw_only=True)
    error: StepError | None = field(kw_only=True, default=None)
    """Errors of comparable measured steps, with the interval of this one; None without, or for given times."""
    note: str = field(kw_only=True)
    """A sentence about times that the plan leaves out; empty if it gives all."""

    @property
    def makespan_us(self) -> float:
        """Time of the step in microseconds."""
        return float(self.makespan)

    @property
    def idle_ratio(self) -> float:
        """Part of all ranks' time within the makespan in which they do not compute."""
        return float(sum(own.bubble_makespan_ratio for own in self.figures) / len(self.figures))

    @property
    def _title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    def __repr__(self) -> str:
        """Return the makespan, the idle time, the largest memory peak, and a note about times."""
        peak = max(curve.peak for curve in self.memory)
        return (
            f"<simulate: {self.name}, {len(self.figures)} ranks, {time_text(self.makespan_us)}, "
            f"{self.idle_ratio:.1%} idle, {size_text(peak)} at most{noted(self.note)}>"
        )

    def _dict(self) -> dict[str, Any]:
        return simulation_to_json(self, self.cost_source, self.error)

    def _tables(self) -> dict[str, Records]:
        timeline = self.timeline
        ranks = [
            {
                "rank": own.rank,
                **own.coords,
                "busy_us": own.busy_us,
                "bubble_us": own.bubble_makespan_us,
                "bubble_ratio": own.bubble_makespan_ratio,
                "peak_activations": own.peak_activations,
                "peak_gib": curve.peak / _GIB,
            }
            for own, curve in zip(self.figures, self.memory, strict=True)
        ]
        ops = [
            {
                "rank": span.rank,
                "queue": span.queue,
                "op": span.op,
                "start_us": timeline.us(span.start),
                "end_us": timeline.us(span.end),
            }
            for span in timeline.spans
        ]
        return {"ranks": ranks, "ops": ops}

    def _parts(self) -> Iterator[str]:
        yield f"<p><b>{time_text(self.makespan_us)}</b>, {self.idle_ratio:.1%} idle. {self.note}</p>"
        yield timeline_image(self.timeline, self.name)
        yield html_table(self.to_records("ranks"), "ranks, in microseconds and GiB")

    def to_html(self) -> str:
        """Return the timeline as a page for a browser, to zoom and to ask for causes."""
        from pipeproof.views.html.timeline_page import timeline_html
        from pipeproof.views.memory_curves import memory_held

        curve = memory_held(self.timeline, self.memory)
        return timeline_html(self._title, self.timeline, self.plan.graph, curve)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the timeline as ``.html`` or ``.svg``, figures as ``.json``.

        Raises:
            OSError: the file cannot be written.
            ValueError: the name has another ending.
        """
        if Path(path).suffix.lower() == ".svg":
            write_output(Path(path), schedule_svg(timed_of(self.timeline), self._title, in_us=True))
            return Path(path)
        return super().save(path)


def simulate(
    plan: GivenPlan | LoweredPlan,
    backend: BackendTable | None = None,
    *,
    engine: Engine = "auto",
    settings: Settings | None = None,
) -> SimulateResult:
    """Predict one step of a plan: its timeline, bubbles and memory.

    Args:
        plan: A path, a dict, a ``PlanSpec``, a loaded plan, or a lowered plan.
        backend: The backend table for the semantics of sends with ``cost.p2p: backend``; by default the plan's.
        engine: ``fast`` (longest paths), ``simpy`` (the reference model) or ``auto``; the times are the same.
        settings: Values by dotted key, which replace the plan's; not for a lowered plan.

    Raises:
        BadPlanError: it is not a valid plan, cannot be lowered, or the engine does not support it.
        SimulationError: the step cannot finish, or the plan's own schedule is not a whole step.
        ValueError: there is no such engine, or settings are given for a lowered plan.
    """
    if isinstance(plan, LoweredPlan):
        if settings:
            raise ValueError("settings are for a plan, and this one is lowered already")
        require_whole_step(plan, None)
        return _result(simulate_lowered(plan, backend, engine=engine), plan, plan.spec, "plan")
    loaded = load_given(plan, settings)
    with blaming_plan(loaded):
        lowered = lower_loaded(loaded)
        require_whole_step(lowered, loaded.source)
        simulation = simulate_lowered(lowered, backend, engine=engine)
    return _result(simulation, lowered, loaded.spec, name_of(plan))


def make_schedule(
    kind: str, num_ranks: int, num_micro_batches: int, *, num_chunks: int | None = None, **keys: Any
) -> SimulateResult:
    """Make a schedule by its kind, and its timeline with equal stages: F, I and W take 1 us, messages nothing.

    Args:
        kind: A name of ``pipeproof schedule list``.
        num_ranks: Pipeline ranks.
        num_micro_batches: Micro-batches of a step.
        num_chunks: Stages on each rank; by default the fewest that the kind has.
        keys: Further keys of a plan's schedule section, such as ``variant``.

    Raises:
        BadPlanError: there is no such kind, or it does not exist for these sizes.
    """
    schedule_kind = SCHEDULE_KINDS.get(kind)
    fewest = 1 if schedule_kind is None else schedule_kind.min_chunks
    loaded = sample_plan(kind, num_ranks, num_micro_batches, num_chunks=num_chunks or fewest, **keys)
    lowered = lower_loaded(loaded)
    return _result(simulate_lowered(lowered), lowered, loaded.spec, kind)


def _result(simulation: Simulation, plan: LoweredPlan, spec: PlanSpec, name: str) -> SimulateResult:
    fields = {key: value for key, value in vars(simulation).items() if key not in ("timeline", "memory")}
    return SimulateResult(
        **fields,
        name=name,
        plan=plan,
        cost_source=spec.cost_source,
        error=step_error_of(spec),
        note=spec.placeholder_note,
    )
