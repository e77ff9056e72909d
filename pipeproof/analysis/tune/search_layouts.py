"""The search: lower bounds of all layouts first, then simulations in the order of the bounds until none can be better.

A layout is simulated only if its bound is not above the time of the last row, so that no layout with a shorter step is
missed. Layouts that differ only in their cut, recomputation, sharding and overlap form one group, of which the fastest
is listed. The rows do not depend on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from os import cpu_count
from pathlib import Path
from typing import Any

from pipeproof.analysis.sweep.evaluate_point import Evaluate, PointResult, Status
from pipeproof.analysis.sweep.results_file import ResultsFile, open_results
from pipeproof.analysis.sweep.run_sweep import own_processes, run_sweep
from pipeproof.analysis.sweep.sweep_file import Sweep
from pipeproof.analysis.sweep.sweep_points import Point, digest_of
from pipeproof.analysis.tune.evaluate_layout import check_layout, simulate_layout
from pipeproof.analysis.tune.frameworks import FRAMEWORKS, Framework
from pipeproof.analysis.tune.layout_bounds import Bound, Bounds, even_stages
from pipeproof.analysis.tune.layout_plans import base_data, plan_data, require_tunable
from pipeproof.analysis.tune.layouts import FIXABLE, Layout, SearchSpace
from pipeproof.analysis.tune.tune_reasons import differences_text, winner_text
from pipeproof.analysis.tune.tune_result import TuneCounts, TuneResult, TuneRow
from pipeproof.cost.devices import DEVICES, Device
from pipeproof.cost.model_flops import peak_tflops
from pipeproof.diagnostics.problems import nearest_name
from pipeproof.sim.memory_curve import GIB
from pipeproof.specs.cost import AnalyticSpec
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layer import layer_order
from pipeproof.stages.describe.op_work import product_flops
from pipeproof.version import __version__

FIRST_BATCH, BATCH = 8, 32
"""Layouts simulated between two looks at the rows so far: as many as were simulated before, within these limits.

