"""The process that runs the single-process reference beside the ranks.

Started by the launcher as ``python -m pipeproof.exec.reference DIRECTORY
EVENT_FD``. It runs the uncut model, and, where tensor or data parallelism adds
in another order, also the ordered one; both leave a file per step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipeproof.exec.jobs import EventSink, Job, save_step
from pipeproof.exec.worker import end_with_launcher
from pipeproof.specs.plan import PlanSpec


def needs_ordered(spec: PlanSpec) -> bool:
    """Whether the plan adds in another order than the uncut model: any tensor or data parallelism."""
    return spec.topology.tp > 1 or spec.topology.dp > 1


def run_reference(job: Job, on_step: Callable[[int], None]) -> None:
    """Run every step of the reference; leaves ``uncut`` and, where needed, ``ordered`` step files."""
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from pipeproof.stages.reference.ordered import run_ordered
    from pipeproof.stages.reference.uncut import run_uncut

    spec = job.loaded_plan().spec
    sources = {"uncut": run_uncut(spec)}
    if needs_ordered(spec):
        sources["ordered"] = run_ordered(spec)
    for step in range(spec.run.steps):
        for who, results in sources.items():
            result = next(results)
            save_step(job.step_file(who, step), result.loss, result.gradients)
        on_step(step)


def main(arguments: list[str]) -> int:
    """Run the reference under pipeproof's launcher."""
    directory, events = Path(arguments[0]), EventSink(int(arguments[1]))
    end_with_launcher(directory)
    run_reference(Job.load(directory), lambda step: events.send("step", step=step))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
