"""Own layers in a run: tried before the first process starts, and held to the same weights in all of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeproof.comm.loaded import blaming_plan
from pipeproof.exec.jobs import Job
from pipeproof.exec.rendezvous import process_environment
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.load import LoadedPlan
from pipeproof.stages.own.codes import cannot_build

_SHOWN = 3
"""Last lines of output that are shown of a process that ended badly."""


def require_own_layers(job: Job, loaded: LoadedPlan, timeout_s: float) -> None:
    """Try the layers of a job's plan in a process of their own; nothing for a GPT.

    Raises:
        PlanFileError: PP911, PP912, at the place in the plan.
    """
    if loaded.spec.own_layers is None:
        return
    output = job.directory / "own_check.out"
    with blaming_plan(loaded):
        with output.open("wb") as stream:
            try:
                done = subprocess.run(
                    [sys.executable, "-P", "-m", "pipeproof.exec.own_check", str(job.directory)],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=process_environment(),
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                message = f"building the layers and running one micro-batch took more than {timeout_s:g} s"
                raise cannot_build(message, "give `--timeout` more seconds, or load less in `build`") from error
        if not job.own_file.exists():
            raise cannot_build(f"trying the layers ended with status {done.returncode}", _last_lines(output))
        found = json.loads(job.own_file.read_text())
        if "weights" not in found:
            finding = Finding(found["code"], Severity.ERROR, found["message"], help=found["help"])
            raise BadPlanAtError(finding, tuple(found["path"]))


def require_same_start(job: Job, weights: Mapping[str, Any]) -> None:
    """Hold what this process begins with against what own layers began with when they were tried.

    ``weights`` are arrays by name, as many as the process has.

    Raises:
        RuntimeError: they differ, so that ranks would train different models.
    """
    known = json.loads(job.own_file.read_text())["weights"]
    for name, weight in weights.items():
        if hashlib.md5(weight.tobytes(), usedforsecurity=False).hexdigest() != known[name]:
            raise RuntimeError(
                f"the weight `{name}` begins with other values than in the process that tried the layers: what `build` "
                "makes depends on more than the seed"
            )


def _last_lines(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return "its last output was: " + " | ".join(lines[-_SHOWN:]) if lines else "it printed nothing"
