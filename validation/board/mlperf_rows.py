"""Step times of Llama 3.1 405B in MLPerf Training, from the logs of its submissions."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from pipeproof.interop.tune_models import MODELS
from validation.board.measurement import (
    Cells,
    Measurement,
    NoPlanError,
    Quantity,
    divided,
    known_device,
    measured_with_plan,
    megatron_schedule,
    partition,
)

COLUMNS = frozenset({"system", "run", "gbs", "seq", "median_s", "tp", "pp", "vpp", "cp", "mbs", "nodes", "config"})
_BENCHMARK = "llama31_405b"
_SYSTEM = re.compile(r"config_(?:DGX)?([A-Z]+\d+)_(\d+)x(\d+)x", re.ASCII)


def mlperf_rows(cells: Cells) -> tuple[Measurement]:
    """Return the measurement of a run.

    Raises:
        MeasurementFileError: a cell cannot be read.
    """
    system = _SYSTEM.match(cells.text("config"))
    device_name = system.group(1) if system else cells.text("config")
    num_ranks = cells.count("nodes") * (int(system.group(3)) if system else 8)
    group = f"405B on {device_name}"
    name = f"{num_ranks} {device_name}, {cells.text('system')} run {cells.text('run')}"
    make_plan = partial(_plan, cells, dict(MODELS["llama3.1_405b"].keys), device_name, num_ranks)
    of = {"system": f"{device_name}, {cells.text('system').split('_')[0]}", "model": "llama3.1_405b"}
    return (measured_with_plan(group, name, Quantity.STEP, cells.number("median_s"), make_plan, **of),)


def _plan(cells: Cells, model: dict[str, Any], device_name: str, num_ranks: int) -> dict[str, Any]:
    device = known_device(device_name)
    if cells.by_column.get("bench", _BENCHMARK) != _BENCHMARK:
        raise NoPlanError(f"the board has no plan of the benchmark {cells.text('bench')}")
    tp, pp, cp, num_chunks = (cells.count(name, 1) for name in ("tp", "pp", "cp", "vpp"))
    dp = divided(num_ranks, tp * pp * cp, "ranks over tp, pp and cp")
    return {
        "pipeproof": 1,
        "model": {"kind": "gpt", **model, "seq_length": cells.count("seq")},
        "topology": {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "sequence_parallel": tp > 1},
        "schedule": megatron_schedule(num_chunks, cells.count("gbs"), dp, cells.count("mbs")),
        "stages": partition(model["num_layers"], pp * num_chunks),
        "cost": {
            "analytic": {
                "device": device,
                "dtype": "bfloat16",
                "matmul_dtype": "float8",
                "overlap": ["tp"],
                "execution": "graph" if "_cg" in cells.text("config") else "eager",
            }
        },
        "memory": {
            "shard_optimizer": "dp",
            "gradient_dtype": "bfloat16",
            "cross_entropy": "compiled",
            "sequence_parallel_activations": "regather" if tp > 1 else "keep",
        },
    }
