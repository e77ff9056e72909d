"""Fits the curves of ``pipeproof/cost/device_tables.py`` to published measurements and prints them with residuals.

``python benchmarks/fit_device_tables.py DIRECTORY [--left-out]`` reads ``*_sxm.gemm.parquet`` and
``*_sxm.nccl.parquet``: tables of ai-dynamo/aiconfigurator (systems data, Apache-2.0; TensorRT-LLM 1.3.0rc20, NCCL
2.29.2). It needs numpy, scipy, pandas and pyarrow, and takes a minute.

Products: of every size from 256 on with m a multiple of 128, least squares of log(time) with a soft L1 loss. The
measured time in eight and four bits includes the cast of the activations [m, k] from bfloat16, which is a term of the
fit and not of the table: a plan counts its own casts.

Collectives: ``message_size`` counts elements. The table has 2^28 elements in ``half`` and 2^29 in ``int8`` at nearly
the same time (within a few percent where no switch adds; an all-gather of 8 ranks 1401 and 1399 us), so bytes are
moved. The elements are of the whole tensor: counted for one rank's part they would be 2.7 TB/s over links of 450 GB/s.

With ``--left-out`` every fourth of a curve's sizes, by work or by bytes, is left out in turn, and predicted by the
curve of the others. Then each quarter is left out: the first and the last lie outside of the fitted sizes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

DEVICES = {"h100": (989.4, 1978.9, None, 3350), "h200": (989, 1979, None, 4800), "b200": (2250, 4500, 9000, 8000)}
"""Peaks in TFLOP/s in bfloat16, float8 and float4, and memory in GB/s, from the data sheets."""

DTYPES = {"bfloat16": ("bfloat16", 0, 2), "fp8": ("float8", 1, 1), "fp8_block": ("float8_block", 1, 1),
          "nvfp4": ("float4", 2, 0.5625)}  # fmt: skip
"""Names in the tables: (ours, index of the peak, bytes of an element with its share of the scales)."""

KINDS = {"all_reduce": "ALL_REDUCE", "all_gather": "ALL_GATHER", "reduce_scatter": "REDUCE_SCATTER",
         "alltoall": "ALL_TO_ALL"}  # fmt: skip


def fit(model: Any, times: Any, start: list[float], low: list[float], high: list[float]) -> tuple[Any, Any]:
    """The constants of ``model`` and the residuals of log(time)."""
    fitted = least_squares(
        lambda x: np.log(model(x) / times), start, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale="jac"
    )
    return fitted.x, np.log(model(fitted.x) / times)


def left_out(model: Any, sizes: list[Any], times: Any, bounds: Any) -> str:
    """Median residuals of sizes that are left out: every fourth one in turn, then each quarter, the smallest first."""
    ranks = np.argsort(np.argsort(np.prod(sizes, axis=0), kind="stable"), kind="stable")

    def residuals(out: Any) -> Any:
        some, rest = [axis[out] for axis in sizes], [axis[~out] for axis in sizes]
        constants, _ = fit(lambda x: model(x, *rest), times[~out], *bounds)
        return np.abs(np.log(model(constants, *some) / times[out]))

    inside = np.concatenate([residuals(ranks % 4 == turn) for turn in range(4)])
    outside = [residuals(4 * ranks // len(times) == quarter) for quarter in range(4)]
    quarters = ", ".join(f"{100 * np.median(sizes):.1f} %" for sizes in outside)
    return f"every fourth left out: {100 * np.median(inside):.1f} %; each quarter: {quarters}"


def products(directory: Path, device: str, *, is_left_out: bool) -> None:
    """Print a row for each type."""
    table = pd.read_parquet(directory / f"{device}_sxm.gemm.parquet")
    for name, (dtype, index, size) in DTYPES.items():
        rows = table[(table.gemm_dtype == name) & (table.m % 128 == 0)]
        rows = rows[(rows[["m", "n", "k"]] >= 256).all(axis=1)]
        if rows.empty:
            continue
        m, n, k = (rows[axis].to_numpy(float) for axis in "mnk")
        peak, memory = DEVICES[device][index], DEVICES[device][3]
        assert peak is not None

        def model(x: Any, m: Any = m, n: Any = n, k: Any = k, peak: float = peak, size: float = size,
                  memory: float = memory) -> Any:  # fmt: skip
            efficiency, spare, inner, slowdown, start, cast = x[0], np.exp(x[1]), np.exp(x[2]), x[3], x[4], x[5]
            flops = 2 * m * n * k
            compute = 2 * (m * n + spare) * (k + inner) / (peak * 1e6 * efficiency)
            compute *= 1 + slowdown * flops / (flops + peak * 1e9)
            moved = (size * (m * k + n * k) + 2 * m * n) / (0.8 * memory * 1e3)
            return start + cast * m * k / (memory * 1e3) + np.maximum(compute, moved)

        no_cast = 1e-6 if dtype == "bfloat16" else 40.0
        low, high = [0.2, 2, 0, 0, 0.1, 0], [1, 18, 8, 4, 30, no_cast]
        times, bounds = rows.latency.to_numpy() * 1e3, ([0.75, 12, 5, 0.1, 3, no_cast / 8], low, high)
        if is_left_out:
            print(f"{device} {dtype} products, {left_out(model, [m, n, k], times, bounds)}")
            continue
        x, residual = fit(model, times, *bounds)
        row = f'("{dtype}", {x[0]:.3f}, {np.exp(x[1]):.3g}, {np.exp(x[2]):.0f}, {x[3]:.2f}, {x[4]:.1f})'
        print(f"{device} {row}, cast {x[5]:.1f} bytes; {len(rows)} rows, {spread(residual)}")


def collectives(directory: Path, device: str, *, is_left_out: bool) -> None:
    """Print a row for each kind and number of ranks."""
    table = pd.read_parquet(directory / f"{device}_sxm.nccl.parquet")
    for (name, ranks), rows in table[table.nccl_dtype == "half"].groupby(["op_name", "num_gpus"]):
        times = rows.latency.to_numpy() * 1e3
        moved = rows.message_size.to_numpy(float) * 2 * (ranks - 1) / ranks * (2 if name == "all_reduce" else 1)

        def model(x: Any, moved: Any = moved) -> Any:
            latency, ramp, ramp_bytes, bandwidth = np.exp(x)
            return latency + ramp * moved / (moved + ramp_bytes) + moved / (bandwidth * 1e3)

        start = np.log([times.min(), 15, 1e6, 330])
        bounds = list(start), list(start - 8), list(start + 8)
        if is_left_out:
            print(f"{device} {KINDS[name]} of {ranks}, {left_out(model, [moved], times, bounds)}")
            continue
        x, residual = fit(model, times, *bounds)
        latency, ramp, ramp_bytes, bandwidth = np.exp(x)
        row = f'("{KINDS[name]}", {ranks}, {latency:.1f}, {ramp:.1f}, {ramp_bytes:.3g}, {bandwidth:.0f})'
        print(f"{device} {row}, {len(rows)} rows, {spread(residual)}")


def spread(residual: Any) -> str:
    """Median and 90th percentile of the size of residuals, and their mean."""
    size = 100 * np.abs(residual)
    return f"residual {np.median(size):.1f} %, p90 {np.quantile(size, 0.9):.0f} %, mean {100 * residual.mean():+.1f} %"


ATTENTION = {"H200, 32 heads of 8,192 tokens": (8192, 0.58, 0.50), "H200, 16 heads of 8,192": (8192, 0.52, 0.46),
             "H800, 4,096 tokens": (4096, 0.56, 0.43)}  # fmt: skip
"""Keys, and shares of peak forward and backward: ``docs/costs.md`` has their origin."""

_SPARE_KEYS = 256


def attention() -> None:
    """Print each measured share of attention, and the share that the mean of the others gives."""
    for name, (keys, *shares) in ATTENTION.items():
        others = [of for other, of in ATTENTION.items() if other != name]
        text = []
        for number, share in enumerate(shares, 1):
            limit = np.mean([of[number] * (of[0] + _SPARE_KEYS) / of[0] for of in others])
            text.append(f"{share:.2f}, of the others {limit * keys / (keys + _SPARE_KEYS):.2f}")
        print(f"attention on {name}: forward {text[0]}; backward {text[1]}")


def main() -> None:
    """Print the curves of all devices, or the predictions for each quarter by the curves of the other sizes."""
    is_left_out = "--left-out" in sys.argv
    for device in DEVICES:
        products(Path(sys.argv[1]), device, is_left_out=is_left_out)
        collectives(Path(sys.argv[1]), device, is_left_out=is_left_out)
    if is_left_out:
        attention()


if __name__ == "__main__":
    main()
