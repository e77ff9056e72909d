"""Writes the tables of ``docs/tune.md`` from ``docs/tune.json``.

``python validation/pages/make_tune.py`` writes, ``--check`` exits 1 if a part is stale.
``benchmarks/tune_published.py`` makes the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages import DOCS, fill, main, table

from pipeproof.cost.devices import DEVICES

RESULTS = DOCS / "tune.json"
PAGE = DOCS / "tune.md"
_COMPARED = ("pp", "vpp", "tp", "cp", "ep", "mbs")
_MESH = ("pp", "tp", "cp", "ep")


def summary_part(trainings: Mapping[str, Any]) -> str:
    """Number of trainings in which the search is at least as good, and in which the published choice is listed."""
    rows = list(trainings.values())
    as_good = sum(row["rows"][0]["step_s"] <= row["published"]["step_s"] for row in rows)
    same, mesh = (sum(_place(row, names) is not None for row in rows) for names in (_COMPARED, _MESH))
    over = sum(row["published"]["peak_gib"] > _device_gib(row) for row in rows)
    return (
        f"- {as_good} of {len(rows)}: the first row is at least as fast as the published choice, by the same model.\n"
        f"- {same} of {len(rows)}: the published choice (PP, VPP, TP, CP, EP and micro-batch size) is one of the first "
        f"five rows; {mesh} of {len(rows)} with PP, TP, CP and EP alone.\n"
        f"- {over} of {len(rows)}: the published choice needs more memory by the model than the device has. Then the "
        "search has the limit that the published choice needs.\n"
    )


def trainings_part(trainings: Mapping[str, Any]) -> str:
    """Table of the published choice and the first row of each training."""
    header = (
        "training",
        "batch",
        "published",
        "step, s",
        "GiB",
        "first row",
        "step, s",
        "GiB",
        "published in the top 5",
    )
    return table(
        header,
        [
            (
                row["name"],
                f"{row['global_batch']:,}",
                _layout(row["published"]),
                f"{row['published']['step_s']:.2f}",
                f"{row['published']['peak_gib']:.0f}",
                _layout(row["rows"][0]),
                f"{row['rows'][0]['step_s']:.2f}",
                f"{row['rows'][0]['peak_gib']:.0f}",
                _place_text(row),
            )
            for row in trainings.values()
        ],
    )


def measured_part(trainings: Mapping[str, Any]) -> str:
    """Table of two published choices for the same training, measured and predicted."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in trainings.values():
        groups.setdefault((row["name"], row["global_batch"]), []).append(row)
    lines = []
    for (name, _), rows in groups.items():
        for index, one in enumerate(rows):
            for other in rows[index + 1 :]:
                first, second = (sum(row["measured"]) / len(row["measured"]) for row in (one, other))
                predicted = other["published"]["step_s"] / one["published"]["step_s"]
                lines.append(
                    (
                        name,
                        _layout(one["published"]),
                        _layout(other["published"]),
                        f"{first / second - 1:+.1%}",
                        f"{predicted - 1:+.1%}",
                        "yes" if (first > second) == (predicted > 1) else "no",
                    )
                )
    header = ("training", "first choice", "second choice", "first is faster, measured", "predicted", "same order")
    return table(header, lines) if lines else "No training in the results was published with two choices.\n"


def _place(row: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The place of the published choice among the rows, from 1; None if it is not listed."""
    wanted = [row["published"][name] for name in names]
    places = (place for place, found in enumerate(row["rows"], 1) if [found[name] for name in names] == wanted)
    return next(places, None)


def _place_text(row: Mapping[str, Any]) -> str:
    place, mesh = _place(row, _COMPARED), _place(row, _MESH)
    if place is not None:
        return f"row {place}"
    return "no" if mesh is None else f"its mesh, row {mesh}"


def _layout(layout: Mapping[str, Any]) -> str:
    names = [f"{name.upper()} {layout[name]}" for name in _COMPARED if layout[name] > 1 or name == "mbs"]
    return ", ".join(names)


def _device_gib(row: Mapping[str, Any]) -> int:
    return next(device.memory_gib for name, device in DEVICES.items() if name == row["device"])


def pages(results: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page by its file."""
    trainings = results["trainings"]
    parts = {"summary": summary_part, "trainings": trainings_part, "measured": measured_part}
    return {PAGE: fill(PAGE, {name: make(trainings) for name, make in parts.items()})}


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_tune.py", pages(json.loads(RESULTS.read_text(encoding="utf-8")))))
