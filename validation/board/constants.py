"""Constants that are fitted to trainings, and what each row is predicted with when it is scored.

``fitted.json`` has each constant as fitted to all of its rows, without each model and without each system. The package
rounds the constants of families of devices; plans of the board have the constants of the machines of tests as they are.
A row is scored with constants that were fitted to other models than its own, and again with constants of other systems.
``python -m validation.board --fit`` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.cost.device_tables import device_table
from pipeproof.specs.cost_table import CostTable
from validation.board.measurement import Measurement

FITTED = Path(__file__).parent / "fitted.json"
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"ampere": ("a100",), "hopper": ("h100", "h200", "h800"), "blackwell": ("b200", "gb200", "b300", "gb300")}
)
"""Devices that share a constant."""
PRODUCTS = "share of peak in products, GB300 and B300"
STEP_LAUNCHES = "operations of a step"
LOCAL = "local modules"


class LeftOut(StrEnum):
    """The rows that a constant is not fitted to: all rows of the scored row's model, or of its system."""

    MODEL = "model"
    SYSTEM = "system"


def memory_share(family: str) -> str:
    """Return the name of the constant of a family of devices: the share of memory bandwidth."""
    return f"share of memory bandwidth, {family}"


def host_us(where: str) -> str:
    """Return the name of the constant of a family of devices, or of the machines of tests: the time of an operation."""
    return f"host_us, {where}"


@cache
def fitted() -> Mapping[str, Mapping[str, Any]]:
    """Return the file: by constant ``all``, and ``model`` and ``system`` with values by what was left out."""
    content: Mapping[str, Mapping[str, Any]] = json.loads(FITTED.read_text(encoding="utf-8"))
    return content


def value_of(name: str) -> float:
    """Return a constant as fitted to all rows."""
    return float(fitted()[name]["all"])


def without(row: Measurement, left_out: LeftOut) -> Mapping[str, float]:
    """Return the constants without the rows of the model or of the system of ``row``, those that were fitted to it."""
    key = row.model if left_out is LeftOut.MODEL else row.system
    return {name: values[left_out][key] for name, values in fitted().items() if key in values[left_out]}


def with_constants(row: Measurement, values: Mapping[str, float]) -> Measurement:
    """Return the row with a plan that has these constants in place of the package's and the board's."""
    assert row.plan is not None
    cost = row.plan["cost"]
    analytic = cost["analytic"]
    changed = {**analytic, **_table(analytic["device"], values), **_host(row, analytic, values)}
    return row if changed == analytic else replace(row, plan={**row.plan, "cost": {**cost, "analytic": changed}})


def _table(device: str, values: Mapping[str, float]) -> dict[str, Any]:
    known = device_table(device)
    family = next((name for name, devices in FAMILIES.items() if device in devices), "")
    table: CostTable | None = known
    if table is None:
        return {}
    for name, key in ((memory_share(family), "memory_efficiency"), (host_us(family), "host_us")):
        if name in values:
            table = table.model_copy(update={key: values[name]})
    if PRODUCTS in values and device in ("gb300", "b300"):
        products = tuple(
            curve.model_copy(update={"efficiency": values[PRODUCTS]})
            if curve.dtype in ("bfloat16", "float8")
            else curve
            for curve in table.products
        )
        table = table.model_copy(update={"products": products})
    return {} if table == known else {"table": table.model_dump(mode="json")}


def _host(row: Measurement, analytic: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, float]:
    """Return the times of the host of a test of Megatron-LM; none for rows that have the times of their device."""
    name = host_us(row.system)
    if name not in fitted() or "step_us" not in analytic:
        return {}
    now = value_of(name)
    is_local = analytic["host_us"] < now
    local, launches = values.get(LOCAL, value_of(LOCAL)), values.get(STEP_LAUNCHES, value_of(STEP_LAUNCHES))
    return host_times(values.get(name, now), launches, local if is_local else 1)


def host_times(each_us: float, step_launches: float, share: float = 1) -> dict[str, float]:
    """Return the keys of ``cost.analytic`` for a time of an operation; a collective in a layer takes as long as two."""
    return {
        "host_us": round(share * each_us, 3),
        "collective_us": round(2 * share * each_us, 3),
        "step_us": round(step_launches * each_us, 3),
    }
