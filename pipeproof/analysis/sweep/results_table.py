"""The results of a sweep for people, as a table, and for programs, as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeproof.analysis.sweep.evaluate_point import PointResult, Status
from pipeproof.analysis.sweep.sweep_points import Sweep
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.units import time_text

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of figures: its value where there is one, by which results are sorted, and how people read it."""

    title: str
    value: Callable[[PointResult], Fraction | int | None]
    text: Callable[[Fraction], str]


def _percent(ratio: Fraction) -> str:
    return f"{float(ratio):.1%}"


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "makespan": Figure("makespan", lambda result: result.makespan, time_text),
        "sequence": Figure("per sequence", lambda result: result.sequence, time_text),
        "idle": Figure("idle", lambda result: result.idle_ratio, _percent),
        "most_idle": Figure("most idle", lambda result: result.most_idle_ratio, _percent),
        "peak": Figure("peak", lambda result: result.peak_activations, str),
    }
)
"""The columns of figures by their names in options; smaller is better for all."""

_SHOWN = ("makespan", "sequence", "idle", "peak")
_MOST_REFUSALS = 8


def best_first(results: Sequence[PointResult], by: str) -> list[PointResult]:
    """The results that have figures, sorted by one of them; equal ones stay in order."""
    value = FIGURES[by].value
    keyed = [(number, result) for result in results if (number := value(result)) is not None]
    return [result for _, result in sorted(keyed, key=lambda pair: pair[0])]


def render_table(sweep: Sweep, results: Sequence[PointResult], console: Console, *, sort: str, top: int) -> None:
    """Print the best points, then the reasons of points without figures."""
    from pipeproof.views.tables import print_table

    columns = [*sweep.keys, *dict.fromkeys((sort, *_SHOWN))]

    ranked = best_first(results, sort)
    if ranked:
        headings = [f">{FIGURES[key].title}" if key in FIGURES else _short(key, sweep.keys) for key in columns]
        rows = [[_cell(result, column) for column in columns] for result in ranked[:top]]
        console.print(f"best by {sort}: {min(top, len(ranked))} of {len(results)} points", soft_wrap=True)
        others = [FIGURES[key].title for key in reversed(columns) if key in FIGURES and key != sort]
        print_table(headings, rows, console, optional=others)
        if sweep.placeholder_note:
            console.print(sweep.placeholder_note, soft_wrap=True)
    warned = Counter(code for result in ranked for code in result.warnings)
    for code, number in sorted(warned.items()):
        console.print(f"warning {code}: {number} of {len(ranked)}; `pipeproof --explain {code}`", soft_wrap=True)
    _render_refusals([result for result in results if result.status is not Status.OK], console)


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key, where no other key of the sweep ends with it."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _cell(result: PointResult, column: str) -> str:
    figure = FIGURES.get(column)
    if figure is None:
        return setting_text(result.settings[column]) if column in result.settings else "-"
    value = figure.value(result)
    assert value is not None  # it is ranked
    return figure.text(Fraction(value))


def setting_text(value: Any) -> str:
    """A value of a plan key in few characters."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {setting_text(inner)}" for key, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _render_refusals(refused: Sequence[PointResult], console: Console) -> None:
    """A line for each code or kind of failure, with the first point that has it."""
    groups = grouped(((result.status, result.code or ""), result) for result in refused)
    for (status, code), group in list(groups.items())[:_MOST_REFUSALS]:
        first = group[0]
        settings = ", ".join(f"{key}={setting_text(value)}" for key, value in first.settings.items())
        line = f"{status} {code}".rstrip() + f": {len(group)}; first {settings}: {first.message}"
        console.print(line, soft_wrap=True, markup=False)
    if len(groups) > _MOST_REFUSALS:
        console.print(f"and {len(groups) - _MOST_REFUSALS} more kinds; `--format json` has them all")


def sweep_to_json(sweep: Sweep, results: Sequence[PointResult]) -> dict[str, Any]:
    """The form of ``sweep --format json``; see ``docs/schemas/sweep.schema.json``. Points are in the sweep's order."""
    return {
        "unit": "us",
        "cost_source": sweep.cost_source,
        "keys": list(sweep.keys),
        "num_points": len(sweep.points),
        "points": [result.to_json() for result in results],
    }
