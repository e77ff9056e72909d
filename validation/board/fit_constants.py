"""Fits the constants of ``fitted.json``: to all of their rows, and without each model and each system.

A constant of a family of devices is the value of a grid with the smallest mean error, interpolated between predictions;
every system and model together has the same weight. The host of Megatron-LM's tests is fitted by least squares: each of
its steps is linear in the time of an operation, because the host bounds it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from validation.board import constants
from validation.board.accuracy_board import Predictor
from validation.board.constants import FAMILIES, LOCAL, PRODUCTS, STEP_LAUNCHES, LeftOut, with_constants
from validation.board.measurement import Measurement, Quantity

Fit = Callable[[Sequence[Measurement]], Mapping[str, float]]
_HOSTS_US = (50.0, 150.0)
_ONE_NODE = "vTrain, one node"
_EACH_OF_ONE_NODE = 6
"""One of so many rows of vTrain on one node is fitted to."""
_NUM_FINE = 4
"""Values between two of a grid."""


@dataclass(frozen=True)
class _Grid:
    """A constant of a family: the values that are predicted, and the rows that it is fitted to.

    ``without`` is its value if no row is left: the value of another family, of another system or of a table.
    """

    name: str
    values: tuple[float, ...]
    without: float
    is_fitted_to: Callable[[Measurement], bool]


def _device(row: Measurement) -> str:
    return "" if row.plan is None else str(row.plan["cost"]["analytic"]["device"])


def _is_dense(row: Measurement) -> bool:
    """Return True for trainings of dense models but in NVFP4, whose products have larger errors."""
    is_dense = row.group.startswith("405B") or row.group == "Megatron-Bridge, dense"
    return is_dense and row.plan is not None and row.plan["cost"]["analytic"].get("matmul_dtype") != "float4"


def _grids(tests: Mapping[str, float], local: float) -> Iterator[_Grid]:
    """Yield the constants of families of devices.

    ``tests`` has the time of the host by the machines of tests, ``local`` its share with Megatron-LM's own modules.
    """
    for family, without in (("hopper", 0.4375), ("blackwell", 0.525)):
        shares, devices = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7), FAMILIES[family]
        yield _Grid(
            constants.memory_share(family),
            shares,
            without,
            lambda row, of=devices: _device(row) in of and _is_dense(row),
        )
    ampere = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
    yield _Grid(constants.memory_share("ampere"), ampere, 0.525, lambda row: row.group.startswith("vTrain"))
    yield _Grid(
        constants.host_us("blackwell"),
        (80, 100, 120, 140, 160),
        geometric_mean(value for name, value in tests.items() if "GB200" in name),
        lambda row: _device(row) in FAMILIES["blackwell"] and row.group == "Megatron-Bridge, MoE",
    )
    a100 = local * geometric_mean(value for name, value in tests.items() if "A100" in name)  # as Megatron-DeepSpeed
    hosts = (48, 52, 56, 60, 64, 68)
    yield _Grid(constants.host_us("ampere"), hosts, round(a100, 1), lambda row: row.group == _ONE_NODE)
    b200 = 0.733
    yield _Grid(
        PRODUCTS,
        (0.7, 0.733, 0.77, 0.8, 0.83),
        b200,
        lambda row: _device(row) in ("gb300", "b300") and _is_dense(row),
    )


def fit_constants(rows: Sequence[Measurement], pool: Executor | None = None) -> dict[str, dict[str, Any]]:
    """Return the content of ``fitted.json`` for these rows; ``pool`` makes the predictions."""
    predicted = [row for row in rows if row.plan is not None and row.quantity is not Quantity.ALLOCATED]
    mapped: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    tests = [row for row in predicted if row.group.startswith("Megatron-LM, dense")]
    slopes = {id(row): slope for row, slope in zip(tests, mapped(_slope, tests), strict=True)}
    result = _folds(tests, lambda kept: _fit_hosts(kept, slopes))
    hosts = {name: float(values["all"]) for name, values in result.items() if name.startswith("host_us")}
    local = float(result[LOCAL]["all"]) if LOCAL in result else 1.0
    for grid in _grids(hosts, local):
        chosen = [row for row in predicted if grid.is_fitted_to(row)]
        of_one_node = [row for row in chosen if row.group == _ONE_NODE]
        chosen = [row for row in chosen if row.group != _ONE_NODE] + of_one_node[::_EACH_OF_ONE_NODE]
        plans = {_key(row): row for row in chosen}  # several rows have one plan
        found = dict(zip(plans, mapped(partial(_predictions, grid.name, grid.values), plans.values()), strict=True))
        errors = {id(row): list(np.log(np.array(found[_key(row)]) / row.measured)) for row in chosen}

        def fit(kept: Sequence[Measurement], grid: _Grid = grid, errors: Any = errors) -> Mapping[str, float]:
            return {grid.name: _best(grid, kept, errors) if kept else grid.without}

        if chosen:
            result |= _folds(chosen, fit)
    return result


def fitted_to_text(constants_by_name: Mapping[str, Any]) -> str:
    """Return the content of ``fitted.json``."""
    return json.dumps(constants_by_name, indent=1, sort_keys=True) + "\n"


def _folds(rows: Sequence[Measurement], fit: Fit) -> dict[str, dict[str, Any]]:
    """Fit to all rows, and without each model and each system."""
    found: dict[str, dict[str, Any]] = {
        name: {"all": value, LeftOut.MODEL: {}, LeftOut.SYSTEM: {}} for name, value in fit(rows).items()
    }
    for left_out in LeftOut:
        of: Callable[[Measurement], str] = lambda row, left_out=left_out: getattr(row, left_out)  # noqa: E731
        for key in sorted({of(row) for row in rows}):
            values = fit([row for row in rows if of(row) != key])
            for name, entry in found.items():
                entry[left_out][key] = values[name] if name in values else _transferred(name, values)
    return found


def _transferred(name: str, values: Mapping[str, float]) -> float:
    """Return a constant without a row of its own: the mean of other systems with the device, or of all others."""
    kind, _, where = name.partition(", ")
    others = {other: value for other, value in values.items() if other.startswith(kind)}
    device = where.split(",")[0]
    same_device = [value for other, value in others.items() if other.startswith(f"{kind}, {device},")]
    return round(geometric_mean(same_device or list(others.values())), 1)


def _key(row: Measurement) -> str:
    return json.dumps(row.plan, sort_keys=True)


def _predictions(name: str, values: Sequence[float], row: Measurement) -> list[float]:
    """Return the predictions at the values of a grid."""
    return [_predicted(with_constants(row, {name: value})) for value in values]


def _predicted(row: Measurement) -> float:
    value = Predictor().value(row)
    assert not isinstance(value, str), "only rows with a prediction are fitted to"
    return value


def _best(grid: _Grid, rows: Sequence[Measurement], errors: Mapping[int, list[float]]) -> float:
    fine = [
        low + (high - low) * step / _NUM_FINE
        for low, high in zip(grid.values, grid.values[1:], strict=False)
        for step in range(_NUM_FINE)
    ] + [grid.values[-1]]
    by_kind: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        by_kind[row.system, row.model].append(np.abs(np.interp(fine, grid.values, errors[id(row)])))
    means = np.mean([np.mean(of, axis=0) for of in by_kind.values()], axis=0)
    return round(float(fine[int(np.argmin(means))]), 4)


def _slope(row: Measurement) -> tuple[float, float]:
    """Seconds of a step without the host, and further seconds for each microsecond of an operation."""
    steps = []
    for each_us in _HOSTS_US:
        assert row.plan is not None
        cost = row.plan["cost"]
        analytic = {**cost["analytic"], **constants.host_times(each_us, 0)}
        changed = Measurement(**{**vars(row), "plan": {**row.plan, "cost": {**cost, "analytic": analytic}}})
        steps.append(_predicted(changed))
    low, high = _HOSTS_US
    slope = (steps[1] - steps[0]) / (high - low)
    return steps[0] - slope * low, slope


def _is_local(row: Measurement) -> bool:
    return "local" in row.model or "uninstall_te" in row.model


def _fit_hosts(rows: Sequence[Measurement], slopes: Mapping[int, tuple[float, float]]) -> Mapping[str, float]:
    """Fit the time of an operation of each system, the operations of a step, and the share of local modules."""
    systems = sorted({row.system for row in rows})

    def residuals(x: np.ndarray) -> list[float]:
        hosts, launches, local = np.exp(x[:-2]), np.exp(x[-2]), np.exp(x[-1])
        found = [0.3 * float(x[-1])]  # no local module: as the others
        for row in rows:
            base, slope = slopes[id(row)]
            each = hosts[systems.index(row.system)]
            step = base + each * (slope * (local if _is_local(row) else 1) + launches * 1e-6)
            found.append(float(np.log(step / row.measured)))
        return found

    start = np.log([*[80.0] * len(systems), 400.0, 0.9])
    x = np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=0.05).x)
    hosts = {constants.host_us(system): round(float(each), 1) for system, each in zip(systems, x, strict=False)}
    return {**hosts, STEP_LAUNCHES: round(float(x[-2])), LOCAL: round(float(x[-1]), 2)}
