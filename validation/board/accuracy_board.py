"""The board: every measurement next to its prediction, and the error of each group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from pipeproof.comm.lower import lower
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.plan_times import resolved_cost
from pipeproof.cost.step_error import bound_of
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.foreign_text import decode_json
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from validation.board.bridge_recipes import RECIPES
from validation.board.constants import LeftOut, with_constants, without
from validation.board.dualpipe_pair_rows import read_pair_summary, read_pair_trace
from validation.board.golden_records import RECORDS
from validation.board.intervals import Residual
from validation.board.measurement import (
    GIB,
    Cells,
    Measurement,
    MeasurementFileError,
    Quantity,
    readable,
    rows_of_table,
)
from validation.board.megatron_bridge_rows import COLUMNS as BRIDGE_COLUMNS
from validation.board.megatron_bridge_rows import megatron_bridge_rows
from validation.board.megatron_golden_rows import KEYS as GOLDEN_KEYS
from validation.board.megatron_golden_rows import golden_rows
from validation.board.mlperf_rows import COLUMNS as MLPERF_COLUMNS
from validation.board.mlperf_rows import mlperf_rows
from validation.board.own_run_rows import read_own_runs, read_own_shapes
from validation.board.terms import Term, terms_of
from validation.board.vtrain_rows import COLUMNS as VTRAIN_COLUMNS
from validation.board.vtrain_rows import vtrain_rows

MEASUREMENTS = Path(__file__).parent / "measurements"
"""The measurements that come with pipeproof."""

_MICRO = 10**6
_TABLES: Mapping[str, tuple[frozenset[str], Callable[[Cells], Sequence[Measurement]]]] = MappingProxyType(
    {
        "mlperf": (MLPERF_COLUMNS, mlperf_rows),
        "vtrain": (VTRAIN_COLUMNS, vtrain_rows),
        "megatron-bridge": (BRIDGE_COLUMNS, megatron_bridge_rows),
    }
)
"""Sets in CSV files, each with the columns that it is known by, and the measurements of a row."""

TIMES = (Quantity.STEP, Quantity.COMPUTE, Quantity.TOKENS)
"""Quantities that are the time of a step, or its inverse."""

SETS = ("mlperf", "vtrain", "megatron", "megatron-bridge", "dualpipe", "own")


@dataclass(frozen=True)
class MeasurementFile:
    """A file of measurements and the set that it belongs to."""

    path: Path
    set: str
    rows: tuple[Measurement, ...]


@dataclass(frozen=True)
class Prediction:
    """A measurement with its prediction; None, with the reason, where there is none.

    ``left_out`` has the predictions with constants that were fitted without the row's model, and without its system.
    """

    measurement: Measurement
    predicted: float | None
    reason: str = ""
    left_out: Mapping[LeftOut, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The relative error of a prediction, positive if it is too large."""
        assert self.predicted is not None
        return self.predicted / self.measurement.measured - 1

    @property
    def time_error(self) -> float:
        """The logarithm of predicted / measured time; rates are inverse times."""
        ratio = log(self.error + 1)
        return -ratio if self.measurement.quantity is Quantity.TOKENS else ratio

    def error_without(self, left_out: LeftOut) -> float:
        """The relative error of the prediction with constants of other models, or of other systems."""
        return self.left_out[left_out] / self.measurement.measured - 1


@dataclass(frozen=True)
class Accuracy:
    """The errors of a group, as shares: of ``count`` predictions; ``omitted`` rows have none.

    ``fitted`` is the mean of the absolute errors with the constants of the package, ``other_models`` and
    ``other_systems`` with constants that were fitted to other models, or on other systems, than a row's; ``mape`` is
    the larger one of these two. All other fields use the package's constants.
    """

    group: str
    quantity: Quantity
    count: int
    omitted: int
    mape: float | None
    other_models: float | None
    other_systems: float | None
    fitted: float | None
    median: float | None
    worst: float | None
    bias: float | None


