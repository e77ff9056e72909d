"""Shares of memory bandwidth that fit the trainings of Llama 3.1 405B in MLPerf, and sizes left out of the fit.

``python benchmarks/fit_memory_shares.py`` predicts each configuration of the board's set `mlperf` with shares in steps
of 0.05 (20 s of CPU time). A device's share is the step with the smallest mean error. Then each number of ranks is left
out in turn: the share is fitted to the others, and the error is the left-out size's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean

from pipeproof.cost.device_tables import device_table
from validation.board.accuracy_board import MEASUREMENTS, Predictor, read_measurements

SHARES = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)


def errors() -> Mapping[str, Mapping[str, Mapping[float, float]]]:
    """Return the mean size of the error by group, number of ranks and share."""
    (file,), _ = read_measurements([MEASUREMENTS / "mlperf_llama405b_steps.csv"])
    predictor, found = Predictor(), defaultdict[str, dict[str, dict[float, list[float]]]](dict)
    for row in file.rows:
        assert row.plan is not None
        analytic = row.plan["cost"]["analytic"]
        known = device_table(analytic["device"])
        assert known is not None
        for share in SHARES:
            table = known.model_copy(update={"memory_efficiency": share}).model_dump(mode="json")
            plan = {**row.plan, "cost": {"analytic": {**analytic, "table": table}}}
            error = abs(predictor.predict(replace(row, plan=plan)).error)
            found[row.group].setdefault(row.name.split(",")[0], {}).setdefault(share, []).append(error)
    return {
        group: {name: {share: fmean(of) for share, of in by_share.items()} for name, by_share in sizes.items()}
        for group, sizes in found.items()
    }


def best(sizes: Iterable[Mapping[float, float]]) -> float:
    """Return the share with the smallest mean error."""
    known = list(sizes)
    return min(SHARES, key=lambda share: fmean(of[share] for of in known))


Fit = tuple[str, float, float]
"""The name of a group, or of a size that is left out, the share of its fit, and its mean error."""


def left_out() -> list[tuple[Fit, list[Fit]]]:
    """Return the fit of each group, and those without each of its sizes, if it has several."""
    found = []
    for group, sizes in errors().items():
        share = best(sizes.values())
        fits = []
        for name in sizes if len(sizes) > 1 else ():
            without = best(of for other, of in sizes.items() if other != name)
            fits.append((name, without, sizes[name][without]))
        found.append(((group, share, fmean(of[share] for of in sizes.values())), fits))
    return found


def main() -> None:
    """Print the share of each group, and the errors with and without each size in the fit."""
    for (group, share, error), fits in left_out():
        print(f"{group}: {share}, {error:.1%}")
        for name, without, alone in fits:
            print(f"  {name} left out: {without}, {alone:.1%}")


if __name__ == "__main__":
    main()
