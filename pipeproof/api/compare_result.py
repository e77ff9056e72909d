"""``pipeproof.compare``: two timelines and their differences, with records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pipeproof.analysis.compare.compare_text import comparison_data, render_comparison
from pipeproof.analysis.compare.compare_timelines import Comparison, compare_timelines
from pipeproof.analysis.compare.timeline_files import TimelineFile, read_timeline, simulated_plan, with_common_layers
from pipeproof.api.given_plan import GivenPlan, load_given
from pipeproof.api.result import Records, Result, html_text
from pipeproof.diagnostics.units import time_text


class CompareResult(Result):
    """Result of ``compare``: differences are B - A in microseconds, with the tables ``steps``, ``kinds``, ``worst``."""

    def __init__(self, comparison: Comparison, note: str) -> None:
        self.comparison, self.note = comparison, note

    def __repr__(self) -> str:
        """Return both makespans, and notes about the costs."""
        steps = "; ".join(
            f"{time_text(step.makespan_a)} and {time_text(step.makespan_b)}" for step in self.comparison.steps
        )
        notes = dict.fromkeys((self.comparison.a.note, self.comparison.b.note, self.note))
        text = f"{self.comparison.a.file} and {self.comparison.b.file}, {steps}"
        return f"<compare: {'; '.join(filter(None, (text, *notes)))}>"

    def _dict(self) -> dict[str, Any]:
        return comparison_data(self.comparison, worst=len(self.comparison.pairs), note=self.note)

    def _tables(self) -> dict[str, Records]:
        content = self._dict()
        return {name: content[name] for name in ("steps", "kinds", "worst")}

    def _parts(self) -> Iterator[str]:
        yield html_text(partial(render_comparison, self.comparison, worst=10, note=self.note), width=120)


def compare(a: GivenPlan, b: GivenPlan, step: int | None = None) -> CompareResult:
    """Compare two timelines, such as two plans, or a plan and its run.

    Args:
        a: A plan as a path, dict, ``PlanSpec`` or loaded plan, which is simulated; or the path of a trace or of a
            report of a run.
        b: As ``a``.
        step: Step to compare, for files with several.

    Raises:
        BadPlanError: a plan is not valid, or cannot be simulated.
        TimelineFileError: a file has no timeline.
        ValueError: the step does not exist, or the timelines have nothing in common.
    """
    first, second = _timeline(a, "A"), _timeline(b, "B")
    second, note = with_common_layers(first, second)
    return CompareResult(compare_timelines(first, second, step), note)


def _timeline(plan: GivenPlan, name: str) -> TimelineFile:
    if isinstance(plan, str | os.PathLike):
        return read_timeline(Path(plan))
    return simulated_plan(name, load_given(plan))
