"""The option ``-o`` of ``simulate`` and ``run``: a timeline in the format of the file's suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import writable

if TYPE_CHECKING:
    from pipeproof.schedule.op_table import OpGraph
    from pipeproof.sim.memory_curve import MemoryCurve
    from pipeproof.sim.timeline import Timeline
    from pipeproof.specs.plan import PlanSpec

FORMS: Mapping[str, str] = MappingProxyType(
    {
        ".html": "a page for a browser",
        ".json": "a Chrome trace",
        ".svg": "a picture",
    }
)
"""Formats by suffix."""


def timeline_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file of another format, or one that cannot be written, before any work is done."""
    if value is None:
        return None
    suffix = value.suffix.lower()
    if suffix not in FORMS:
        forms = ", ".join(f"{end} ({form})" for end, form in FORMS.items())
        raise click.BadParameter(f"{str(value)!r} has another ending than {forms}")
    return writable(context, parameter, value)


def _sizes(plan: PlanSpec) -> str:
    """The schedule of a plan, its axes with more than one rank and its micro-batches, in words."""
    schedule, topology = plan.schedule, plan.topology
    own = schedule.path is not None or schedule.programs is not None
    axes = [f"{axis} {getattr(topology, axis)}" for axis in reversed(topology.order) if getattr(topology, axis) > 1]
    number = schedule.num_micro_batches
    batches = f"{number} micro-batch{'' if number == 1 else 'es'}"
    return ", ".join(["own schedule" if own else schedule.kind, *axes, batches])


def write_timeline(
    path: Path,
    title: str,
    timeline: Timeline,
    graph: OpGraph,
    memory: Sequence[MemoryCurve] = (),
    *,
    plan: PlanSpec | None = None,
) -> str:
    """Write the file in the format of its suffix, and return a message for the user.

    ``memory`` has the curve of each rank, for pages and traces. ``plan``, as it was read, adds a note on
    placeholder times to the title or the trace, and to a page its sizes, and its MFU where its devices are known.

    Raises:
        OSError: the file cannot be written.
    """
    from pipeproof.views.memory_curves import memory_held

    curves = (memory_held(timeline, memory),) if memory else ()
    note = f" ({plan.placeholder_note})" if plan is not None and plan.placeholder_note else ""
    match path.suffix.lower():
        case ".html":
            from pipeproof.cost.devices import model_flops_utilization
            from pipeproof.views.html.timeline_page import timeline_html

            mfu = None if plan is None else model_flops_utilization(plan, timeline.makespan_us)
            sizes = "" if plan is None else f": {_sizes(plan)}"
            titled = f"{title}{sizes}{note}"
            write_output(path, timeline_html(titled, timeline, graph, curves[0] if curves else None, mfu))
            return f"timeline written to {path}; open it in a browser"
        case ".json":
            from pipeproof.views.chrome_trace import write_trace

            about = {} if plan is None else {"cost_source": plan.cost_source, "note": plan.placeholder_note}
            write_trace(timeline, path, curves, {key: text for key, text in about.items() if text})
            return f"trace written to {path}; open it in chrome://tracing or ui.perfetto.dev"
    from pipeproof.views.schedule_svg import schedule_svg, timed_of

    write_output(path, schedule_svg(timed_of(timeline), f"{title}{note}", in_us=True))
    return f"picture written to {path}"
