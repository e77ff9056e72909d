"""The search: lower bounds of all layouts first, then simulations in the order of the bounds until none can be better.

A layout is simulated only if its bound is not above the time of the last row: no layout with a shorter step is
missed. Layouts that differ only in their cut, recomputation, sharding and overlap form one group; only its fastest
layout is listed. The rows do not depend on the number of workers.

The search's argument determines the variation: everything, on a number of devices (``DeviceLayouts``), or the schedule
and its sizes, on a plan's own ranks (``PlanLayouts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf
from os import cpu_count
from typing import Any

from pipeproof.analysis.sweep.evaluate_point import Evaluate, PointResult, Status
from pipeproof.analysis.sweep.run_sweep import own_processes, run_sweep
from pipeproof.analysis.sweep.sweep_points import Point, Sweep, digest_of
from pipeproof.analysis.tune.device_layouts import DeviceLayouts
from pipeproof.analysis.tune.evaluate_layout import check_layout, simulate_layout
from pipeproof.analysis.tune.frameworks import FRAMEWORKS, every_schedule, named_framework
from pipeproof.analysis.tune.layer_layouts import FIXABLE as FIXABLE_OF_LAYERS
from pipeproof.analysis.tune.layer_layouts import LayerLayouts
from pipeproof.analysis.tune.layouts import FIXABLE, Bound, Layout
from pipeproof.analysis.tune.plan_layouts import FIXABLE as FIXABLE_OF_PLAN
from pipeproof.analysis.tune.plan_layouts import PlanLayouts
from pipeproof.analysis.tune.present_step import TuneError
from pipeproof.analysis.tune.tune_reasons import complexity, difference_error, differences_text, winner_text
from pipeproof.analysis.tune.tune_result import TuneCounts, TuneResult, TuneRow
from pipeproof.comm.lower import blaming_plan
from pipeproof.cost.devices import DEVICES
from pipeproof.diagnostics.problems import nearest_name
from pipeproof.diagnostics.units import size_text
from pipeproof.sim.memory_curve import GIB
from pipeproof.specs.load_plan import LoadedPlan

FIRST_BATCH, BATCH = 8, 32
"""Layouts simulated between two updates of the rows: as many as were simulated before, within these limits.

They do not depend on the number of workers, so neither does the work. The first rows remove most other layouts.
"""

MAX_SIMULATED_FORWARDS = 2_000_000
"""Forwards of all simulated layouts after which the search ends: a minute of a processor for some 500,000."""

_RANKS_AS_ONE = 8
"""Devices that count as a forward: with a million devices, most of the time is spent on positions of groups."""

_LARGE = 10_000
"""Forwards of a layout whose bound takes long enough to be reported by itself."""

MAX_REFUSED = 20
"""Refused layouts on a plan's own ranks before the search ends: so many failures show a fault of the plan."""

Progress = Callable[[str, int, int], None]
"""Callback for progress: the current task, the number done and the total."""


