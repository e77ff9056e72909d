"""Writes the table of ``validation/results/equality.md`` from the runs in ``validation/results/equality.json``.

``python validation/pages/make_equality.py`` writes, ``--check`` exits 1 if it is stale. ``--measure`` runs the plans of
``validation/pages/equality_plans.py`` that have no result, failed, or have changed since, so an interrupted measurement
resumes; ``--measure NAME`` runs those with that text in their name, and ``--measure --all`` all plans. It needs Paddle,
and up to half a minute per plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from equality_plans import CELLS, FEATURES, NUM_STEPS
from pages import EVIDENCE, ROOT, fill, main, table

RESULTS = EVIDENCE / "equality.json"
PATIENCE_S = 180.0
"""Time limit of a run: ten times its time on an idle machine."""

Plans = Mapping[str, Mapping[str, Any]]
PLANS: Plans = {cell.name: cell.plan for cell in CELLS}


# --- measuring ---


def measure(plans: Plans, results_file: Path, names: Iterable[str] | None = None) -> None:
    """Run plans one after the other, and write the results after each.

    Args:
        plans: all plans by name; results of others are dropped.
        results_file: JSON with a result for each name, as ``one_run`` gives it; need not exist.
        names: plans to run; without it, those whose current form has not passed.
    """
    old = json.loads(results_file.read_text(encoding="utf-8")) if results_file.exists() else {}
    results = {name: old[name] for name in plans if name in old}
    requested = [name for name in plans if _is_due(plans[name], results.get(name))] if names is None else list(names)
    for number, name in enumerate(requested, start=1):
        results[name] = one_run(plans[name])
        in_order = {known: results[known] for known in plans if known in results}
        results_file.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
        sys.stderr.write(f"{number} of {len(requested)}: {name}: {reached(results[name])}\n")


def _is_due(plan: Mapping[str, Any], result: Mapping[str, Any] | None) -> bool:
    return result is None or result["status"] != 0 or result["plan"] != plan


def one_run(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Run a plan in separate processes.

    Returns:
        ``plan``; ``paddle``, the installed version; ``status``, the exit status, None after the time limit.
        With a report, its figures: losses of each step, and for each step's gradients their number, the number that
        is bitwise equal to the reference on all ranks, the one farthest from the unpartitioned model, and one MD5 of
        all their MD5s by name. Without a report, ``message``, the error of the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan_file, report_file, output_file = (Path(folder) / name for name in ("plan.json", "report.json", "output"))
        plan_file.write_text(json.dumps(plan), encoding="utf-8")
        with output_file.open("wb") as output:
            status = _status([sys.executable, "-m", "pipeproof", "run", str(plan_file), "--report", str(report_file)],
                             output.fileno())  # fmt: skip
        result = {"plan": plan, "paddle": _paddle_version(), "status": status}
        if not report_file.exists():
            return {**result, "message": _error_of(output_file.read_text(encoding="utf-8", errors="replace"))}
        return {**result, **_figures(json.loads(report_file.read_text(encoding="utf-8")))}


def _paddle_version() -> str | None:
    try:
        return version("paddlepaddle")
    except PackageNotFoundError:  # the run will report the missing package
        return None


def _status(command: Sequence[str], output: int) -> int | None:
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "400"},
    ) as process:  # fmt: skip
        try:
            return process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it stops its ranks
            return None
        except KeyboardInterrupt:
            process.terminate()
            raise


def _error_of(output: str) -> str:
    """Return the first error of a run's output, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error[")), lines[-1] if lines else "no output")


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored part of a run's report."""
    steps = []
    for step in report["steps"]:
        gradients = [gradient for gradient in report["gradients"] if gradient["step"] == step["step"]]
        farthest = max(gradients, key=_distance)
        md5s = sorted(f"{gradient['name']} {gradient['md5']}" for gradient in gradients)
        steps.append(
            {
                **step,
                "num_gradients": len(gradients),
                "num_bitwise": sum(g["md5"] == g["reference_md5"] and g["replicas_agree"] for g in gradients),
                "farthest": farthest["name"],
                "farthest_uncut_rel_diff": farthest["uncut_max_rel_diff"],
                "gradients_md5": hashlib.md5("\n".join(md5s).encode(), usedforsecurity=False).hexdigest(),
            }
        )
    kept = ("digest", "verified", "passed", "accumulation", "dtype", "parallel_bound", "log_matches_graph")
    return {**{key: report[key] for key in kept}, "steps": steps}


