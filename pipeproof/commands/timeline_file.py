"""Where ``simulate -o`` and ``run -o`` write a timeline: the suffix of the file says in which form."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from pipeproof.commands.line import writable

if TYPE_CHECKING:
    from pipeproof.schedule.optable import OpGraph
    from pipeproof.sim.memory.curve import MemoryCurve
    from pipeproof.sim.timeline import Timeline

FORMS: Mapping[str, str] = MappingProxyType(
    {
        ".html": "a page for a browser",
        ".json": "a Chrome trace",
        ".pftrace": "a Perfetto trace",
        ".csv": "a table",
        ".png": "a picture",
        ".svg": "a picture",
        ".pdf": "a picture",
    }
)
"""What is written, by suffix."""
_NEEDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {".pftrace": ("perfetto", "trace"), **dict.fromkeys((".png", ".svg", ".pdf"), ("matplotlib", "plot"))}
)
"""The package that a form needs, and the extra that brings it."""


def timeline_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file of another form, or one that cannot be written, before any work is done for it."""
    if value is None:
        return None
    suffix = value.suffix.lower()
    if suffix not in FORMS:
        forms = ", ".join(f"{end} ({what})" for end, what in FORMS.items())
        raise click.BadParameter(f"{str(value)!r} has another ending than {forms}")
    package, extra = _NEEDS.get(suffix, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise click.BadParameter(f"{FORMS[suffix]} ({suffix}) needs {package}: pip install 'pipeproof[{extra}]'")
    return writable(context, parameter, value)


def write_timeline(
    path: Path, title: str, timeline: Timeline, graph: OpGraph, memory: Sequence[MemoryCurve] = ()
) -> str:
    """Write the file in the form that its suffix names; what to tell the user of it.

    ``memory`` is what each rank holds, for pages, pictures and traces.

    Raises:
        OSError: the file cannot be written.
    """
    from pipeproof.sim.curves import memory_held

    curves = (memory_held(timeline, memory),) if memory else ()
    match path.suffix.lower():
        case ".html":
            from pipeproof.sim.html.page import write_html

            write_html([(title, timeline, graph, curves[0] if curves else None)], path)
            return f"timeline written to {path}; open it in a browser"
        case ".pftrace":
            from pipeproof.sim.perfetto import write_perfetto

            write_perfetto(timeline, path, graph, curves)
            return f"trace written to {path}; open it in ui.perfetto.dev"
        case ".csv":
            from pipeproof.sim.csv_file import write_csv

            rounded = write_csv(timeline, path, graph)
            note = f"; times of {rounded} have no end as decimals and are rounded to 9 digits" if rounded else ""
            return f"{len(timeline.spans)} operations written to {path}{note}"
        case ".json":
            from pipeproof.sim.trace import write_trace

            write_trace(timeline, path, curves)
            return f"trace written to {path}; open it in chrome://tracing or ui.perfetto.dev"
    from pipeproof.sim.picture import write_picture

    write_picture(timeline, path, title, curves)
    return f"picture written to {path}"
