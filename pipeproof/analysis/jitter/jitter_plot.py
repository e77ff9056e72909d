"""A picture of runs with noise: their step times and sensitivities (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.analysis.jitter.delays import Delay, Delays
from pipeproof.analysis.jitter.histogram import histogram
from pipeproof.analysis.jitter.jitter_report import noise_text
from pipeproof.analysis.jitter.noisy_runs import JitterRuns
from pipeproof.views.plot_file import default_style, new_figure, write_figure

_BINS = 40
_MOST_BARS = 32
_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#555555"


@default_style()
def plot_jitter(runs: JitterRuns, delays: Delays | None, title: str, path: Path, note: str) -> None:
    """Write a picture whose form the suffix names (png, svg, pdf), overwriting what is there.

    ``note`` is about the times of the plan.

    Raises:
        ValueError: the suffix is none of png, svg and pdf.
        OSError: the file cannot be written.
    """
    charts = [] if delays is None else [part for part in (delays.ranks, delays.channels) if part]
    drawing = new_figure(figsize=(9, 4 + 3 * len(charts)), layout="constrained")
    heights = [1.3, *(1 for _ in charts)]
    axes = drawing.subplots(1 + len(charts), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    _draw_histogram(axes[0], runs)
    heading = f"{title}: {len(runs.makespans)} runs, {noise_text(runs.noise)}"
    drawing.suptitle("\n".join(filter(None, (heading, note))), fontsize="small")
    for place, part in enumerate(charts):
        assert delays is not None
        of_ranks = part is delays.ranks
        what = "computations of a rank 1 % longer" if of_ranks else "messages longer by 1 % of a mean computation"
        _draw_delays(axes[1 + place], part, "rank" if of_ranks else "channel", what)
    write_figure(drawing, path, title)


def _draw_histogram(axes: Any, runs: JitterRuns) -> None:
    for start, stop, count in histogram(runs.ordered, _BINS):
        width = float(stop - start) or 1.0
        axes.bar(float(start), count, width=width, align="edge", color=_BLUE, edgecolor="white", linewidth=0.3)
    marks = [("undisturbed", runs.undisturbed, _GREY, "--")]
    for share, style in _MARKED.items():
        marks.append((f"{int(share * 100)} %", runs.quantiles[share].value, _ORANGE, style))
    for label, value, colour, style in marks:
        axes.axvline(float(value), color=colour, linestyle=style, label=f"{label}: {float(value):,.1f} us")
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel("makespan in us")
    axes.set_ylabel("runs")
    axes.legend(**_ABOVE)


_MARKED = MappingProxyType({Fraction(50, 100): "-", Fraction(95, 100): ":"})
_ABOVE = MappingProxyType(
    {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3, "frameon": False, "fontsize": "small"}
)
"""Position at which the legend covers nothing."""


def _draw_delays(axes: Any, delays: Sequence[Delay], name: str, what: str) -> None:
    costly = set(sorted(delays, key=lambda one: -one.step_us)[:_MOST_BARS])
    shown = [one for one in delays if one in costly]
    places = range(len(shown))
    axes.bar(places, [float(one.added_us) for one in shown], color="#cccccc", label="added")
    axes.bar(places, [float(one.step_us) for one in shown], color=_ORANGE, width=0.5, label="step longer by")
    slanted = {"rotation": 60, "ha": "right"} if name == "channel" else {}
    axes.set_xticks(places, [one.where for one in shown], fontsize="small", **slanted)
    axes.set_xlabel(name if len(shown) == len(delays) else f"{name}: the {len(shown)} that cost most of {len(delays)}")
    axes.set_ylabel("us")
    axes.set_title(what, fontsize="small", loc="left")
    axes.legend(**_ABOVE)
