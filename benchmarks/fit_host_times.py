"""Times of the host that fit Megatron-LM's dense cases, and the errors of cases that are left out of the fit.

``python benchmarks/fit_host_times.py`` fits `host_us`, `fill_us` and `step_us` of each device, and the share of the
time that Megatron-LM's own modules take, to the cases on the board. Then it leaves out each case in turn, on all
machines, fits to the rest, and predicts it. `input_us` follows: the time to read a micro-batch in the cases of one
GB200 node, with each case left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from scipy.optimize import least_squares

from validation.board.accuracy_board import MEASUREMENTS, Predictor, read_measurements
from validation.board.measurement import Measurement, Quantity

MACHINES = ("a100", "h100", "h100_2nd", "gb200")
HOST_US, SLOPE_US = 200.0, 100.0
"""The host bounds every case at this time of an operation, and its steps are linear in it from there."""
START = np.array([[95.0, 65, 83, 110], [30, 30, 1, 30], [50_000, 40_000, 16_000, 1]])
"""Times in microseconds from which a fit starts."""
UPPER = np.array([200.0, 200, 100_000])[:, None].repeat(len(MACHINES), axis=1)


@dataclass(frozen=True)
class Row:
    """A measured step in seconds, and its prediction as a function of the times of the host."""

    case: str
    machine: int
    measured: float
    is_deterministic: bool
    is_local: bool
    device_s: float
    bound_s: float
    of_host_s: float
    of_fill_s: float

    def predict(self, times: np.ndarray, local: float) -> float:
        """Return the step for times in microseconds, shape [3, machines], and the share of local modules."""
        host, fill, step = times[:, self.machine]
        share = local if self.is_local else 1.0
        filled = self.of_fill_s * share * fill if self.is_deterministic else 0.0
        by_host = self.bound_s + self.of_host_s * (share * host - HOST_US) + filled
        return max(self.device_s, float(by_host)) + float(step) / 1e6


def rows() -> list[Row]:
    """Return the dense cases of several nodes or eight ranks, whose input takes no time."""
    (file,), _ = read_measurements([MEASUREMENTS / "megatron_goldens.json"])
    predictor, found = Predictor(), []
    for row in file.rows:
        if row.plan is None or row.quantity is not Quantity.STEP or "dense" not in row.group:
            continue
        analytic = row.plan["cost"]["analytic"]
        if "input_us" in analytic:
            continue
        case, machine = row.name.split(", ")
        name = analytic["device"] + ("_2nd" if machine.endswith("h100_2nd") else "")
        at = [_step(predictor, row, host, fill) for host, fill in
              ((0.0, 0.0), (HOST_US, 0.0), (HOST_US + SLOPE_US, 0.0), (HOST_US, SLOPE_US))]  # fmt: skip
        slopes = (at[2] - at[1]) / SLOPE_US, (at[3] - at[1]) / SLOPE_US
        is_local = "local" in case or "uninstall_te" in case
        found.append(Row(case, MACHINES.index(name), row.measured, analytic["fill_us"] > 0, is_local,
                         at[0], at[1], *slopes))  # fmt: skip
    return found


def input_rows() -> dict[str, tuple[float, float, float]]:
    """Return the measured step of each case whose input takes time, and its steps at 0.1 and 0.3 s for a micro-batch.

    The input bounds these cases, so their steps are linear in it.
    """
    (file,), _ = read_measurements([MEASUREMENTS / "megatron_goldens.json"])
    predictor, found = Predictor(), {}
    for row in file.rows:
        if row.plan is None or row.quantity is not Quantity.STEP or "dense" not in row.group:
            continue
        analytic = row.plan["cost"]["analytic"]
        if "input_us" in analytic:
            steps = []
            for input_us in (1e5, 3e5):
                cost = {**row.plan["cost"], "analytic": {**analytic, "input_us": input_us}}
                predicted = predictor.predict(replace(row, plan={**row.plan, "cost": cost})).predicted
                assert predicted is not None
                steps.append(predicted)
            found[row.name] = (row.measured, steps[0], steps[1])
    return found


def _input_errors(cases: dict[str, tuple[float, float, float]], input_s: float) -> dict[str, float]:
    """Return the size of each case's error with a time of input in seconds."""
    return {name: abs((low + (high - low) * (input_s - 0.1) / 0.2) / measured - 1)
            for name, (measured, low, high) in cases.items()}  # fmt: skip


