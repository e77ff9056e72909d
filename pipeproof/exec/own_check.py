"""The process that tries own layers before a run: it builds them, gives them one micro-batch, and says what it found.

Started as ``python -m pipeproof.exec.own_check DIRECTORY``. A person's code may
do anything, so neither the launcher nor ``check`` loads it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeproof.exec.jobs import Job
from pipeproof.specs.finding import BadPlanAtError
from pipeproof.specs.plan import PlanSpec


def try_layers(plan: PlanSpec, *, keeps_state: bool = False) -> dict[str, str]:
    """The MD5 of every weight that the layers of a plan begin with.

    With ``keeps_state`` all that the first micro-batch changes in them must be declared, and must be all that they go
    on from.

    Raises:
        BadPlanAtError: PP911, PP912, as ``require_declared``, ``require_kept`` and ``require_resumes``; two models
            built from one seed differ.
    """
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from pipeproof.stages.own.codes import cannot_build
    from pipeproof.stages.own.declaration import require_declared, require_kept
    from pipeproof.stages.own.model import OwnModel, digests
    from pipeproof.stages.own.rehearsal import require_resumes

    model = OwnModel(plan, [layer.name for layer in plan.own_layers.layers] if plan.own_layers is not None else None)
    first, before = digests(model.weights()), digests(model.untrained())
    require_declared(plan, model)
    if keeps_state:
        require_kept(before, model.layers, plan)
    again = OwnModel(plan, [layer.name for layer in model.layers])
    all_first, second = first | before, digests(again.weights() | again.untrained())
    different = [name for name in all_first if all_first[name] != second.get(name)]
    if different:
        raise cannot_build(
            f"built twice from seed {plan.run.seed}, {len(different)} of {len(all_first)} weights and buffers differ, "
            f"the first `{different[0]}`",
            "draw from Paddle's, numpy's or Python's global generator, which pipeproof seeds before it builds",
        )
    if keeps_state:
        require_resumes(model, again, plan)
    return first


def main(arguments: list[str]) -> int:
    """Try the layers of the job in a directory, and leave there what was found."""
    job = Job.load(Path(arguments[0]))
    found: dict[str, Any]
    try:
        keeps_state = job.kept.root is not None or job.kept.resume is not None
        found = {"weights": try_layers(job.loaded_plan().spec, keeps_state=keeps_state)}
    except BadPlanAtError as error:
        finding = error.findings[0]
        found = {"code": finding.code, "message": finding.message, "help": finding.help, "path": error.path}
    part = job.own_file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(job.own_file)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
