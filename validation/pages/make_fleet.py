"""Write the tables of ``docs/fleet.md`` from the runs in ``docs/fleet.json``.

``python validation/pages/make_fleet.py`` writes, ``--check`` exits 1 if the page is stale; ``--measure`` runs
everything first. It needs Paddle, and about two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import DOCS, ROOT, fill, main, table

from pipeproof.specs.load_plan import load_plan

RESULTS = DOCS / "fleet.json"
STEPS = 5
_LINE = {"kind": "1f1b"}
_TWO = {"kind": "interleaved", "num_chunks": 2}
PLANS: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "mixer, 1F1B": ("mixer", {"pp": 2}, {**_LINE, "num_micro_batches": 8}),
    "mixer, 1F1B on four ranks": ("mixer", {"pp": 4}, {**_LINE, "num_micro_batches": 5}),
    "mixer, 1F1B, two replicas": ("mixer", {"pp": 2, "dp": 2}, {**_LINE, "num_micro_batches": 4}),
    "conv net with shared filters, 1F1B": ("fleet_conv", {"pp": 2}, {**_LINE, "num_micro_batches": 4}),
    "mixer, interleaved": ("mixer", {"pp": 3}, {**_TWO, "variant": "fleet", "num_micro_batches": 6}),
    "mixer, interleaved, 8 on 3 ranks": ("mixer", {"pp": 3}, {**_TWO, "variant": "fleet", "num_micro_batches": 8}),
    "mixer, all forwards first": ("mixer", {"pp": 3}, {**_TWO, "variant": "fleet_fthenb", "num_micro_batches": 3}),
    "mixer, balanced memory": ("mixer", {"pp": 3}, {**_TWO, "variant": "fleet_balanced", "num_micro_batches": 4}),
}  # fmt: skip
"""Plans by name: the example with the layers, the ranks, and the schedule."""


def plan_of(name: str) -> dict[str, Any]:
    """Return the plan with that name, as data."""
    example, topology, schedule = PLANS[name]
    file = ROOT / "examples" / "custom_layers" / f"{example}.yaml"
    plan = load_plan(file).spec.model_dump(mode="json", include={"pipeproof", "model", "loss"})
    plan["model"]["build"] = f"{file.with_suffix('.py')}:build"
    return {
        **plan,
        "topology": dict(topology),
        "schedule": {**schedule, "micro_batch_size": 2},
        "run": {"steps": STEPS, "seed": 7},
    }


def measure() -> None:
    """Run all plans and the example, and store the figures that the page shows."""
    runs = {name: _run(plan_of(name)) for name in PLANS}
    example = [sys.executable, str(ROOT / "examples" / "fleet_partial" / "train.py"), "--json"]
    done = subprocess.run(example, capture_output=True, text=True, check=True, cwd=ROOT, env=_environment())
    partial = json.loads(done.stdout.splitlines()[-1])
    content = {"paddle": version("paddlepaddle"), "runs": runs, "partial": partial}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _run(plan: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file, written = Path(folder) / "plan.json", Path(folder) / "report.json"
        file.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "pipeproof", "job", "fleet", str(file), "--report", str(written)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=_environment())
        if not written.exists():
            sys.exit(done.stdout + done.stderr)
        report = json.loads(written.read_text(encoding="utf-8"))
    gradients = [gradient for step in report["steps"] for gradient in step["gradients"]]
    losses = ("loss", "fleet_loss", "reference_loss")
    return {
        **{
            key: report[key] for key in ("matches", "scheduler", "messages_per_step", "computed_per_step", "loss_bound")
        },
        "num_gradients": len(gradients),
        "num_bitwise": sum(one["md5"] == one["reference_md5"] and one["replicas_agree"] for one in gradients),
        "losses": [{key: step[key] for key in losses} for step in report["steps"]],
    }


def _runs(results: Mapping[str, Any]) -> str:
    header = ("layers and schedule", "ranks, micro-batches", "Fleet's class", "computations, messages per step",
              "gradients bitwise", "losses bitwise", "last loss: pipeproof's", "Fleet's")  # fmt: skip
    return table(header, [_row(name, results["runs"][name]) for name in PLANS])


def _row(name: str, run: Mapping[str, Any]) -> tuple[str, ...]:
    _, topology, schedule = PLANS[name]
    ranks = " x ".join(f"{axis} {size}" for axis, size in topology.items())
    last, same = run["losses"][-1], sum(one["fleet_loss"] == one["loss"] for one in run["losses"])
    result = "the plan's" if run["matches"] else "**not the plan's**"
    verdict = f"{run['computed_per_step']}, {run['messages_per_step']}: {result}"
    return (
        name,
        f"{ranks}, {schedule['num_micro_batches']}",
        f"`{run['scheduler']}`",
        verdict,
        f"{run['num_bitwise']} of {run['num_gradients']}",
        f"{same} of {len(run['losses'])}",
        f"{last['loss']:.9f}",
        f"{last['fleet_loss']:.9f}",
    )


def _partial(results: Mapping[str, Any]) -> str:
    trained = results["partial"]
    steps = range(len(trained["one process"]["losses"]))
    rows = [(name, *(f"{loss:.6f}" for loss in one["losses"]), _farthest(one)) for name, one in trained.items()]
    losses = table(
        ("trained", *(f"loss of step {step}" for step in steps), "largest distance of a gradient in step 0"), rows
    )
    full, partial = (trained[name]["farthest"] for name in ("Fleet, full", "Fleet, partial"))
    each = table(
        ("weight", "full", "partial"), [(f"`{key}`", f"{full[key]:.1g}", f"{partial[key]:.2f}") for key in full]
    )
    return f"{losses}\n{each}"


def _farthest(one: Mapping[str, Any]) -> str:
    return f"{max(one['farthest'].values()):.2g}" if "farthest" in one else ""


def pages() -> dict[Path, str]:
    """Return the page with the measured figures."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = DOCS / "fleet.md"
    return {page: fill(page, {"runs": _runs(results), "partial": _partial(results)})}


def run(arguments: Sequence[str]) -> int:
    """Measure if the option is given, and write or check the page."""
    if list(arguments) == ["--measure"]:
        measure()
        sys.argv[1:] = []
    return main("validation/pages/make_fleet.py", pages())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
