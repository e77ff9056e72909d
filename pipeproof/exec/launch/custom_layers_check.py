"""Check of custom layers before a run: a separate process builds them and runs one micro-batch.

The process is started as ``python -m pipeproof.exec.launch.custom_layers_check DIRECTORY``. User code may do anything,
so neither the launcher nor ``check`` loads it. All processes of the run then start from the weights seen here.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeproof.atomic_write import atomic_write
from pipeproof.comm.lower import blaming_plan
from pipeproof.diagnostics.finding import BadPlanAtError, Finding, Severity
from pipeproof.exec.launch.job_files import Job, end_process
from pipeproof.exec.launch.rendezvous import process_environment
from pipeproof.foreign_text import decode_json
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.custom_codes import cannot_build

_SHOWN = 3
"""Number of last output lines that are shown of a failed process."""


def require_custom_layers(job: Job, loaded: LoadedPlan, timeout_s: float) -> None:
    """Try the custom layers of a job's plan in a separate process; do nothing for a GPT.

    Raises:
        PlanFileError: PP911, PP912, PP186, with the location in the plan.
    """
    if not loaded.spec.is_custom:
        return
    output = job.directory / "custom_layers_check.out"
    with blaming_plan(loaded):
        with output.open("wb") as stream:
            try:
                done = subprocess.run(
                    [sys.executable, "-P", "-m", "pipeproof.exec.launch.custom_layers_check", str(job.directory)],
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
        if not job.custom_layers_file.exists():
            raise cannot_build(f"trying the layers ended with status {done.returncode}", _last_lines(output))
        result = decode_json(job.custom_layers_file.read_text())
        if "weights" not in result:
            finding = Finding(result["code"], Severity.ERROR, result["message"], help=result["help"])
            raise BadPlanAtError(finding, tuple(result["path"]))


def require_same_start(job: Job, weights: Mapping[str, Any]) -> None:
    """Compare this process's initial weights with those of the process that tried the custom layers.

    ``weights`` are the arrays of this process by name.

    Raises:
        RuntimeError: the weights differ, so that ranks would train different models.
    """
    known = decode_json(job.custom_layers_file.read_text())["weights"]
    for name, weight in weights.items():
        if hashlib.md5(weight.tobytes(), usedforsecurity=False).hexdigest() != known[name]:
            raise RuntimeError(
                f"the weight `{name}` begins with other values than in the process that tried the layers: the "
                "result of `build` depends on more than the seed"
            )


def _last_lines(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return "its last output was: " + " | ".join(lines[-_SHOWN:]) if lines else "it printed nothing"


def try_layers(plan: PlanSpec, *, saves_state: bool = False, checks_backwards: bool = False) -> dict[str, str]:
    """Return the MD5 of every initial weight of a plan's layers.

    With ``saves_state`` all tensors that the first micro-batch changes must be declared, and must be enough to resume.
    With ``checks_backwards`` gradients are compared with finite differences.

    Raises:
        BadPlanAtError: PP911, PP912, PP186, see ``require_declared``, ``require_declared_changes``,
            ``require_resumable`` and ``require_right_backwards``, or two models built from one seed differ.
    """
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from pipeproof.stages.custom.backward_check import require_right_backwards
    from pipeproof.stages.custom.built_layers import BuiltModel, digests
    from pipeproof.stages.custom.declaration import require_declared, require_declared_changes, require_resumable

    model = BuiltModel(plan, [layer.name for layer in plan.custom.layers])
    first, before = digests(model.weights()), digests(model.untrained())
    require_declared(plan, model)
    if saves_state:
        require_declared_changes(before, model.layers, plan)
    again = BuiltModel(plan, [layer.name for layer in model.layers])
    all_first, second = first | before, digests(again.weights() | again.untrained())
    different = [name for name in all_first if all_first[name] != second.get(name)]
    if different:
        raise cannot_build(
            f"built twice from seed {plan.run.seed}, {len(different)} of {len(all_first)} weights and buffers differ, "
            f"the first `{different[0]}`",
            "draw from Paddle's, numpy's or Python's global generator, which pipeproof seeds before it builds",
        )
    if saves_state:
        require_resumable(model, again, plan)
    if checks_backwards:
        require_right_backwards(plan)
    return first


def main(arguments: list[str]) -> int:
    """Try the layers of the job in a directory, and write the result there."""
    job = Job.load(Path(arguments[0]))
    result: dict[str, Any]
    try:
        saves_state = job.checkpoint.root is not None or job.checkpoint.resume is not None
        checks = job.options.check_layers
        weights = try_layers(job.loaded_plan().spec, saves_state=saves_state, checks_backwards=checks)
        result = {"weights": weights}
    except BadPlanAtError as error:
        finding = error.findings[0]
        result = {"code": finding.code, "message": finding.message, "help": finding.help, "path": error.path}
    with atomic_write(job.custom_layers_file) as new:
        new.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
