"""The process that runs the single-process reference beside the ranks.

Started by the launcher as ``python -m pipeproof.exec.reference DIRECTORY
EVENT_FD``. It trains the uncut model. Where tensor or data parallelism adds in
another order it trains the ordered model instead, and takes each step of the
uncut one from the same weights: the optimizer would turn differences that are
rounding alone into whole steps. Both leave a file per step.
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
    from pipeproof.stages.reference.uncut import run_uncut, uncut_step

    spec = job.loaded_plan().spec
    ordered = needs_ordered(spec)
    for result in run_ordered(spec) if ordered else run_uncut(spec):
        if ordered:
            save_step(job.step_file("ordered", result.step), result.loss, result.gradients)
            result = uncut_step(spec, result.weights, result.step)
        save_step(job.step_file("uncut", result.step), result.loss, result.gradients)
        on_step(result.step)


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
