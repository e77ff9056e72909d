"""Intervals of predicted steps from the errors of measured ones, and how many held-out rows they cover.

The errors are of predictions with constants of other systems. The 80 % interval of a kind is the conformal
quantile of their sizes: the smallest share that covers 0.8 (n + 1) of n rows. A row is held out with all rows of its
model: its interval comes from the other models.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log1p
from statistics import fmean
from typing import Any

LEVEL = 0.8
_FEWEST_ROWS = 5
"""Rows from which on a bound has an interval of its own."""
_FEWEST = 3
"""Rows from which on a device and kind of model have one."""


@dataclass(frozen=True)
class Residual:
    """The error of a row: log(predicted / measured time) with constants of other systems; and what is comparable."""

    device: str
    has_experts: bool
    bound: str
    model: str
    error: float


def _within(rows: Sequence[Residual]) -> float:
    """Return the share that covers 0.8 of the rows and of one more; the largest if that is all of them."""
    sizes = sorted(abs(row.error) for row in rows)
    return exp(sizes[min(len(sizes), ceil(LEVEL * (len(sizes) + 1))) - 1]) - 1


def _by_kind(rows: Iterable[Residual]) -> Mapping[tuple[str, bool, str], list[Residual]]:
    """Return the rows of each device and kind of model by their bound; ``""`` has the rows of all bounds."""
    found: dict[tuple[str, bool, str], list[Residual]] = defaultdict(list)
    for row in rows:
        for bound in (row.bound, ""):
            found[row.device, row.has_experts, bound].append(row)
    return {key: of for key, of in found.items() if len(of) >= (_FEWEST_ROWS if key[2] else _FEWEST)}


def step_errors(rows: Iterable[Residual]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the content of ``step_errors.json``: rows, mean of sizes, and share of the interval, by kind."""
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (device, has_experts, bound), of in sorted(_by_kind(rows).items()):
        mean = fmean(abs(exp(row.error) - 1) for row in of)
        by_bound = table.setdefault(device, {}).setdefault("experts" if has_experts else "dense", {})
        by_bound[bound] = [len(of), round(mean, 3), round(_within(of), 3)]
    return table


def to_text(table: Mapping[str, Any]) -> str:
    """Return the table as JSON, a line for each device and kind of model."""
    lines = [
        f'  "{device}": {{\n' + ",\n".join(f'    "{kind}": {json.dumps(of)}' for kind, of in kinds.items()) + "\n  }"
        for device, kinds in table.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class Coverage:
    """Held-out rows of a device and kind of model, and those that lie in their interval."""

    kind: str
    num_rows: int
    covered: int


def coverages(rows: Sequence[Residual]) -> list[Coverage]:
    """Return by device and kind of model the rows whose interval comes from other models, and those that it covers."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        others = _by_kind(other for other in rows if other.model != row.model)
        own = (row.device, row.has_experts, row.bound)
        chosen = others.get(own, others.get((*own[:2], "")))
        if chosen is not None:
            kind = f"{row.device}, {'experts' if row.has_experts else 'dense'}"
            counts[kind].append(abs(row.error) <= log1p(_within(chosen)) + 1e-9)
    return [Coverage(kind, len(of), sum(of)) for kind, of in sorted(counts.items())]