They do not depend on the number of workers, so neither does the work. The first rows remove most of what follows.
"""

Progress = Callable[[str, int, int], None]
"""Callback for progress: the current task, the number done and the total."""


class TuneError(ValueError):
    """Wrong options of a search; the message has the remedy."""


def tune(
    plan: LoadedPlan,
    *,
    gpus: int,
    device: str,
    global_batch: int,
    memory_gib: float | None = None,
    framework: str = "megatron",
    top: int = 10,
    fix: Mapping[str, Sequence[Any]] | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    results: Path | None = None,
    on_progress: Progress | None = None,
) -> TuneResult:
    """Find the layouts with the shortest steps for the model of a plan.

    Args:
        plan: Model, times and memory settings; its mesh, schedule, cut, recomputation and sharding are replaced.
        gpus: Number of devices.
        device: Name of a device in ``pipeproof.cost.devices``.
        global_batch: Sequences in a step, over all replicas.
        memory_gib: Memory of a device in GiB; by default that of the device.
        framework: A name of ``FRAMEWORKS``: only its schedules and settings are tried.
        top: Number of rows.
        fix: Allowed values by a name of ``layouts.FIXABLE``, such as ``{"tp": [8]}``.
        executor: Any ``concurrent.futures`` executor, which stays open; without it, ``workers`` processes.
        workers: Number of processes; by default one per processor. With 1, this process simulates.
        results: File to which simulated layouts are appended and from which the same search resumes.
        on_progress: Callback for progress.

    Raises:
        TuneError: an option is wrong.
        BadPlanError: the plan has keys that do not go with other layouts.
        ResultsFileError: ``results`` is of another search.
    """
    request = _Request.of(plan, gpus, device, global_batch, memory_gib, framework, top, fix or {})
    search = _Search(request, on_progress)
    search.bound_all()
    with _executor(executor, workers) as pool, search.recording(results) as file:
        return search.run(pool, file)


@dataclass(frozen=True)
class _Request:
    spec: PlanSpec
    framework: Framework
    num_gpus: int
    device: str
    global_batch: int
    memory_gib: float
    top: int
    fix: Mapping[str, Sequence[Any]]
    assumptions: tuple[str, ...]

    @classmethod
    def of(
        cls, plan: LoadedPlan, gpus: int, device: str, global_batch: int, memory_gib: float | None, framework: str,
        top: int, fix: Mapping[str, Sequence[Any]],
    ) -> _Request:  # fmt: skip
        require_tunable(plan.spec)
        for name, known, what in (
            (device, tuple(DEVICES), "device"),
            (framework, tuple(FRAMEWORKS), "framework"),
            *((key, FIXABLE, "name to fix") for key in fix),
        ):
            if name not in known:
                near = nearest_name(name, known)
                remedy = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
                raise TuneError(f"there is no {what} {name}; {remedy}")
        for name, number in (("gpus", gpus), ("global_batch", global_batch), ("top", top)):
            if number < 1:
                raise TuneError(f"{name} is {number}; give at least 1")
        assumptions = []
        if memory_gib is None:
            memory_gib = float(_device(device).memory_gib)
            assumptions.append(f"the memory of a device is {memory_gib:g} GiB, that of {device}'s data sheet")
        return cls(
            plan.spec, FRAMEWORKS[framework], gpus, device, global_batch, memory_gib, top, fix, tuple(assumptions)
        )


def _device(name: str) -> Device:
    return {str(known): device for known, device in DEVICES.items()}[name]


_Group = tuple[Any, ...]


class _Search:
    """The layouts in the order of their bounds, and the results so far."""

    def __init__(self, request: _Request, on_progress: Progress | None) -> None:
        self._request, self._on_progress = request, on_progress
        spec, device = request.spec, _device(request.device)
        self._base = base_data(spec, request.framework, request.device)
        analytic = self._base["cost"]["analytic"]
        self._space = SearchSpace(
            spec, request.framework, request.num_gpus, request.global_batch,
            analytic.get("ranks_per_node") or device.ranks_per_node, request.fix,
        )  # fmt: skip
        dtype = self._base["run"].get("dtype", "float32")
        self._peak_tflops = peak_tflops(AnalyticSpec.model_validate(analytic), dtype)
        self._bounds = Bounds(self._base, spec)
        self._waiting: list[tuple[Bound, Layout]] = []
        self._points: dict[str, Layout] = {}
        self._done: dict[str, PointResult] = {}
        self._fitting: set[Layout] = set()
        self._taken: set[tuple[Layout, tuple[tuple[str, ...], ...]]] = set()
        self._checked: dict[str, PointResult] = {}
        self._tried = self._unfit = self._over = self._over_simulated = 0
        self._refused: Counter[str] = Counter()

    def bound_all(self) -> None:
        """Bound the time and memory of every layout, and sort those that may fit by time."""
        layouts = [*self._space.layouts()]
        self._tried = len(layouts)
        limit = self._request.memory_gib * GIB
        for index, layout in enumerate(layouts):
            if index % 256 == 0:
                self._report("bounding layouts", index, len(layouts))
            bound = self._bounds.of(layout, limit)
            if bound is None:
                self._unfit += 1
            elif bound.peak_bytes > limit:
                self._over += 1
            else:
                self._waiting.append((bound, layout))
        self._waiting.sort(key=lambda item: (item[0].step_us, item[0].peak_bytes, astuple_of(item[1])))

    def recording(self, path: Path | None) -> AbstractContextManager[ResultsFile | None]:
        """Context with the open results file; None without one."""
        if path is None:
            return nullcontext()
        for _, layout in self._waiting:
            self._point(layout)
        return open_results(path, self._sweep(tuple(Point({}, {}, point_id) for point_id in self._points)))

    def run(self, pool: Executor, file: ResultsFile | None) -> TuneResult:
        """Simulate until no waiting layout can be better than the rows, and check the rows."""
        recorded = {} if file is None else file.done
        position = 0
        while True:
            rows = self._rows()
            limit = self._done[rows[-1]].makespan if len(rows) >= self._request.top else None
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
                stages = replace(layout, cut=""), self._bounds.stages_of(layout)
                if stages not in self._taken:  # cuts of two kinds may be the same stages
                    self._taken.add(stages)
                    batch.append(self._point(layout))
            if batch:
                self._simulate(batch, pool, recorded, file)
                continue
            unchecked = [point_id for point_id in rows if point_id not in self._checked]
            if not unchecked:
                return self._result(rows)
            points = [self._point(self._points[point_id]) for point_id in unchecked]
            for result in self._evaluate(points, pool, check_layout, "checking rows"):
                self._checked[result.id] = result
                if result.status is not Status.OK:
                    self._refused[result.code or "failed"] += 1
                    position = self._resume_after(position)

    def _resume_after(self, position: int) -> int:
        """The first layout that was not simulated: a row has failed, so that slower ones come into question."""
        return next(
            (index for index, (_, layout) in enumerate(self._waiting)
             if self._point(layout).id not in self._done and not self._is_dominated(layout)),
            position,
        )  # fmt: skip

    def _simulate(
        self, batch: Sequence[Point], pool: Executor, recorded: Mapping[str, PointResult], file: ResultsFile | None
    ) -> None:
        new = [point for point in batch if point.id not in recorded]
        found = {point.id: recorded[point.id] for point in batch if point.id in recorded}
        on_result = None if file is None else file.append
        for result in self._evaluate(new, pool, simulate_layout, "simulating layouts", on_result):
            found[result.id] = result
        for point in batch:
            result = self._done[point.id] = found[point.id]
            if result.status is not Status.OK:
                self._refused[result.code or "failed"] += 1
            elif result.details["peak_bytes"] > self._request.memory_gib * GIB:
                self._over_simulated += 1
            else:
                self._fitting.add(self._points[point.id])

    def _evaluate(
        self, points: Sequence[Point], pool: Executor, evaluate: Evaluate, task: str,
        on_result: Callable[[PointResult], None] | None = None,
    ) -> tuple[PointResult, ...]:  # fmt: skip
        done = len(self._done)

        def keep(result: PointResult) -> None:
            nonlocal done
            done += 1
            self._report(task, done, max(done, len(self._done) + len(points)))
            if on_result is not None:
                on_result(result)

        return run_sweep(self._sweep(tuple(points)), pool, on_result=keep, evaluate_point=evaluate)

    def _is_dominated(self, layout: Layout) -> bool:
        """True if the same layout with less recomputation fits: it does the same in less time."""
        less = {"none": (), "selective": ("none",), "full": ("none", "selective")}[layout.recompute]
        return any(replace(layout, recompute=recompute) in self._fitting for recompute in less)

    def _best_of_groups(self) -> dict[_Group, float]:
        """The time of the fastest fitting layout of each group: one with a higher bound cannot be listed for it."""
        best: dict[_Group, float] = {}
        for point_id, result in self._done.items():
            layout, checked = self._points[point_id], self._checked.get(point_id)
            if layout in self._fitting and (checked is None or checked.status is Status.OK):
                assert result.makespan is not None
                group = _group(layout)
                best[group] = min(best.get(group, inf), float(result.makespan))
        return best

    def _rows(self) -> list[str]:
        """The ids of the best layout of each group, the fastest first, at most as many as there are rows."""
        ranked = []
        for point_id, result in self._done.items():
            layout = self._points[point_id]
            checked = self._checked.get(point_id)
            if layout in self._fitting and (checked is None or checked.status is Status.OK):
                assert result.makespan is not None
                key = result.makespan, result.details["peak_bytes"], astuple_of(layout)
                ranked.append((key, _group(layout), point_id))
        ids: dict[_Group, str] = {}
        for _, group, point_id in sorted(ranked):
            ids.setdefault(group, point_id)
        return [*ids.values()][: self._request.top]

    def _point(self, layout: Layout) -> Point:
        stages = self._bounds.stages_of(layout)
        named = None if even_stages(stages) else stages
        plan = plan_data(self._base, self._request.framework, layout, named, self._request.memory_gib)
        point = Point({}, plan, digest_of([plan, layout.cut])[:16])
        self._points[point.id] = layout
        return point

    def _sweep(self, points: tuple[Point, ...]) -> Sweep:
        digest = digest_of(
            [__version__, self._base, self._request.framework.name, self._request.num_gpus, self._request.memory_gib,
             self._request.global_batch, sorted((key, list(map(str, values))) for key, values in
                                                self._request.fix.items())]
        )  # fmt: skip
        return Sweep("tune", "tune", (), points, digest)

    def _report(self, task: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(task, done, total)

    def _result(self, rows: Sequence[str]) -> TuneResult:
        request = self._request
        parts = [
            {name: us / 10**6 for name, us in self._checked[point_id].details["parts_us"].items()} for point_id in rows
        ]
        flops = model_flops(self._base, request.global_batch)
        listed = []
        for index, point_id in enumerate(rows):
            why = winner_text(parts[0], parts[1:]) if index == 0 else differences_text(parts[index], parts[0])
            listed.append(self._row(index + 1, self._checked[point_id], parts[index], flops, why))
        counts = TuneCounts(
            tried=self._tried,
            unfit=self._unfit,
            over_memory=self._over,
            bounded=len(self._waiting),
            simulated=len(self._done),
            over_memory_simulated=self._over_simulated,
            checked=len(self._checked),
            removed=dict(self._space.removed),
            refused=dict(self._refused),
        )
        return TuneResult(
            request.framework.name, request.device, request.num_gpus, request.memory_gib, request.global_batch,
            request.spec.gpt.seq_length, tuple(listed), counts, request.assumptions,
        )  # fmt: skip

    def _row(self, rank: int, result: PointResult, parts: Mapping[str, float], flops: float, why: str) -> TuneRow:
        request, layout = self._request, self._points[result.id]
        assert result.makespan is not None
        step = result.makespan / 10**6
        step_s = float(step)
        tokens = request.global_batch * request.spec.gpt.seq_length
        tflops = flops / step_s / request.num_gpus / 10**12
        return TuneRow(
            rank=rank,
            layout=layout,
            step=step,
            tokens_per_s=tokens / step_s,
            tokens_per_s_per_gpu=tokens / step_s / request.num_gpus,
            tflops_per_gpu=tflops,
            mfu=tflops / self._peak_tflops,
            peak_gib=result.details["peak_bytes"] / GIB,
            parts_s=parts,
            why=why,
            digest=result.details["digest"],
            notes=result.warnings,
            plan=self._point(layout).plan,
        )


def astuple_of(layout: Layout) -> tuple[str, ...]:
    """The values of a layout as texts of a fixed order, which breaks ties."""
    return tuple(f"{getattr(layout, name)!s:>8}" for name in Layout.__slots__)


def _group(layout: Layout) -> _Group:
    return layout.pp, layout.vpp, layout.tp, layout.cp, layout.ep, layout.mbs, layout.kind, layout.variant


def model_flops(base: Mapping[str, Any], global_batch: int) -> float:
    """FLOPs of the model's products and attention in a step, all phases, without recomputation."""
    spec = plan_from_dict(
        {
            "pipeproof": 1,
            "model": base["model"],
            "topology": {},
            "schedule": {"kind": "1f1b", "num_micro_batches": 1, "micro_batch_size": 1},
        }
    ).spec
    phases = product_flops(spec, layer_order(spec.gpt), MicroBatchSize(spec.gpt.seq_length, 1))
    return float(sum(phases.values())) * global_batch


def _executor(executor: Executor | None, workers: int | None) -> AbstractContextManager[Executor]:
    if executor is not None:
        if workers is not None:
            raise TuneError("workers is the number of our own processes: give it, or an executor")
        return nullcontext(executor)
    number = workers or cpu_count() or 1
    return _InThisProcess() if number == 1 else own_processes(number)


class _InThisProcess(Executor):
    """An executor that calls at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call, and return the finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as every executor, it gives errors to the future
            future.set_exception(error)
        return future
