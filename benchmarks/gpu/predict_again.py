"""Predictions anew from the measurements of ``prediction.py``, in place; no GPU is needed.

    python benchmarks/gpu/predict_again.py validation/results/prediction.json

After a change of the method (``predicting.py``): steps and starts of operations. Printed is the error
of each step, before and after. Memory and replayed steps stay as they were predicted when they were measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from predicting import (
    Measured,
    OpTimes,
    Power,
    cost_of,
    predicted_starts,
    spans_of,
    start_errors,
    with_power,
)
from sizes import Size

from pipeproof.comm.lower import lower
from pipeproof.specs.load_plan import plan_from_dict


def predict(case: dict[str, Any], size: dict[str, Any], num_ranks: int) -> None:
    """Put the prediction of a schedule into its case."""
    shape = Size(size["hidden"], size["sequence"], size["layers_a_rank"], case["num_micro_batches"])
    data = shape.plan(case["kind"], num_ranks)
    plan = lower(plan_from_dict(data).spec)
    measured = Measured(
        size["stages"], size["chunks_alone"], size["message_us"], size["between_us"], [0] * num_ranks,
        Power(size["busy"], size["slower_alone"]),
    )  # fmt: skip
    cost, simulation = with_power(plan, data, cost_of(plan, measured), measured.power)
    step_us, starts, lengths = predicted_starts(simulation, cost)
    own: OpTimes = {(rank, op): begin for rank, op, begin, _ in case["measured"]}
    largest, most = start_errors(starts, own)
    case |= {
        "predicted_us": step_us, "largest_start_error_us": largest, "p95_start_error_us": most,
        "predicted": spans_of(starts, lengths),
    }  # fmt: skip


def main() -> None:
    """Predict all cases of the files that the command line names."""
    for file in map(Path, sys.argv[1:]):
        results = json.loads(file.read_text(encoding="utf-8"))
        for size in results["sizes"]:
            for case in size["cases"]:
                before = case["predicted_us"] / case["measured_us"] - 1
                predict(case, size, results["num_ranks"])
                after = case["predicted_us"] / case["measured_us"] - 1
                name = f"{size['hidden']} {case['kind']} {case['num_micro_batches']}"
                print(f"{file.name} {name}: {before:+.1%} -> {after:+.1%}")
        file.write_text(json.dumps(results, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
