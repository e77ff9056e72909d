"""Fits the all-reduces of an A100 to what vTrain measured.

``python benchmarks/fit_vtrain.py DIRECTORY`` prints the rows of `pipeproof/cost/device_tables.py` for all-reduces among
2, 4 and 8 A100 of a node, with residuals. DIRECTORY has `AR_GPU2_1M_1024M_LUT` and so on of VIA-Research/vTrain
(MIT; commit f8dda84, `trace/a100`): sizes from 1 MiB to 1 GiB in steps of 1 MiB. The sizes nearest to quarter powers of
two are fitted: small and large sizes then count equally. Fewer ranks start no later than more of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

_MIB = 2**20


def all_reduces(directory: Path) -> None:
    """Print a row for each number of ranks."""
    most = 1e3
    for ranks in (8, 4, 2):
        size, nanoseconds = np.loadtxt(
            directory / f"AR_GPU{ranks}_1M_1024M_LUT", delimiter=",", skiprows=1, usecols=(0, 3), unpack=True
        )
        kept = sorted({int(np.argmin(abs(size - _MIB * 2 ** (quarter / 4)))) for quarter in range(41)})
        moved, times = 2 * (ranks - 1) / ranks * size[kept], nanoseconds[kept] / 1000

        def residuals(x: np.ndarray, moved: np.ndarray = moved, times: np.ndarray = times) -> np.ndarray:
            latency, ramp, ramp_bytes, bandwidth = x
            us = latency + ramp * moved / (moved + ramp_bytes) + moved / (bandwidth * 1e3)
            return np.asarray(np.log(us / times))

        bounds = [0, 0, 1e3, 1], [most, 1e4, 1e10, 1e4]
        start = [30, 50, 5e6, 230]
        fitted = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1, x_scale="jac").x
        latency, ramp, ramp_bytes, bandwidth = fitted
        most = latency
        errors = 100 * abs(residuals(fitted))
        row = f'("ALL_REDUCE", {ranks}, {latency:.1f}, {ramp:.1f}, {ramp_bytes:.3g}, {bandwidth:.0f})'
        residual = f"residual {np.median(errors):.1f} %, p90 {np.quantile(errors, 0.9):.0f} %"
        print(f"{row}, {len(kept)} sizes, {residual}")


if __name__ == "__main__":
    all_reduces(Path(sys.argv[1]))
