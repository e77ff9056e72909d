"""PyTorch reference of a run, on the run's device: the unpartitioned model; there is no ordered model.

Where the plan adds like the unpartitioned model, that model trains next to the ranks. Otherwise each step but the first
is computed from the weights with which the ranks ended the previous step, if the ranks of this host have all of them;
otherwise these steps have no reference. The first step starts from the initial
weights, or from the saved state itself if the run resumes, and not from the weights that the ranks loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.reference_start import reference_start
from pipeproof.exec.rank.framework_protocol import Array
from pipeproof.exec.rank.job_files import Job, StepOutcome, load_arrays, save_arrays
from pipeproof.exec.rank.reference_kind import assembled_weights, holds_all_weights, is_checked_by_bound
from pipeproof.exec.store.polling import wait_until
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.reference.reference_state import StepResult
from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned, unpartitioned_step
from pipeproof.stages.torch.runtime import start_torch


def run_torch_reference(
    job: Job, plan: LoweredPlan, on_step: Callable[[int], None], ranks: Sequence[int] | None
) -> None:
    """Run every step; write ``unpartitioned`` step files, and layer files of steps that the model trains itself.

    ``ranks`` are those that write their weights into the job's directory, all by default. If they do not have all
    weights, only the first step of a plan that a bound checks has a reference. ``on_step`` is called for these steps.
    """
    ranks = range(plan.mesh.num_ranks) if ranks is None else ranks
    start_torch(plan.spec.run.device, deterministic=plan.spec.run.deterministic)
    watch = LayerWatch() if job.layers else None
    for result in _results(job, plan, ranks, watch):
        if result.step < job.checkpoint.first_step:
            on_step(result.step)
            continue
        if watch is not None:
            save_arrays(job.layers_file("reference", result.step), watch.take())
        StepOutcome(result.loss, result.gradients, result.routers).save(job.step_file("unpartitioned", result.step))
        on_step(result.step)


def _results(job: Job, plan: LoweredPlan, ranks: Sequence[int], watch: LayerWatch | None) -> Iterator[StepResult]:
    by_bound = is_checked_by_bound(plan)
    from_state = job.checkpoint.reference_from_state or (by_bound and job.checkpoint.resume is not None)
    results = run_unpartitioned(plan.spec, watch, reference_start(job.checkpoint, plan.spec) if from_state else None)
    if not by_bound:
        yield from results
        return
    yield next(results)
    if not holds_all_weights(plan, ranks):
        return
    for step in range(job.checkpoint.first_step + 1, plan.spec.run.steps):
        weights = assembled_weights(plan, {rank: _await_arrays(job.weights_file(rank, step)) for rank in ranks})
        yield unpartitioned_step(plan.spec, weights, step)


def _await_arrays(file: Path) -> dict[str, Array]:
    """Wait for a file, read its arrays and remove it."""
    wait_until(file.exists)  # if it never appears, the launcher ends this process
    arrays = load_arrays(file)
    file.unlink()
    return arrays