def tune(
    plan: LoadedPlan,
    *,
    gpus: int | None = None,
    device: str | None = None,
    global_batch: int | None = None,
    memory_gib: float | None = None,
    framework: str | None = None,
    top: int = 10,
    fix: Mapping[str, Sequence[Any]] | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> TuneResult:
    """Find the layouts with the shortest steps for the model of a plan.

    Args:
        plan: Model, times and memory settings. With ``gpus``, its mesh, schedule, cut, recomputation and sharding are
            replaced; without, its schedule, chunks, micro-batches and the cut into them.
        gpus: Number of devices; without it, the ranks of the plan.
        device: Name of a device in ``pipeproof.cost.devices``, with ``gpus``.
        global_batch: Sequences in a step, over all replicas, with ``gpus``.
        memory_gib: Memory of a device in GiB. By default from the device's data sheet with ``gpus``; otherwise no limit
            but ``schedule.memory_limit`` and ``memory.budget_gib`` of the plan.
        framework: A name of ``FRAMEWORKS``: only its schedules and settings are tried. By default ``megatron`` with
            ``gpus``, else the plan's; ``any``, and a plan that names none, has every schedule without ``gpus``.
        top: Number of rows.
        fix: Allowed values by a name of ``layouts.FIXABLE``, such as ``{"tp": [8]}``; without ``gpus``, of
            ``plan_layouts.FIXABLE``.
        executor: Any ``concurrent.futures`` executor, which stays open; without it, ``workers`` processes.
        workers: Number of processes; by default one per processor with ``gpus``, else 1. With 1, this process
            simulates.
        on_progress: Callback for progress.

    Raises:
        TuneError: an option is wrong.
        BadPlanError: the plan has keys that do not go with other layouts, or cannot be lowered.
    """
    limits = {"gpus": gpus, "global_batch": global_batch, "top": top}
    for name, number in limits.items():
        if number is not None and number < 1:
            raise TuneError(f"{name} is {number}; give at least 1")
    fix, assumptions = fix or {}, []
    fixable = FIXABLE_OF_PLAN if gpus is None else FIXABLE
    _require_known("name to fix", fix, FIXABLE_OF_LAYERS if plan.spec.has_layer_times else fixable)
    if executor is not None and workers is not None:
        raise TuneError("workers is the number of our own processes: give it, or an executor")
    if plan.spec.modules:
        raise TuneError("the plan has `modules`, which tune does not vary; compare kinds with `simulate --set`")
    choices: DeviceLayouts | PlanLayouts | LayerLayouts
    if plan.spec.has_layer_times:
        options = {"device": device, "global_batch": global_batch, "framework": framework}
        for name, value in options.items():
            if value not in (None, "any"):
                raise TuneError(f"leave out `{name}`: the plan has the times of its layers, and its own batch")
        limit = None if memory_gib is None else int(memory_gib * GIB)
        with blaming_plan(plan):
            choices = LayerLayouts(plan, every_schedule(), fix, gpus, limit)
    elif gpus is None:
        if global_batch is not None or device is not None:
            raise TuneError("`device` and `global_batch` go with `gpus`: without it, times and batch are the plan's")
        _require_known("framework", [framework or "any"], (*FRAMEWORKS, "any"))
        named = named_framework(plan.spec) if framework is None else FRAMEWORKS.get(framework)
        with blaming_plan(plan):
            choices = PlanLayouts(plan, named or every_schedule(), fix)
    else:
        if device is None or global_batch is None:
            raise TuneError(f"`{'device' if device is None else 'global_batch'}` is missing: give it with `gpus`")
        framework = framework or "megatron"
        _require_known("device", [device], tuple(DEVICES))
        _require_known("framework", [framework], tuple(FRAMEWORKS))
        if memory_gib is None:
            memory_gib = float(DEVICES[device].memory_gib)
            assumptions.append(f"the memory of a device is {memory_gib:g} GiB, from {device}'s data sheet")
        choices = DeviceLayouts(
            plan.spec, FRAMEWORKS[framework], device, num_gpus=gpus, global_batch=global_batch,
            memory_gib=memory_gib, fix=fix,
        )  # fmt: skip
    search = _Search(choices, top, memory_gib, on_progress or (lambda *_: None))
    search.bound_all()
    number = workers or (1 if gpus is None else cpu_count() or 1)
    with _executor(executor, number) as pool:
        rows = search.run(pool)
    return search.result(rows, tuple(assumptions))


def _require_known(what: str, names: Iterable[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            near = nearest_name(name, choices)
            remedy = f"did you mean {near}?" if near else f"known are {', '.join(choices)}"
            raise TuneError(f"there is no {what} {name}; {remedy}")


_Group = tuple[Any, ...]


class _Search:
    """The layouts in the order of their bounds, and the results so far."""

    def __init__(
        self,
        choices: DeviceLayouts | PlanLayouts | LayerLayouts,
        top: int,
        memory_gib: float | None,
        on_progress: Progress,
    ) -> None:
        self._choices, self._top, self._report = choices, top, on_progress
        self._memory_gib = memory_gib
        self._limit_bytes = inf if memory_gib is None else memory_gib * GIB
        self._waiting: list[tuple[Bound, Layout]] = []
        self._points: dict[str, Layout] = {}
        self._done: dict[str, PointResult] = {}
        self._fitting: set[Layout] = set()
        self._taken: set[str] = set()
        self._checked: dict[str, PointResult] = {}
        self._simulated_forwards = 0
        self._tried = self._unfit = self._over = self._over_simulated = 0
        self._refused: Counter[str] = Counter()

    def bound_all(self) -> None:
        """Bound the time and memory of every layout, and sort those that may fit by time."""
        layouts = [*self._choices.layouts()]
        self._tried = len(layouts)
        for index, layout in enumerate(layouts):
            if index % 16 == 0 or layout.num_forwards > _LARGE:
                self._report("bounding layouts", index, len(layouts))
            bound = self._choices.bound(layout, self._limit_bytes)
            if bound is None:
                self._unfit += 1
            elif bound.peak_bytes > self._limit_bytes or bound.peak_bytes == inf:
                self._over += 1
            else:
                self._waiting.append((bound, layout))
        self._waiting.sort(key=lambda item: (item[0].step_us, item[0].peak_bytes, astuple_of(item[1])))

    def _nearest_change(self) -> str | None:
        """The smallest change that allows a layout, in a sentence."""
        if self._tried == 0:
            return self._choices.nearest_change() if isinstance(self._choices, DeviceLayouts) else None
        bounds = ((self._choices.bound(layout, inf), layout) for layout in self._choices.layouts())
        peaks = {layout: bound.peak_bytes for bound, layout in bounds if bound is not None}
        peaks |= {self._points[each]: result.details.get("peak_bytes", inf) for each, result in self._done.items()}
        layout = min(peaks, key=peaks.__getitem__, default=None)
        if layout is None or peaks[layout] <= self._limit_bytes:
            return None
        gib = peaks[layout] / GIB
        names = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep", "pp", "vpp", "mbs", "recompute")]
        return (
            f"The one with the least memory needs {size_text(gib * GIB)} or more ({', '.join(names)}): "
            f"give --memory-gib {ceil(gib)}, or more devices."
        )

    def run(self, pool: Executor) -> list[str]:
        """Simulate until no waiting layout can be better than the rows, and check the rows; their ids."""
        position = 0
        while True:
            if self._simulated_forwards > MAX_SIMULATED_FORWARDS and position < len(self._waiting):
                reason = f"after {MAX_SIMULATED_FORWARDS:,} simulated forwards of faster bounds"
                self._choices.removed[reason] = len(self._waiting) - position
                position = len(self._waiting)
            rows = self._rows()
            limit = self._done[rows[-1]].makespan if len(rows) >= self._top else self._choices.slowest_us
            batch: list[Point] = []
            size = min(max(len(self._done), FIRST_BATCH), BATCH)
            best = self._best_of_groups()
            while position < len(self._waiting) and len(batch) < size:
                bound, layout = self._waiting[position]
                if limit is not None and bound.step_us > limit:
                    position = len(self._waiting)
                    break
                position += 1
                if bound.step_us > best.get(_group(layout), inf) or self._is_dominated(layout):
                    continue
                point = self._point(layout)
                if point.id not in self._taken:  # cuts of two kinds may have the same stages
                    self._taken.add(point.id)
                    self._simulated_forwards += layout.num_forwards + self._choices.num_gpus // _RANKS_AS_ONE
                    batch.append(point)
            if batch:
                self._simulate(batch, pool)
                continue
            unchecked = [point_id for point_id in rows if point_id not in self._checked]
            if not unchecked:
                return rows
            points = [self._point(self._points[point_id]) for point_id in unchecked]
            for result in self._evaluate(points, pool, check_layout, "checking rows"):
                self._checked[result.id] = result
                if result.status is not Status.OK:
                    self._refused[result.code or "failed"] += 1
                    position = self._resume_after(position)
            if self._choices.present is not None and self._refused.total() > MAX_REFUSED:
                return [point_id for point_id in self._rows() if point_id in self._checked]

    def _resume_after(self, position: int) -> int:
        """The first layout that was not simulated: after a failed row, slower layouts are candidates again."""
        return next(
            (index for index, (_, layout) in enumerate(self._waiting)
             if self._point(layout).id not in self._done and not self._is_dominated(layout)),
            position,
        )  # fmt: skip

    def _simulate(self, batch: Sequence[Point], pool: Executor) -> None:
        for point, result in zip(
            batch, self._evaluate(batch, pool, simulate_layout, "simulating layouts"), strict=True
        ):
            self._done[point.id] = result
            if result.status is not Status.OK:
                self._refused[result.code or "failed"] += 1
            elif result.details["peak_bytes"] > self._limit_bytes:
                self._over_simulated += 1
            elif self._is_better(result):
                self._fitting.add(self._points[point.id])

    def _is_better(self, result: PointResult) -> bool:
        """True if a step is shorter than the plan's on its own ranks, or equal with less memory."""
        present, slowest = self._choices.present, self._choices.slowest_us
        if present is None or slowest is None:
            return True
        assert result.makespan is not None
        return (result.makespan, result.details["peak_bytes"]) < (slowest, present.peak_bytes)

    def _evaluate(
        self, points: Sequence[Point], pool: Executor, evaluate: Evaluate, task: str
    ) -> tuple[PointResult, ...]:
        done = len(self._done)

        def keep(result: PointResult) -> None:
            nonlocal done
            done += 1
            self._report(task, done, max(done, len(self._done) + len(points)))

        return run_sweep(Sweep("tune", (), tuple(points)), pool, on_result=keep, evaluate_point=evaluate)

    def _is_dominated(self, layout: Layout) -> bool:
        """True if the same layout with less recomputation fits: it does the same in less time."""
        less = {"none": (), "selective": ("none",), "full": ("none", "selective")}[layout.recompute]
        return any(replace(layout, recompute=recompute) in self._fitting for recompute in less)

    def _best_of_groups(self) -> dict[_Group, float]:
        """The time of the fastest fitting layout of each group: one with a higher bound cannot be listed for it."""
        best: dict[_Group, float] = {}
        for _, layout, makespan, _ in self._candidates():
            group = _group(layout)
            best[group] = min(best.get(group, inf), float(makespan))
        return best

    def _candidates(self) -> Iterator[tuple[str, Layout, Fraction, int]]:
        """Id, layout, step and largest memory of each layout that fits and has not failed its check."""
        for point_id, result in self._done.items():
            layout, checked = self._points[point_id], self._checked.get(point_id)
            if layout in self._fitting and (checked is None or checked.status is Status.OK):
                assert result.makespan is not None
                yield point_id, layout, result.makespan, result.details["peak_bytes"]

    def _rows(self) -> list[str]:
        """The ids of the best layout of each group, the fastest first, at most as many as there are rows.

        On a plan's own ranks, a layout that holds as much as a faster one is left out.
        """
        ranked = [
            ((makespan, peak_bytes, astuple_of(layout)), _group(layout), point_id)
            for point_id, layout, makespan, peak_bytes in self._candidates()
        ]
        ids: dict[_Group, str] = {}
        least = inf
        for (_, peak_bytes, _), group, point_id in sorted(ranked):
            if self._choices.present is None or peak_bytes < least:
                ids.setdefault(group, point_id)
                least = min(least, peak_bytes)
        return [*ids.values()][: self._top]

    def _point(self, layout: Layout) -> Point:
        plan = self._choices.plan_of(layout)
        point = Point({}, plan, digest_of(plan)[:16])
        self._points.setdefault(point.id, layout)
        return point

    def _ordered(self, rows: Sequence[str]) -> tuple[list[str], dict[str, float | None]]:
        """Rows by their steps; the first is the simplest of the rows that share the fastest one's mesh and are as fast.

        The second result has, by row, the error of the ratio of its step to the fastest; None if the ratio is larger.
        """
        if not rows or self._checked[rows[0]].details["step_mean_error"] is None:
            return [*rows], dict.fromkeys(rows)
        steps = {each: self._checked[each].makespan or 0 for each in rows}
        fastest = min(rows, key=lambda each: steps[each])
        errors = {each: difference_error(self._points[each], self._points[fastest]) for each in rows}
        ties = [each for each in rows if steps[each] <= steps[fastest] * (1 + errors[each])]
        least = min(errors.values())
        near = sorted((each for each in ties if errors[each] == least), key=lambda each: complexity(self._points[each]))
        rest = (each for each in rows if each not in near)
        return [*near, *rest], {each: errors[each] if each in ties and len(ties) > 1 else None for each in rows}

    def result(self, rows: Sequence[str], assumptions: tuple[str, ...]) -> TuneResult:
        """The result of a search with these rows."""
        choices, present = self._choices, self._choices.present
        rows, differences = self._ordered(rows)
        best = None if present is None else present.parts_s
        parts = [
            {name: us / 10**6 for name, us in self._checked[point_id].details["parts_us"].items()} for point_id in rows
        ]
        counts = TuneCounts(
            tried=self._tried,
            unfit=self._unfit,
            over_memory=self._over,
            bounded=len(self._waiting),
            simulated=len(self._done),
            over_memory_simulated=self._over_simulated,
            checked=len(self._checked),
            removed=dict(choices.removed),
            refused=dict(self._refused),
        )
        listed = []
        for index, point_id in enumerate(rows):
            if best is None and index == 0:
                why = winner_text(parts[0], parts[1:])
            else:
                why = differences_text(parts[index], best or parts[0])
            listed.append(self._row(index + 1, self._checked[point_id], parts[index], why, differences[point_id]))
        notes = tuple(choices.notes([row.layout for row in listed]))
        return TuneResult(
            choices.framework.name, choices.device, choices.num_gpus, self._memory_gib, choices.global_batch,
            choices.seq_length, choices.cost_source, tuple(listed), counts, assumptions, notes, present,
            self._checked[rows[0]].details["step_mean_error"] if rows else None,
            None if listed else self._nearest_change(),
        )  # fmt: skip

    def _row(
        self, rank: int, result: PointResult, parts: Mapping[str, float], why: str, difference: float | None
    ) -> TuneRow:
        layout, details = self._points[result.id], result.details
        assert result.makespan is not None
        step = result.makespan / 10**6
        tokens_per_s = self._choices.global_batch * self._choices.seq_length / float(step)
        return TuneRow(
            rank=rank,
            layout=layout,
            step=step,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / self._choices.num_gpus,
            tflops_per_gpu=details["tflops_per_gpu"],
            mfu=details["mfu"],
            peak_gib=details["peak_bytes"] / GIB,
            parts_s=parts,
            why=why,
            difference_error=difference,
            step_within=details["step_within"],
            digest=details["digest"],
            notes=result.warnings,
            deadlocks_with=details["deadlocks_with"],
            plan=self._choices.plan_of(layout),
        )


def astuple_of(layout: Layout) -> tuple[str, ...]:
    """The values of a layout as texts of a fixed order, which breaks ties."""
    return tuple(f"{getattr(layout, name)!s:>8}" for name in Layout.__slots__)


def _group(layout: Layout) -> _Group:
    return (
        layout.pp, layout.vpp, layout.tp, layout.cp, layout.ep, layout.mbs, layout.kind, layout.variant,
        layout.memory_limit,
    )  # fmt: skip


def _executor(executor: Executor | None, number: int) -> AbstractContextManager[Executor]:
    if executor is not None:
        return nullcontext(executor)
    return ThreadPoolExecutor(1) if number == 1 else own_processes(number)
