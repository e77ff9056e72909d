"""Writes the table of ``docs/equality.md`` from the runs that ``docs/equality.json`` holds.

``python docs/make_equality.py`` writes, ``--check`` exits 1 if it is stale. ``--measure`` runs the plans of
``docs/equality_plans.py`` that have no result yet, or failed, or have changed since, so that it goes on where it was
interrupted; ``--measure NAME`` those with that text in their name, and ``--measure --all`` all, whatever they have. It
needs Paddle, and up to half a minute a plan.
"""  # noqa: INP001 - a directory of scripts, not a package

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
from pages import DOCS, ROOT, fill, main, table

RESULTS = DOCS / "equality.json"
PATIENCE_S = 180.0
"""Longest that a run may take: ten times what it takes on an idle machine."""

Plans = Mapping[str, Mapping[str, Any]]
PLANS: Plans = {cell.name: cell.plan for cell in CELLS}


# --- measuring ---


def measure(plans: Plans, results_file: Path, names: Iterable[str] | None = None) -> None:
    """Run plans one after the other, and write the results after each.

    Args:
        plans: all plans by name; results of others are dropped.
        results_file: JSON with a result for each name, as ``one_run`` gives it; need not exist.
        names: which to run; without it, those that have not passed as they are now.
    """
    old = json.loads(results_file.read_text(encoding="utf-8")) if results_file.exists() else {}
    results = {name: old[name] for name in plans if name in old}
    asked = [name for name in plans if _is_due(plans[name], results.get(name))] if names is None else list(names)
    for number, name in enumerate(asked, start=1):
        results[name] = one_run(plans[name])
        in_order = {known: results[known] for known in plans if known in results}
        results_file.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
        sys.stderr.write(f"{number} of {len(asked)}: {name}: {reached(results[name])}\n")


def _is_due(plan: Mapping[str, Any], result: Mapping[str, Any] | None) -> bool:
    return result is None or result["status"] != 0 or result["plan"] != plan


def one_run(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a plan in processes of its own.

    Returns:
        ``plan``; ``paddle``, the installed version; ``status``, the exit status, None where the run took too long.
        With a report, its figures: losses of each step, and of each step's gradients how many there are, how many
        have the reference's bits on all ranks, the farthest from the uncut model, and one MD5 of all their MD5s by
        name. Else ``message``, what the run said.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan_file, report_file, output_file = (Path(folder) / name for name in ("plan.json", "report.json", "output"))
        plan_file.write_text(json.dumps(_from_anywhere(plan)), encoding="utf-8")
        with output_file.open("wb") as output:
            status = _status([sys.executable, "-m", "pipeproof", "run", str(plan_file), "--report", str(report_file)],
                             output.fileno())  # fmt: skip
        result = {"plan": plan, "paddle": _paddle_version(), "status": status}
        if not report_file.exists():
            return {**result, "message": _said(output_file.read_text(encoding="utf-8", errors="replace"))}
        return {**result, **_figures(json.loads(report_file.read_text(encoding="utf-8")))}


def _from_anywhere(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan with the file of its own layers, if it has any, named from wherever it is read."""
    model = plan.get("model", {})
    return {**plan, "model": {**model, "build": str(ROOT / model["build"])}} if "build" in model else plan


def _paddle_version() -> str | None:
    try:
        return version("paddlepaddle")
    except PackageNotFoundError:  # the run will say what is missing
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


def _said(output: str) -> str:
    """The first error of a run's output, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error[")), lines[-1] if lines else "it said nothing")


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run's report."""
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
    """A distance that is not finite is null in JSON."""
    far = gradient["uncut_max_rel_diff"]
    return float("inf") if far is None else float(far)


# --- the page ---

UNCUT, ORDERED = "bits of the uncut model", "bits of the reference in the plan's order"


def reached(result: Mapping[str, Any]) -> str:
    """The equality that a run reached, or in what it failed."""
    if result["status"] is None:
        return f"**failed**: no end within {PATIENCE_S:.0f} s"
    if "steps" not in result:
        return f"**failed**, exit status {result['status']}: {result['message']}"
    equal, number = (sum(step[key] for step in result["steps"]) for key in ("num_bitwise", "num_gradients"))
    if not all(step["bitwise"] for step in result["steps"]):
        return f"**failed**: {equal} of {number} gradients have the reference's bits"
    if result["status"] != 0:
        return f"**failed**, exit status {result['status']}, with the bits of the reference"
    return UNCUT if _is_uncut(result) else ORDERED


def _is_uncut(result: Mapping[str, Any]) -> bool:
    """Whether every step has the uncut model's loss and gradients, for which the plan's bound is zero."""
    return result["parallel_bound"] == 0.0 and all(
        step["farthest_uncut_rel_diff"] == 0.0 and step["uncut_loss"] == step["loss"] for step in result["steps"]
    )


def equality_part(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each plan, in the order of features."""
    header = ("model", "ranks", "schedule", "`accumulation`", "reached", "equal gradients", "farthest gradient",
              "its distance", "bound")  # fmt: skip
    rows = []
    for cell in sorted(CELLS, key=lambda one: list(FEATURES).index(one.feature)):
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
    if _is_uncut(result):
        return (accumulation, reached(result), f"{equal} of {number}", "", "0", "0")
    first, bound = result["steps"][0], result["parallel_bound"]
    distance = first["farthest_uncut_rel_diff"]
    far = "not finite" if distance is None else f"{distance:.1e}"
    return (accumulation, reached(result), f"{equal} of {number}", f"`{first['farthest']}`", far, f"{bound:.1e}")


def summary_part(results: Mapping[str, Mapping[str, Any]]) -> str:
    """How many plans reached what, and how near the farthest came to its bound."""
    current = [results[name] for name, plan in PLANS.items() if name in results and results[name]["plan"] == plan]
    passed = [result for result in current if result["status"] == 0]
    counts = Counter(reached(result) for result in passed)
    versions = " and ".join(sorted({result["paddle"] for result in current if result["paddle"]}))
    shares = [result["steps"][0]["farthest_uncut_rel_diff"] / result["parallel_bound"]
              for result in passed if result["parallel_bound"]]  # fmt: skip
    largest = f" The largest distance is {max(shares):.2f} of its bound." if shares else ""
    return (
        f"Of {len(PLANS)} plans {len(current)} were run, {NUM_STEPS} steps each, float32, Paddle {versions}: "
        f"{counts[UNCUT]} have the {UNCUT}, {counts[ORDERED]} the {ORDERED}, {len(current) - len(passed)} failed."
        f"{largest}"
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
    page = DOCS / "equality.md"
    parts = {"summary": summary_part(measured), "equality": equality_part(measured)}
    sys.exit(main("docs/make_equality.py", {page: fill(page, parts)}))
