"""Writes the tables and pictures of ``validation/results/prediction.md`` from ``docs/prediction*.json``.

``python validation/pages/make_prediction.py`` writes, ``--check`` exits 1 if a part is stale.
``benchmarks/gpu/prediction.py`` measures the results on GPUs; without them the page states that there are no figures.
The pictures are of ``prediction.json``; the other files are of four ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from pages import DOCS, EVIDENCE, fill, main, table

from pipeproof.schedule.ops import parse_op
from pipeproof.schedule.programs import Timed
from pipeproof.views.schedule_svg import schedule_svg

RESULTS = EVIDENCE / "prediction.json"
FOUR = {"operations": EVIDENCE / "prediction_four.json", "graphs": EVIDENCE / "prediction_four_compiled.json"}
"""By how stages run."""
PAGE = EVIDENCE / "prediction.md"
IMAGES = DOCS / "images" / "prediction"
NO_FIGURES = "There are no figures yet: the command above measures them."
_GIB = 2**30

Results = Mapping[str, Any]


def device_part(results: Results) -> str:
    """Description of the machine."""
    if not results:
        return NO_FIGURES
    return f"{results['num_ranks']} ranks on {results['device']}, PyTorch {results['torch']}.\n"


def steps_part(results: Results) -> str:
    """Table of each schedule's step, starts and memory, predicted and measured."""
    if not results:
        return NO_FIGURES
    header = ("schedule", "micro-batches", "predicted, ms", "measured, ms", "error", "largest start error",
              "95 % of starts", "predicted, GiB", "measured, GiB", "error", "cost of timing")  # fmt: skip
    return "\n".join(
        f"{_heading(size)}; profiled: `1f1b` with {size['profiled_micro_batches']} micro-batches.\n\n"
        + table(header, [_step_row(case) for case in size["cases"]])
        for size in results["sizes"]
    )


def _step_row(case: Mapping[str, Any]) -> tuple[str, ...]:
    step = case["measured_us"]
    return (
        f"`{case['kind']}`",
        str(case["num_micro_batches"]),
        f"{case['predicted_us'] / 1e3:.2f}",
        f"{step / 1e3:.2f}",
        _error(case["predicted_us"], step),
        _share(case["largest_start_error_us"], step),
        _share(case["p95_start_error_us"], step),
        *_memory(case),
        _error(step, case["untimed_us"]),
    )


def _memory(case: Mapping[str, Any]) -> tuple[str, str, str]:
    predicted, measured = case["predicted_bytes"], case["measured_bytes"]
    if measured is None:
        return "", "", ""
    return f"{predicted / _GIB:.2f}", f"{measured / _GIB:.2f}", _error(predicted, measured)


def graphs_part(results: Results) -> str:
    """Table of each schedule replayed as one CUDA graph, its simulation with graph times, and its work alone."""
    if not results:
        return NO_FIGURES
    header = (
        "schedule",
        "micro-batches",
        "simulated, ms",
        "at full load, ms",
        "replayed, ms",
        "error",
        "work alone, ms",
    )
    return "\n".join(
        f"{_heading(size)}.\n\n" + table(header, [_graph_row(case) for case in size["cases"] if "graph_us" in case])
        for size in results["sizes"]
    )


def _graph_row(case: Mapping[str, Any]) -> tuple[str, ...]:
    simulated, replayed = case["graph_predicted_us"], case["graph_us"]
    full = case["graph_full_power_us"]
    times = (f"{simulated / 1e3:.2f}", f"{full / 1e3:.2f}", f"{replayed / 1e3:.2f}", _error(simulated, replayed))
    return (f"`{case['kind']}`", str(case["num_micro_batches"]), *times, f"{case['work_us'] / 1e3:.2f}")