def read_measurements(directories: Sequence[Path]) -> tuple[list[MeasurementFile], list[str]]:
    """Read the files of measurements in directories, recognized by their columns or keys.

    Returns:
        The files with their rows, and a line for each file of another kind, and each file or row that cannot be read.

    Raises:
        MeasurementFileError: no row can be read.
        OSError: a directory or a file cannot be opened.
    """
    files: list[MeasurementFile] = []
    unread: list[str] = []
    for directory in directories:
        for path in [directory] if directory.is_file() else sorted(directory.iterdir()):
            if path.suffix not in (".csv", ".json"):
                continue
            try:
                read = (_read_table if path.suffix == ".csv" else _read_json)(path, unread)
            except MeasurementFileError as error:
                unread.append(str(error))
                continue
            if read is None:
                unread.append(f"{path}: neither columns nor keys match a known set")
            elif read.rows:
                files.append(read)
    if not files:
        where = ", ".join(map(str, directories))
        raise MeasurementFileError("\n".join((*unread, f"{where}: no measurements; give a directory that has some")))
    return files, unread


def set_of_table(header: str) -> str | None:
    """Return the set to which a CSV file belongs, by its first line; None for another file."""
    found = {name.strip() for name in header.split(",")}
    return next((name for name, (columns, _) in _TABLES.items() if columns <= found), None)


def _read_table(path: Path, unread: list[str]) -> MeasurementFile | None:
    with path.open(encoding="utf-8-sig") as stream:
        name = set_of_table(stream.readline())
    if name is None:
        # which rows of Megatron-Bridge and of Megatron-LM refer to
        return MeasurementFile(path, "", ()) if path in (RECIPES, RECORDS) else None
    columns, measure = _TABLES[name]
    return MeasurementFile(path, name, tuple(readable(rows_of_table(path, columns, unread), measure, unread)))


def _read_json(path: Path, unread: list[str]) -> MeasurementFile | None:
    try:
        content = decode_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MeasurementFileError(f"{path}: no JSON: {error}; write the file again") from error
    if isinstance(content, list) and content and isinstance(content[0], dict) and set(content[0]) >= GOLDEN_KEYS:
        rows = readable(enumerate(content), partial(golden_rows, path), unread)
        return MeasurementFile(path, "megatron", tuple(rows))
    if not isinstance(content, dict):
        return None
    if "cases" in content and "source" in content:  # the arguments of Megatron-LM's cases, which its rows refer to
        return MeasurementFile(path, "", ())
    if "dualpipe_pair" in content:
        return MeasurementFile(path, "dualpipe", tuple(read_pair_summary(path, content)))
    if "traceEvents" in content:
        return MeasurementFile(path, "dualpipe", tuple(read_pair_trace(path, content)))
    if "sizes" in content and "num_ranks" in content:
        return MeasurementFile(path, "own", tuple(read_own_runs(path, content)))
    if "shapes" in content:
        return MeasurementFile(path, "own", tuple(read_own_shapes(path, content)))
    return None


