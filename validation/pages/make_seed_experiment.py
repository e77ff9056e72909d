"""Write the figures of ``results/seed-experiment.md`` from the runs in ``results/seed_experiment.json``.

``python validation/pages/make_seed_experiment.py`` writes, ``--check`` exits 1 if the page is stale, ``--measure``
runs the plans again, with ``--unsafe``, because some of them are wrong on purpose. It needs Paddle, and two minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import EVIDENCE, ROOT, fill, main, table

from pipeproof.specs.load_plan import load_plan

RESULTS = EVIDENCE / "seed_experiment.json"
EXAMPLES = ROOT / "examples" / "seed"
PATIENCE_S = 180.0
"""Time limit of a run: ten times its time on an idle machine."""
CUT_TOKENS = {"seq_length": 30, "micro_batch_size": 1}
"""Sizes with which each rank has 15 tokens of a micro-batch: a slice of half of them ends inside a token."""

Result = Mapping[str, Any]


def plans() -> dict[str, dict[str, Any]]:
    """Return the four examples by name, and for the two with partial transport the forms whose slices cut a token."""
    found = {
        path.stem: load_plan(path).spec.model_dump(mode="json", exclude_unset=True)
        for path in sorted(EXAMPLES.glob("*.yaml"))
    }
    for name in [name for name in found if name.endswith("_partial")]:
        model = {**found[name]["model"], "seq_length": CUT_TOKENS["seq_length"]}
        schedule = {**found[name]["schedule"], "micro_batch_size": CUT_TOKENS["micro_batch_size"]}
        found[f"{name}_cut_tokens"] = {**found[name], "model": model, "schedule": schedule}
    return found


# --- measuring ---


def one_run(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Run a plan in its own processes, whether or not it passes its check.

    Returns:
        ``plan``; ``paddle``, the installed version; ``status``; ``verified``; ``steps`` with the losses in full; and
        ``gradients``: for each gradient of the first step its name, stage, MD5, and whether all ranks have the
        reference's bits.

    Raises:
        RuntimeError: the run wrote no report.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan_file, report_file = Path(folder) / "plan.json", Path(folder) / "report.json"
        plan_file.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "pipeproof", "run", str(plan_file), "--unsafe", "--report", str(report_file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        if not report_file.exists():
            raise RuntimeError(f"exit status {done.returncode}:\n{done.stdout}{done.stderr}")
        report = json.loads(report_file.read_text(encoding="utf-8"))
    return {
        "plan": plan,
        "paddle": version("paddlepaddle"),
        "status": done.returncode,
        "verified": report["verified"],
        "steps": [{key: step[key] for key in ("step", "loss", "reference_loss")} for step in report["steps"]],
        "gradients": [
            {
                "name": gradient["name"],
                "stage": gradient["stage"],
                "md5": gradient["md5"],
                "right": gradient["md5"] == gradient["reference_md5"] and gradient["replicas_agree"],
            }
            for gradient in report["gradients"]
            if gradient["step"] == 0
        ],
    }


def measure() -> None:
    """Run all plans, one after the other."""
    results = {}
    for name, plan in plans().items():
        results[name] = one_run(plan)
        sys.stderr.write(f"{name}: loss {results[name]['steps'][0]['loss']!r}\n")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


# --- the page ---


@dataclass(frozen=True)
class Pair:
    """Two runs that differ only in the position of the norm."""

    after: Result
    before: Result

    @property
    def upstream(self) -> frozenset[str]:
        """The weights before the boundary in both runs."""
        return _of_stage(self.after, 0) & _of_stage(self.before, 0)

    @property
    def same(self) -> frozenset[str]:
        """The weights whose gradients of the first step have equal bits in both runs."""
        md5s = [{one["name"]: one["md5"] for one in run["gradients"]} for run in (self.after, self.before)]
        return frozenset(name for name in md5s[0] if md5s[0][name] == md5s[1][name])

    @property
    def same_loss(self) -> bool:
        """True if the first losses are equal in every bit."""
        return bool(_loss(self.after) == _loss(self.before))


def pairs(results: Mapping[str, Result]) -> dict[str, Pair]:
    """Return the pairs by the part of their names after the position of the norm."""
    kinds = ("partial", "full", "partial_cut_tokens")
    return {kind: Pair(results[f"norm_after_{kind}"], results[f"norm_before_{kind}"]) for kind in kinds}


def _of_stage(run: Result, stage: int) -> frozenset[str]:
    return frozenset(one["name"] for one in run["gradients"] if one["stage"] == stage)


def _loss(run: Result, step: int = 0) -> float:
    return float(run["steps"][step]["loss"])


def _num_right(run: Result, names: Iterable[str] | None = None) -> str:
    gradients = [one for one in run["gradients"] if names is None or one["name"] in names]
    return f"{sum(one['right'] for one in gradients)} of {len(gradients)}"


def figures_part(pair: Pair) -> str:
    """Return a table of both runs of a pair, compared with the reference and with each other."""
    runs = (pair.after, pair.before)
    upstream = pair.upstream
    equal = f"{len(upstream & pair.same)} of {len(upstream)}"
    rows = [
        ("proved by `check`", *("yes" if run["verified"] else "no" for run in runs)),
        ("first loss", *(f"`{_loss(run):.20f}`" for run in runs)),
        ("first loss of the reference", *(f"`{run['steps'][0]['reference_loss']:.20f}`" for run in runs)),
        ("gradients with the reference's bits", *(_num_right(run) for run in runs)),
        ("second loss", *(f"`{_loss(run, 1):.20f}`" for run in runs)),
    ]
    verb = "have" if pair.same_loss else "**do not have**"
    return (
        table(("", "norm after the empty layers", "norm before them"), rows)
        + f"\nThe first losses {verb} equal bits. Of the gradients upstream of the boundary, {equal} are equal in both "
        f"runs. Equal in both runs: {_listed(pair.same)}."
    )


def _listed(names: frozenset[str]) -> str:
    return (
        f"the gradients of {len(names)} weights"
        if len(names) > 3
        else ", ".join(f"`{n}`" for n in sorted(names)) or "none"
    )


def parts(results: Mapping[str, Result]) -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    return {kind: figures_part(pair) for kind, pair in pairs(results).items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
        sys.exit(0)
    page = EVIDENCE / "seed-experiment.md"
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    sys.exit(main("validation/pages/make_seed_experiment.py", {page: fill(page, parts(measured))}))
