"""The page on which a schedule is changed and timed in the browser: one HTML file that loads nothing from anywhere.

Its scripts generate schedules, lower them to rows, time these and look for
deadlocks, as the packages ``schedule``, ``comm``, ``sim`` and ``verify`` do.
The tables of these packages are written into the page.
"""

from __future__ import annotations

import json
from importlib.resources import files
from string import Template
from typing import Any

from pipeproof.comm.channel_models import MODELS, queue_text
from pipeproof.schedule.kinds import SCHEDULE_KINDS, VARIANTS

LEFT_OUT = ("seq1f1b", "optimal")
"""Kinds of schedules that the page does not offer: sequence splits, and orders that a search finds for given times."""

_SCRIPTS = ("schedules.js", "programs.js", "engine.js", "settings.js", "picture.js", "controls.js")
"""In the order in which they need each other; together they are one script."""


def play_html() -> str:
    """Return the text of the page; the same bytes each time."""
    folder, units = files(__package__) / "page", files("pipeproof.views.html") / "page" / "units.js"
    return Template((folder / "play.html").read_text(encoding="utf-8")).substitute(
        style=(folder / "play.css").read_text(encoding="utf-8"),
        script="\n".join(part.read_text(encoding="utf-8") for part in (units, *(folder / name for name in _SCRIPTS))),
        data=json.dumps(_tables(), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _tables() -> dict[str, Any]:
    """The kinds of schedules and the channel models, in the form that the scripts read."""
    kinds = [
        {
            "name": kind.name,
            "title": kind.title,
            "source": kind.source,
            "minChunks": kind.min_chunks,
            "maxChunks": kind.max_chunks,
            "variants": kind.variants,
        }
        for kind in SCHEDULE_KINDS.values()
        if kind.name not in LEFT_OUT
    ]
    models = [
        {
            "model": {
                "number": number,
                "queue": model.queue,
                "queueText": queue_text(model.queue),
                "completes": model.completes,
                "slots": model.slots,
                "eagerBytes": model.eager_bytes,
                "text": model.completion_text,
            },
            "coversTo": [other for other, weaker in enumerate(MODELS) if model.covers(weaker)],
        }
        for number, model in enumerate(MODELS)
    ]
    return {"kinds": kinds, "variants": VARIANTS, "leftOut": LEFT_OUT, "models": models}
