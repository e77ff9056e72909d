"""``pipeproof.sweep``: a plan with many values for some keys, with records and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from pipeproof.analysis.sweep.evaluate_point import PointResult, Status
from pipeproof.analysis.sweep.results_table import FIGURES, best_first, sweep_to_json
from pipeproof.analysis.sweep.run_sweep import run_sweep
from pipeproof.analysis.sweep.sweep_points import Sweep, sweep_of_plan
from pipeproof.api.given_plan import GivenPlan, load_given, name_of, plan_data
from pipeproof.api.result import Records, Result, html_table, noted
from pipeproof.diagnostics.units import time_text


class SweepResult(Result):
    """Result of ``sweep``: all points, with the table ``points``, the fastest first; times in microseconds."""

    def __init__(self, sweep: Sweep, points: Sequence[PointResult], name: str) -> None:
        self.sweep, self.points, self.name = sweep, tuple(points), name

    def __repr__(self) -> str:
        """Return the number of points, the fastest, and a note about times."""
        best = best_first(self.points, "makespan")
        text = ""
        if best:
            settings = ", ".join(f"{key}={value}" for key, value in best[0].settings.items())
            text = f"; best {settings}, {time_text(best[0].makespan or 0)}"
        note = noted(self.sweep.placeholder_note)
        return f"<sweep: {self.name}, {len(self.points)} points, {len(best)} timed{text}{note}>"

    def _dict(self) -> dict[str, Any]:
        return sweep_to_json(self.sweep, self.points)

    def _tables(self) -> dict[str, Records]:
        others = [point for point in self.points if point.status is not Status.OK]
        return {
            "points": [
                {
                    **point.settings,
                    "status": point.status.value,
                    **{name: figure.value(point) for name, figure in FIGURES.items()},
                    "warnings": list(point.warnings),
                    "code": point.code,
                    "message": point.message,
                }
                for point in (*best_first(self.points, "makespan"), *others)
            ]
        }

    def _parts(self) -> Iterator[str]:
        yield f"<p>{len(self.points)} points, the fastest first. {self.sweep.placeholder_note}</p>"
        yield html_table(self.to_records())


def sweep(
    plan: GivenPlan,
    values: Mapping[str, Sequence[object]],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
) -> SweepResult:
    """Check and simulate a plan with all combinations of values for some keys.

    Args:
        plan: A path, a dict, a ``PlanSpec`` or a loaded plan.
        values: Values by dotted key, such as ``{"schedule.kind": ["1f1b", "zb_h1"]}``. A mapping is laid over the
            mapping of the plan, and None removes a key.
        workers: Processes; by default one for each processor. A script calls this below
            ``if __name__ == "__main__"``.
        executor: Where points are evaluated in place of own processes, such as a Dask client's.

    Raises:
        PlanFileError: the plan or a key is not valid.
        ValueError: both ``workers`` and ``executor`` are given.
    """
    loaded = load_given(plan)
    file = "plan" if loaded.source is None else loaded.source.file
    points = sweep_of_plan(plan_data(loaded), file, values)
    return SweepResult(points, run_sweep(points, executor, num_workers=workers), name_of(plan))