class Predictor:
    """Predictions of measurements; rows with the same plan are simulated once."""

    def __init__(self) -> None:
        self._by_plan: dict[str, tuple[PlanSpec, Simulation] | str] = {}

    def predict(self, measurement: Measurement) -> Prediction:
        """Return the prediction; a plan that pipeproof refuses has none, with the first finding as the reason."""
        predicted = self.value(measurement)
        if isinstance(predicted, str):
            return Prediction(measurement, None, predicted)
        others = {left_out: self._without(measurement, left_out, predicted) for left_out in LeftOut}
        return Prediction(measurement, predicted, left_out=others)

    def value(self, measurement: Measurement) -> float | str:
        """Return the prediction with the constants of the plan alone, or the reason why there is none."""
        if measurement.plan is None:
            return measurement.reason
        simulated = self._simulated(measurement.plan)
        return simulated if isinstance(simulated, str) else _value(measurement.quantity, *simulated)

    def residual(self, prediction: Prediction) -> Residual | None:
        """Return the error of a predicted step with constants of other systems; None for a row without one."""
        row = prediction.measurement
        if prediction.predicted is None or row.quantity not in TIMES:
            return None
        assert row.plan is not None
        simulated = self._simulated(row.plan)
        assert not isinstance(simulated, str)
        spec, analytic = simulated[0], simulated[0].cost.analytic
        assert analytic is not None
        bound = bound_of(AnalyticCosts(spec, analytic))
        error = log(prediction.error_without(LeftOut.SYSTEM) + 1)
        error = round(-error if row.quantity is Quantity.TOKENS else error, 5)
        return Residual(analytic.device, spec.gpt.moe is not None, bound, row.system, row.model, error)

    def terms(self, measurement: Measurement) -> Mapping[Term, float] | None:
        """Return the shares of the terms in the predicted step; None for a row without one."""
        if measurement.plan is None or measurement.quantity not in TIMES:
            return None
        simulated = self._simulated(measurement.plan)
        return None if isinstance(simulated, str) else terms_of(*simulated)

    def _without(self, measurement: Measurement, left_out: LeftOut, predicted: float) -> float:
        if measurement.quantity not in TIMES:  # no constant of memory is fitted
            return predicted
        changed = with_constants(measurement, without(measurement, left_out))
        if changed is measurement:
            return predicted
        value = self.value(changed)
        assert not isinstance(value, str), "constants do not change whether a plan is possible"
        return value

    def _simulated(self, plan: Mapping[str, Any]) -> tuple[PlanSpec, Simulation] | str:
        key = json.dumps(plan, sort_keys=True)
        if key not in self._by_plan:
            try:
                spec = plan_from_dict(plan).spec
                self._by_plan[key] = spec, simulate(lower(spec))
            except PipeproofError as error:
                self._by_plan[key] = f"the plan is refused: {error.findings[0].message}"
        return self._by_plan[key]


def _value(quantity: Quantity, spec: PlanSpec, simulation: Simulation) -> float:
    match quantity:
        case Quantity.STEP:
            return float(simulation.makespan) / _MICRO
        case Quantity.COMPUTE:
            spans = [s for rank in range(spec.topology.pp) for s, _ in simulation.timeline.compute_spans(rank)]
            return float(max(span.end for span in spans) - min(span.start for span in spans)) / _MICRO
        case Quantity.TOKENS:
            topology, schedule = spec.topology, spec.schedule
            sequences = topology.dp * topology.ep * schedule.num_micro_batches * schedule.micro_batch_size
            return sequences * spec.model.seq_length / topology.num_ranks / (float(simulation.makespan) / _MICRO)
        case Quantity.ALLOCATED:
            return simulation.memory[-1].peak / GIB
        case Quantity.ALLOCATED_ANY:
            return max(curve.peak for curve in simulation.memory) / GIB
        case Quantity.PAIR:
            middle = spec.topology.pp // 2
            return float(resolved_cost(spec).overlapped_of(middle - 1, middle)) / 1000


def by_group(predictions: Iterable[Prediction]) -> Mapping[tuple[str, Quantity], list[Prediction]]:
    """Return the predictions of each group and quantity, in the order of their first rows."""
    groups: dict[tuple[str, Quantity], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.measurement.group, prediction.measurement.quantity), []).append(prediction)
    return groups


def accuracies(predictions: Iterable[Prediction]) -> list[Accuracy]:
    """Return the errors of each group, in the order of their first rows."""
    result = []
    for (group, quantity), rows in by_group(predictions).items():
        errors = [row.error for row in rows if row.predicted is not None]
        sizes = [abs(error) for error in errors]
        without = [
            fmean(abs(row.error_without(left_out)) for row in rows if row.predicted is not None) if sizes else None
            for left_out in LeftOut
        ]
        result.append(
            Accuracy(
                group,
                quantity,
                len(errors),
                len(rows) - len(errors),
                max((error for error in without if error is not None), default=None),
                *without,
                fmean(sizes) if sizes else None,
                median(sizes) if sizes else None,
                max(errors, key=abs, default=None),
                fmean(errors) if errors else None,
            )
        )
    return result
