"""Where ``simulate -o`` writes a timeline: the suffix of the file says in which form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.line import writable

if TYPE_CHECKING:
    from pipeproof.schedule.optable import OpGraph
    from pipeproof.sim.timeline import Timeline


def timeline_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file of another form, or one that cannot be written, before any work is done for it."""
    if value is not None and value.suffix.lower() not in (".json", ".html"):
        raise click.BadParameter(
            f"{str(value)!r} ends neither in .html (a page) nor in .json (a Chrome/Perfetto trace)"
        )
    return writable(context, parameter, value)


def write_timeline(path: Path, title: str, timeline: Timeline, graph: OpGraph) -> str:
    """Write the file in the form that its suffix names; what to tell the user of it.

    Raises:
        OSError: the file cannot be written.
    """
    if path.suffix.lower() == ".html":
        from pipeproof.sim.html.page import write_html

        write_html([(title, timeline, graph)], path)
        return f"timeline written to {path}; open it in a browser"
    from pipeproof.sim.trace import write_trace

    write_trace(timeline, path)
    return f"trace written to {path}; open it in chrome://tracing or ui.perfetto.dev"
