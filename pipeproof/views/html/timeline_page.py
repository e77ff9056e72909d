"""Writes the page: one HTML file with its style, its script and the data, which loads nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from pipeproof.atomic_write import write_output
from pipeproof.schedule.op_table import OpGraph
from pipeproof.sim.timeline import Timeline
from pipeproof.views.html.payload import CATEGORIES, payload
from pipeproof.views.memory_curves import Curve

Titled = (
    tuple[str, Timeline, OpGraph | None]
    | tuple[str, Timeline, OpGraph | None, Curve | None]
    | tuple[str, Timeline, OpGraph | None, Curve | None, float | None]
)
"""A timeline with its title; the graph that it is of, what its ranks hold and its MFU, where these are known."""

_SCRIPTS = ("data.js", "layout.js", "draw.js", "describe.js", "numbers.js", "app.js")
"""In the order in which they need each other; together they are one script."""


def timeline_html(timelines: Sequence[Titled]) -> str:
    """The text of the page, timelines above each other; the same bytes for the same timelines.

    Later timelines are compared with the first, op by op: same rank, step and text.

    Raises:
        ValueError: there is no timeline, or one has operations that its graph does not have.
    """
    if not timelines:
        raise ValueError("a page needs at least one timeline")
    parts = files(__package__)
    data = {"categories": CATEGORIES, "timelines": [payload(*titled) for titled in timelines]}
    script = "\n".join((parts / "page" / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return Template((parts / "page" / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(" / ".join(titled[0] for titled in timelines)),
        style=(parts / "page" / "page.css").read_text(encoding="utf-8"),
        script=script,
        # a browser ends a script at the first `</`, in strings too
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def write_html(timelines: Sequence[Titled], path: Path) -> None:
    """Write the page, overwriting what is there.

    Raises:
        OSError: the file cannot be written.
        ValueError: there is no timeline, or one has operations that its graph does not have.
    """
    write_output(path, timeline_html(timelines))