def _distance(gradient: Mapping[str, Any]) -> float:
    """Return the distance; null in JSON means not finite."""
    far = gradient["uncut_max_rel_diff"]
    return float("inf") if far is None else float(far)


# --- the page ---

UNPARTITIONED, ORDERED = "the unpartitioned model", "the reference in the plan's order"


def reached(result: Mapping[str, Any]) -> str:
    """Return the model to which the run is bitwise equal, or the reason of its failure."""
    if result["status"] is None:
        return f"**failed**: not done within {PATIENCE_S:.0f} s"
    if "steps" not in result:
        return f"**failed**, exit status {result['status']}: {result['message']}"
    equal, number = (sum(step[key] for step in result["steps"]) for key in ("num_bitwise", "num_gradients"))
    if not all(step["bitwise"] for step in result["steps"]):
        return f"**failed**: {equal} of {number} gradients are bitwise equal to the reference"
    if result["status"] != 0:
        return f"**failed**, exit status {result['status']}, bitwise equal to the reference"
    return UNPARTITIONED if _is_unpartitioned(result) else ORDERED


def _is_unpartitioned(result: Mapping[str, Any]) -> bool:
    """True if the bound is zero and every step has the unpartitioned model's loss and gradients."""
    return result["parallel_bound"] == 0.0 and all(
        step["farthest_uncut_rel_diff"] == 0.0 and step["uncut_loss"] == step["loss"] for step in result["steps"]
    )


def equality_part(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Table with a row for each plan, in the order of features."""
    header = ("model", "ranks", "schedule", "`accumulation`", "bitwise equal to", "equal gradients",
              "farthest gradient", "its distance", "bound")  # fmt: skip
    rows = []
    for cell in sorted(CELLS, key=lambda cell: list(FEATURES).index(cell.feature)):
        known = cell.name in results and results[cell.name]["plan"] == cell.plan
        rows.append(
            (cell.feature, cell.topology, f"`{cell.kind}`", *_figures_text(results[cell.name] if known else None))
        )
    return table(header, rows)


def _figures_text(result: Mapping[str, Any] | None) -> tuple[str, ...]:
    if result is None:
        return ("", "not run", "", "", "", "")
    if "steps" not in result:
        return ("", reached(result), "", "", "", "")
    equal, number = (sum(step[key] for step in result["steps"]) for key in ("num_bitwise", "num_gradients"))
    accumulation = f"`{result['accumulation']}`"
    if _is_unpartitioned(result):
        return (accumulation, reached(result), f"{equal} of {number}", "", "0", "0")
    first, bound = result["steps"][0], result["parallel_bound"]
    distance = first["farthest_uncut_rel_diff"]
    far = "not finite" if distance is None else f"{distance:.1e}"
    return (accumulation, reached(result), f"{equal} of {number}", f"`{first['farthest']}`", far, f"{bound:.1e}")


def summary_part(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Summary: the number of plans by equality, and the largest distance relative to its bound."""
    current = [results[name] for name, plan in PLANS.items() if name in results and results[name]["plan"] == plan]
    passed = [result for result in current if result["status"] == 0]
    counts = Counter(reached(result) for result in passed)
    versions = " and ".join(sorted({result["paddle"] for result in current if result["paddle"]}))
    shares = [result["steps"][0]["farthest_uncut_rel_diff"] / result["parallel_bound"]
              for result in passed if result["parallel_bound"]]  # fmt: skip
    largest = f" The largest distance is {max(shares):.2f} of its bound." if shares else ""
    return (
        f"{len(current)} of {len(PLANS)} plans were run, {NUM_STEPS} steps each, float32, Paddle {versions}: "
        f"{counts[UNPARTITIONED]} are bitwise equal to {UNPARTITIONED}, {counts[ORDERED]} to {ORDERED}, and "
        f"{len(current) - len(passed)} failed.{largest}"
    )


def _measure_named(texts: Sequence[str]) -> int:
    chosen = PLANS if "--all" in texts else [name for name in PLANS if any(text in name for text in texts)]
    names = list(chosen) if texts else None
    if names == []:
        sys.stderr.write(f"no plan has {' or '.join(texts)} in its name; they are:\n" + "\n".join(PLANS) + "\n")
        return 2
    measure(PLANS, RESULTS, names)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        sys.exit(_measure_named(sys.argv[2:]))
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = EVIDENCE / "equality.md"
    parts = {"summary": summary_part(measured), "equality": equality_part(measured)}
    sys.exit(main("validation/pages/make_equality.py", {page: fill(page, parts)}))
