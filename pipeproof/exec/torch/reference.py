"""The reference of a run with PyTorch, on the run's device: the uncut model, and nothing that adds in a plan's order.

Where the plan adds as the uncut model does, that trains beside the ranks. Else
each step but the first is taken from the weights that the ranks ended the step
before with, as they leave them; the first from those that it begins with, or,
of a run that goes on from a state, from the state itself, not from what the
ranks made of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.framework import Array
from pipeproof.exec.jobs import Job, load_arrays, save_arrays, save_step
from pipeproof.exec.judged import is_by_bound, whole_weights
from pipeproof.exec.reference_start import start_of
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.reference.result import StepResult
from pipeproof.stages.reference.torch_uncut import run_uncut, uncut_step
from pipeproof.stages.torch.runtime import start_torch

_POLL_S = 0.01


def run_torch_reference(job: Job, plan: LoweredPlan, on_step: Callable[[int], None]) -> None:
    """Run every step; leaves ``uncut`` step files, and those of layers as far as the model trains by itself."""
    start_torch(plan.spec.run.device)
    watch = LayerWatch() if job.layers else None
    for result in _results(job, plan, watch):
        if result.step < job.kept.first_step:
            on_step(result.step)
            continue
        if watch is not None:
            save_arrays(job.layers_file("reference", result.step), watch.take())
        save_step(job.step_file("uncut", result.step), result.loss, result.gradients, result.routers)
        on_step(result.step)


def _results(job: Job, plan: LoweredPlan, watch: LayerWatch | None) -> Iterator[StepResult]:
    by_bound = is_by_bound(plan)
    from_state = job.kept.reference_from_state or (by_bound and job.kept.resume is not None)
    alone = run_uncut(plan.spec, watch, start_of(job.kept, plan.spec) if from_state else None)
    if not by_bound:
        yield from alone
        return
    yield next(alone)
    for step in range(job.kept.first_step + 1, plan.spec.run.steps):
        files = [job.weights_file(rank, step) for rank in range(plan.mesh.num_ranks)]
        weights = whole_weights(plan, [_taken(file) for file in files])
        yield uncut_step(plan.spec, weights, step)


def _taken(file: Path) -> dict[str, Array]:
    """What stands in a file, once it is there; it is removed."""
    while not file.exists():  # the launcher ends this process if it never comes
        time.sleep(_POLL_S)
    arrays = load_arrays(file)
    file.unlink()
    return arrays