def four_part() -> str:
    """Table of each schedule on four ranks, by how stages run: step, starts, memory, and the step as a graph."""
    header = ("hidden size", "micro-batches", "stages", "schedule", "predicted, ms", "measured, ms", "error",
              "largest start error", "error of memory", "replayed, ms", "error of replayed")  # fmt: skip
    rows = [
        (size["hidden"], stages, case)
        for stages, file in FOUR.items()
        for size in json.loads(file.read_text(encoding="utf-8"))["sizes"]
        for case in size["cases"]
    ]
    rows.sort(key=lambda row: -row[0])
    return table(header, [(str(hidden), *_four_row(stages, case)) for hidden, stages, case in rows])


def _four_row(stages: str, case: Mapping[str, Any]) -> tuple[str, ...]:
    predicted, measured, replayed = case["predicted_us"], case["measured_us"], case["graph_us"]
    return (
        str(case["num_micro_batches"]), stages, f"`{case['kind']}`", f"{predicted / 1e3:.2f}", f"{measured / 1e3:.2f}",
        _error(predicted, measured), _share(case["largest_start_error_us"], measured), _memory(case)[-1],
        f"{replayed / 1e3:.2f}", _error(case["graph_predicted_us"], replayed),
    )  # fmt: skip


def timelines_part(results: Results) -> str:
    """Markdown of the images of ``pictures``."""
    if not results:
        return NO_FIGURES
    return "\n\n".join(
        f"![{case['kind']}, predicted above measured](../../docs/images/prediction/{name})"
        for name, _, case in _shown(results)
    )


def pictures(results: Results) -> dict[Path, str]:
    """Picture of each schedule of the first size with its first number of micro-batches, by file."""
    return {IMAGES / name: _picture(size, case) for name, size, case in _shown(results)}


def _shown(results: Results) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for size in results.get("sizes", [])[:1]:
        for case in size["cases"]:
            if case["num_micro_batches"] == size["profiled_micro_batches"]:
                yield f"{case['kind']}.svg", size, case


def _picture(size: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """One time axis in milliseconds, a row for each rank as predicted, then one for each as measured."""
    num_ranks = 1 + max(rank for rank, *_ in case["predicted"])
    rows = [_row(case[side], rank) for side in ("predicted", "measured") for rank in range(num_ranks)]
    timed = Timed(*(tuple(parts) for parts in zip(*rows, strict=True)))
    plan = f"{case['kind']}, hidden {size['hidden']}, {case['num_micro_batches']} micro-batches"
    picture = schedule_svg(timed, f"{plan}, predicted and measured, ms")
    for place in range(2 * num_ranks):
        side = "pred." if place < num_ranks else "meas."
        picture = picture.replace(f">rank {place}</text>", f">{side} {place % num_ranks}</text>")
    return picture


def _row(spans: Sequence[Sequence[Any]], rank: int) -> tuple[tuple[Any, ...], ...]:
    """Return program, starts and ends of one rank."""
    own = [(parse_op(op), Fraction(start, 1000), Fraction(end, 1000)) for of, op, start, end in spans if of == rank]
    return tuple(tuple(column) for column in zip(*own, strict=True))


def _heading(size: Mapping[str, Any]) -> str:
    return f"Hidden size {size['hidden']}, sequence {size['sequence']}, {size['layers_a_rank']} blocks per rank"


def _error(value: float, right: float) -> str:
    return f"{100 * (value / right - 1):+.1f} %"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


PARTS: Mapping[str, Callable[[Results], str]] = {
    "device": device_part, "steps": steps_part, "graphs": graphs_part, "timelines": timelines_part,
}  # fmt: skip


def pages(results: Results) -> dict[Path, str]:
    """Return the page and its pictures by file."""
    parts = {name: make(results) for name, make in PARTS.items()}
    return {PAGE: fill(PAGE, {**parts, "four": four_part()}), **pictures(results)}


if __name__ == "__main__":
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    made = pages(kept)
    sys.exit(main("validation/pages/make_prediction.py", made, frozenset(set(IMAGES.glob("*.svg")) - made.keys())))
