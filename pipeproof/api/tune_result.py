"""``pipeproof.tune``: the layouts with which a model trains fastest, with records and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

from pipeproof.analysis.tune.frameworks import model_of_plan
from pipeproof.analysis.tune.present_step import TuneError
from pipeproof.analysis.tune.search_layouts import tune as find_layouts
from pipeproof.analysis.tune.tune_result import TuneResult as Tuned
from pipeproof.api.given_plan import GivenPlan, Settings, load_given, name_of
from pipeproof.api.result import Records, Result, html_table, html_text, noted
from pipeproof.diagnostics.units import time_text

_FIGURES = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "peak_gib", "why")


class TuneResult(Result):
    """Result of ``tune``: the search ``tuned``, with the table ``layouts``, the fastest first; times in seconds."""

    def __init__(self, tuned: Tuned, name: str) -> None:
        self.tuned, self.name = tuned, name

    def __repr__(self) -> str:
        """Return the number of layouts and the fastest step."""
        rows = self.tuned.rows
        best = f"; best {time_text(rows[0].step * 10**6)} a step" if rows else ""
        devices = f"{self.tuned.num_gpus} {self.tuned.device or 'ranks'}"
        present = self.tuned.present
        note = "" if present is None else noted(present.spec.placeholder_note)
        return f"<tune: {self.name}, {devices}, {len(rows)} layouts{best}{note}>"

    def _dict(self) -> dict[str, Any]:
        return self.tuned.to_json()

    def _tables(self) -> dict[str, Records]:
        return {
            "layouts": [
                {
                    "rank": row.rank,
                    **asdict(row.layout),
                    "step_s": row.step,
                    **{name: getattr(row, name) for name in _FIGURES},
                }
                for row in self.tuned.rows
            ]
        }

    def _parts(self) -> Iterator[str]:
        from pipeproof.analysis.tune.tune_text import render_tune

        yield html_text(lambda console: render_tune(self.tuned, console))
        yield html_table(self.to_records(), "layouts")


def tune(
    plan: GivenPlan,
    *,
    gpus: int | None = None,
    device: str | None = None,
    global_batch: int | None = None,
    memory_gib: float | None = None,
    framework: str | None = None,
    top: int = 10,
    fix: Mapping[str, Sequence[Any]] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    settings: Settings | None = None,
) -> TuneResult:
    """Find the layouts with the shortest steps for the model of a plan.

    Args:
        plan: A path, a dict, a ``PlanSpec`` or a loaded plan. With ``gpus``, its mesh, schedule, cut, recomputation and
            sharding are replaced; without, its schedule, chunks and micro-batches.
        gpus: Number of devices; by default the ranks of the plan, as they are.
        device: Name of a device, with ``gpus``; by default the plan's ``cost.analytic``.
        global_batch: Sequences in a step, over all replicas, with ``gpus``; by default as in the plan.
        memory_gib: Memory of a device in GiB; with ``gpus`` by default from its data sheet.
        framework: ``megatron``, ``torch`` or ``paddle``, whose schedules and settings are tried; by default the plan's,
            or with ``gpus`` ``megatron``. ``any``, without ``gpus``: every schedule.
        top: Number of layouts.
        fix: Allowed values by name, such as ``{"tp": [8]}``; without ``gpus``, names are vpp, mbs, splits, schedule and
            overlap.
        workers: Processes; by default one for each processor, without ``gpus`` one. A script calls this below
            ``if __name__ == "__main__"``.
        executor: Where layouts are simulated in place of own processes, such as a Dask client's.
        settings: Values by dotted key, which replace the plan's.

    Raises:
        PlanFileError: the plan is not valid, or without ``gpus`` cannot be lowered.
        TuneError: an option is wrong, the plan names no device, or without ``gpus`` has no backwards.
    """
    loaded = load_given(plan, settings)
    if gpus is not None and not loaded.spec.has_layer_times:
        source = model_of_plan(loaded, framework)
        device, global_batch = device or source.device, global_batch or source.global_batch
        framework = source.framework
        if device is None:
            raise TuneError("the plan names no device: give `device`, such as 'h100'")
    tuned = find_layouts(
        loaded, gpus=gpus, device=device, global_batch=global_batch, memory_gib=memory_gib, framework=framework,
        top=top, fix=fix, executor=executor, workers=workers,
    )  # fmt: skip
    return TuneResult(tuned, name_of(plan))
