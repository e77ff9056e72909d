"""Write the tables of ``results/fleet.md`` from the runs in ``results/fleet.json``.

``python validation/pages/make_fleet.py`` writes, ``--check`` exits 1 if the page is stale; ``--measure`` runs
everything first. It needs Paddle, and about two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import EVIDENCE, ROOT, fill, main, table

sys.path.insert(0, str(ROOT))
from validation.fleet.fleet_run import Settings, run_fleet

RESULTS = EVIDENCE / "fleet.json"
RUNS: Mapping[str, Settings] = {
    "mixer, 1F1B": Settings("mixer", 2, 8),
    "mixer, 1F1B on four ranks": Settings("mixer", 4, 5),
    "mixer, 1F1B, two replicas": Settings("mixer", 2, 4, replicas=2),
    "conv net with shared filters, 1F1B": Settings("conv_net", 2, 4),
    "mixer, interleaved": Settings("mixer", 3, 6, chunks=2),
    "mixer, interleaved, 8 on 3 ranks": Settings("mixer", 3, 8, chunks=2),
    "mixer, all forwards first": Settings("mixer", 3, 3, chunks=2),
    "mixer, balanced memory": Settings("mixer", 3, 4, chunks=2, balanced=True),
}


def measure() -> None:
    """Run all trainings and the example, and store the figures that the page shows."""
    runs = {name: run_fleet(settings).to_json() for name, settings in RUNS.items()}
    example = [sys.executable, str(ROOT / "examples" / "fleet_partial" / "train.py"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(example, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    partial = json.loads(done.stdout.splitlines()[-1])
    content = {"paddle": version("paddlepaddle"), "runs": runs, "partial": partial}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _runs(results: Mapping[str, Any]) -> str:
    header = ("layers and schedule", "ranks, micro-batches", "Fleet's class", "computations, messages per step",
              "gradients bitwise", "losses bitwise", "last loss: pipeproof's", "Fleet's")  # fmt: skip
    return table(header, [_row(name, results["runs"][name]) for name in RUNS])


def _row(name: str, run: Mapping[str, Any]) -> tuple[str, ...]:
    settings = RUNS[name]
    ranks = f"pp {settings.pp}" + (f" x dp {settings.replicas}" if settings.replicas > 1 else "")
    last, same = run["losses"][-1], sum(one["fleet_loss"] == one["loss"] for one in run["losses"])
    result = "the plan's" if run["matches"] else "**not the plan's**"
    verdict = f"{run['computed_per_step']}, {run['messages_per_step']}: {result}"
    return (
        name,
        f"{ranks}, {settings.micro_batches}",
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
    page = EVIDENCE / "fleet.md"
    return {page: fill(page, {"runs": _runs(results), "partial": _partial(results)})}


def run(arguments: Sequence[str]) -> int:
    """Measure if the option is given, and write or check the page."""
    if list(arguments) == ["--measure"]:
        measure()
        sys.argv[1:] = []
    return main("validation/pages/make_fleet.py", pages())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
