"""A picture of a sweep: one figure over one numeric key, a line for each choice of the others (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeproof.analysis.sweep.evaluate_point import PointResult
from pipeproof.analysis.sweep.results_table import FIGURES, best_first, setting_text, settings_text
from pipeproof.analysis.sweep.sweep_file import Sweep
from pipeproof.views.plot_file import default_style, new_figure, write_figure

_MOST_LINES = 12
_MOST_BARS = 30
_MARKERS = "os^Dv<>PXphd"


class NothingToPlotError(ValueError):
    """No point has figures."""


@default_style()
def plot_sweep(sweep: Sweep, results: Sequence[PointResult], path: Path, figure: str) -> None:
    """Write a picture whose form the suffix names (png, svg, pdf), overwriting what is there.

    Where a key has several numbers as values, the one with most of them is
    the axis; otherwise the points are bars, the best first.

    Raises:
        NothingToPlotError: no point has figures.
        ValueError: the suffix is none of png, svg and pdf.
        OSError: the file cannot be written.
    """
    ranked = best_first(results, figure)
    if not ranked:
        raise NothingToPlotError("no point of the sweep has figures to plot")
    drawing = new_figure(figsize=(9, 5.5), layout="constrained")
    axes = drawing.add_subplot()
    axis = _axis(sweep, ranked)
    title = FIGURES[figure].title
    if axis is None:
        bars = ranked[:_MOST_BARS]
        if len(ranked) > _MOST_BARS:
            axes.set_title(f"the best {_MOST_BARS} of {len(ranked)} points", fontsize="small", loc="left")
        axes.barh([settings_text(result) for result in bars], [_value(result, figure) for result in bars])
        axes.invert_yaxis()
        axes.set_xlabel(title)
    else:
        lines = _lines(axis, ranked, figure)
        if len(lines) > _MOST_LINES:
            axes.set_title(f"the best {_MOST_LINES} of {len(lines)} lines", fontsize="small", loc="left")
        shown = list(lines.items())[:_MOST_LINES]
        for place, (label, line) in enumerate(shown):  # ever narrower: of lines that lie on each other all can be seen
            line.sort()
            axes.plot(
                [x for x, _ in line], [y for _, y in line], marker=_MARKERS[place], label=label or axis,
                linewidth=3 - 2 * place / len(shown), markersize=9 - 4 * place / len(shown),
            )  # fmt: skip
        values = sorted({x for _, line in shown for x, _ in line})
        if all(b - a > (values[-1] - values[0]) / 25 for a, b in pairwise(values)):  # else numbers would run together
            axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlabel(axis)
        axes.set_ylabel(title)
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    drawing.suptitle(sweep.placeholder_note, fontsize="small", wrap=True)
    write_figure(drawing, path, title)


def _axis(sweep: Sweep, results: Sequence[PointResult]) -> str | None:
    """The key with most different numbers, the first of several; None where none has two."""
    numbers = {key: {r.settings[key] for r in results if _is_number(r.settings.get(key))} for key in sweep.keys}
    best = max(numbers, key=lambda key: len(numbers[key]))
    return best if len(numbers[best]) > 1 else None


def _lines(axis: str, ranked: Sequence[PointResult], figure: str) -> dict[str, list[tuple[float, float]]]:
    """Points of each line by the settings of the other keys; the line with the best point first."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in ranked:
        if _is_number(result.settings.get(axis)):
            others = (f"{key} {setting_text(value)}" for key, value in result.settings.items() if key != axis)
            line = lines.setdefault(", ".join(others), [])
            line.append((float(result.settings[axis]), _value(result, figure)))
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(result: PointResult, figure: str) -> float:
    value = FIGURES[figure].value(result)
    assert value is not None
    return float(value)