def fit_input(cases: dict[str, tuple[float, float, float]]) -> float:
    """Return the time of input, in steps of 5 ms, with the smallest mean error."""
    return min((step / 200 for step in range(20, 100)), key=lambda time: fmean(_input_errors(cases, time).values()))


def _step(predictor: Predictor, row: Measurement, host_us: float, fill_us: float) -> float:
    assert row.plan is not None
    times = {"host_us": host_us, "collective_us": 2 * host_us, "fill_us": fill_us, "step_us": 0}
    cost = {**row.plan["cost"], "analytic": {**row.plan["cost"]["analytic"], **times}}
    predicted = predictor.predict(replace(row, plan={**row.plan, "cost": cost})).predicted
    assert predicted is not None
    return predicted


def fit(chosen: list[Row]) -> tuple[np.ndarray, float]:
    """Return the times in microseconds, shape [3, machines], and the share of local modules."""
    scale = START.ravel().clip(1)

    def unpacked(values: np.ndarray) -> tuple[np.ndarray, float]:
        return (values[:-1] * scale).reshape(START.shape), float(values[-1])

    def errors(values: np.ndarray) -> list[float]:
        return [float(np.log(row.predict(*unpacked(values)) / row.measured)) for row in chosen]

    start = np.append(START.ravel() / scale, 0.85)
    upper = np.append(UPPER.ravel() / scale, 1.5)
    return unpacked(least_squares(errors, start, bounds=(0, upper), loss="soft_l1", f_scale=0.1).x)


@dataclass(frozen=True)
class LeftOut:
    """A fit to some cases: its constants as text, and the mean errors of cases in the fit and left out of it."""

    name: str
    constants: str
    num_rows: int
    within: float
    without: float


def left_out() -> list[LeftOut]:
    """Return the fits of the host by machine and of the input, each case left out in turn, on all its machines."""
    known = rows()
    times, local = fit(known)
    without = defaultdict[int, list[float]](list)
    within = defaultdict[int, list[float]](list)
    for case in sorted({row.case for row in known}):
        others = fit([row for row in known if row.case != case])
        for row in known:
            if row.case == case:
                without[row.machine].append(abs(row.predict(*others) / row.measured - 1))
                within[row.machine].append(abs(row.predict(times, local) / row.measured - 1))
    found = []
    for index, name in enumerate(MACHINES):
        host, fill, step = times[:, index]
        fill *= any(row.is_deterministic for row in known if row.machine == index)
        constants = f"host_us {host:.0f}, fill_us {fill:.0f}, step_us {step:.0f}, local {local:.2f}"
        found.append(LeftOut(name, constants, len(within[index]), fmean(within[index]), fmean(without[index])))
    cases = input_rows()
    read = fit_input(cases)
    alone = {name: fit_input({other: of for other, of in cases.items() if other != name}) for name in cases}
    errors = [_input_errors(cases, alone[name])[name] for name in cases]
    span = f"input_us {1e6 * read:.0f} ({1e6 * min(alone.values()):.0f} to {1e6 * max(alone.values()):.0f})"
    return [
        *found,
        LeftOut("one GB200 node", span, len(cases), fmean(_input_errors(cases, read).values()), fmean(errors)),
    ]


def main() -> None:
    """Print the fits and the errors with and without a case."""
    for one in left_out():
        print(f"{one.name:16}{one.num_rows:3} rows {one.within:6.1%}, left out {one.without:6.1%}: {one.constants}")


if __name__ == "__main__":
    main()
