"""Intervals of predicted steps from the errors of measured ones, and how many held-out models they cover.

The errors are of predictions with constants of other systems. An interval is for the next model, so every model on a
system has the same weight, and each of its rows a share of it: a training that was measured 100 times counts as much
as one that was measured once. The 80 % interval is the conformal quantile of the sizes of errors: the smallest share
that covers 0.8 (n + 1) of n models. Fewer than five models are too few for it: then the interval also covers four of
five models on all devices with the same kind of model and bound.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log1p
from typing import Any

from pipeproof.cost.step_error import FEW_MODELS

LEVEL = 0.8


@dataclass(frozen=True)
class Residual:
    """The error of a row: log(predicted / measured time) with constants of other systems; and what is comparable."""

    device: str
    has_experts: bool
    bound: str
    system: str
    model: str
    error: float


@dataclass(frozen=True)
class _Errors:
    """Rows that are comparable, and those on all devices; a bound of ``""`` has the rows of all bounds."""

    own: Sequence[Residual]
    of_all_devices: Sequence[Residual]

    def within(self) -> float:
        """Return the share of the interval."""
        found = _quantile(self.own)
        return max(found, _quantile(self.of_all_devices)) if num_models(self.own) < FEW_MODELS else found


def num_models(rows: Iterable[Residual]) -> int:
    """Return the number of models, on all systems together."""
    return len({row.model for row in rows})


def _weights(rows: Sequence[Residual]) -> list[float]:
    """Return the share of each row in its model on its system."""
    counts = Counter((row.system, row.model) for row in rows)
    return [1 / counts[row.system, row.model] for row in rows]


def _quantile(rows: Sequence[Residual]) -> float:
    """Return the share that covers 0.8 of the models and of one more; the largest error if that is all of them."""
    weights = _weights(rows)
    wanted, covered = LEVEL * (sum(weights) + 1) - 1e-9, 0.0
    ranked = sorted((abs(row.error), weight) for row, weight in zip(rows, weights, strict=True))
    for size, weight in ranked:
        covered += weight
        if covered >= wanted:
            return exp(size) - 1
    return exp(ranked[-1][0]) - 1


def _by_kind(rows: Sequence[Residual]) -> Mapping[tuple[str, bool, str], _Errors]:
    """Return the errors of each device and kind of model by their bound; ``""`` has the rows of all bounds."""
    found: dict[tuple[str, bool, str], list[Residual]] = defaultdict(list)
    everywhere: dict[tuple[bool, str], list[Residual]] = defaultdict(list)
    for row in rows:
        for bound in (row.bound, ""):
            found[row.device, row.has_experts, bound].append(row)
            everywhere[row.has_experts, bound].append(row)
    return {key: _Errors(of, everywhere[key[1:]]) for key, of in found.items()}


def step_errors(rows: Sequence[Residual]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the content of ``step_errors.json``: models, rows, mean of sizes and share of the interval, by kind."""
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (device, has_experts, bound), errors in sorted(_by_kind(rows).items()):
        own, weights = errors.own, _weights(errors.own)
        mean = sum(w * abs(exp(row.error) - 1) for row, w in zip(own, weights, strict=True)) / sum(weights)
        by_bound = table.setdefault(device, {}).setdefault("experts" if has_experts else "dense", {})
        by_bound[bound] = [num_models(own), len(own), round(mean, 3), round(errors.within(), 3)]
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
    """Held-out models of a device and kind of model, their rows, and the mean share of a model's rows in the interval.

    A model counts once for each system.
    """

    kind: str
    num_models: int
    num_rows: int
    covered: float


def coverages(rows: Sequence[Residual]) -> list[Coverage]:
    """Return by device and kind of model the rows whose interval comes from other models, and how many it covers."""
    without = {model: _by_kind([row for row in rows if row.model != model]) for model in {row.model for row in rows}}
    inside: dict[str, list[tuple[Residual, bool]]] = defaultdict(list)
    for row in rows:
        others = without[row.model]
        chosen = others.get((row.device, row.has_experts, row.bound), others.get((row.device, row.has_experts, "")))
        if chosen is not None:
            kind = f"{row.device}, {'experts' if row.has_experts else 'dense'}"
            inside[kind].append((row, abs(row.error) <= log1p(chosen.within()) + 1e-9))
    return [_coverage(kind, of) for kind, of in sorted(inside.items())]


def all_of(found: Sequence[Coverage]) -> Coverage:
    """Return the coverage of all kinds together; a model counts once for each device and system."""
    models = sum(one.num_models for one in found)
    covered = sum(one.num_models * one.covered for one in found) / models
    return Coverage("all", models, sum(one.num_rows for one in found), covered)


def _coverage(kind: str, inside: Sequence[tuple[Residual, bool]]) -> Coverage:
    weights = _weights([row for row, _ in inside])
    models = round(sum(weights))
    covered = sum(weight for weight, (_, is_inside) in zip(weights, inside, strict=True) if is_inside)
    return Coverage(kind, models, len(inside), covered / models)
