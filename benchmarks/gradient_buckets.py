"""Errors of published trainings without and with the buckets and the overlap that recipes of Megatron-LM have.

``python benchmarks/gradient_buckets.py [SET ...]``: ``mlperf`` takes 10 s, and ``megatron-bridge`` about two minutes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from validation.board.accuracy_board import MEASUREMENTS, Predictor, read_measurements
from validation.board.measurement import Measurement

VARIANTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "each weight by itself": ({}, {}),
    "buckets": ({"bucket_size": "megatron"}, {"optimizer_ranks": "replicas"}),
    "buckets and early gathers": (
        {"bucket_size": "megatron", "gather_weights": "first_forward"},
        {"optimizer_ranks": "replicas"},
    ),
}
"""Keys of ``cost`` and of ``memory`` that each variant adds."""


def _changed(measurement: Measurement, variant: str) -> Measurement:
    cost, memory = VARIANTS[variant]
    plan = measurement.plan
    assert plan is not None
    sections = {"cost": {**plan["cost"], **cost}, "memory": {**plan["memory"], **memory}}
    return replace(measurement, plan={**plan, **sections})


def main() -> None:
    """Print the mean absolute error and the bias of each group and variant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("sets", nargs="*", default=["mlperf", "megatron-bridge"], metavar="SET")
    chosen = parser.parse_args().sets
    predictor = Predictor()
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for file in read_measurements([MEASUREMENTS])[0]:
        for row in file.rows if file.set in chosen else ():
            for variant in VARIANTS if row.plan is not None else ():
                prediction = predictor.predict(_changed(row, variant))
                if prediction.predicted is not None:
                    errors[row.group, variant].append(prediction.error)
    for (group, variant), of_rows in errors.items():
        mape = fmean(map(abs, of_rows))
        print(f"{group:24} {variant:26} {len(of_rows):3} rows {mape:6.1%} bias {fmean(of_rows):+6.1%}")


if __name__ == "__main__":
    main()
