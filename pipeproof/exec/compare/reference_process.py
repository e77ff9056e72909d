"""Process of the single-process reference, next to the ranks.

The launcher starts it as ``python -m pipeproof.exec.compare.reference_process DIRECTORY EVENT_FD LAUNCHER``. It
trains the
unpartitioned model. Where the plan adds in another order (tensor and data parallelism, backwards that are not in the
order of micro-batches, copies of stages) it trains the ordered model instead, and computes each step of the
unpartitioned model from the same weights: the optimizer would turn rounding differences into whole steps. Both write a
file per step.

For a run that resumes from a state it repeats the steps from step 0 on, which shows what the state lost or mixed up.
Where these steps do not have the run's bits (another plan or another program computed the state) it starts from the
state. The PyTorch reference is ``exec.compare.torch_reference``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeproof.comm.accumulation_order import sum_orders, tied_sums
from pipeproof.comm.lower import lower_loaded
from pipeproof.exec.rank.job_files import EventSink, Job, StepOutcome, end_process, save_arrays
from pipeproof.exec.rank.reference_kind import needs_ordered_reference
from pipeproof.signals import die_with_parent
from pipeproof.stages.describe.layer_records import LayerWatch


def run_reference(job: Job, on_step: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
    """Run every step of the reference; write ``unpartitioned`` and, where needed, ``ordered`` step files.

    ``ranks`` are those whose files are in the job's directory, all by default (see ``run_torch_reference``).
    """
    plan = lower_loaded(job.loaded_plan())
    if plan.spec.run.backend == "torch":
        from pipeproof.exec.compare.torch_reference import run_torch_reference

        run_torch_reference(job, plan, on_step, ranks)
        return
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle(0 if plan.spec.run.device == "gpu" else None)
    from pipeproof.exec.compare.reference_start import reference_start
    from pipeproof.stages.reference.ordered import run_ordered
    from pipeproof.stages.reference.ordered_sums import Orders
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned, unpartitioned_step

    spec, ordered, orders = plan.spec, needs_ordered_reference(plan), sum_orders(plan)
    watch = LayerWatch(join_dim=plan.boundary.tp.dim) if job.layers else None
    in_order = Orders(orders.loss, orders.by_parameter(plan), tied_sums(plan))
    start = reference_start(job.checkpoint, spec) if job.checkpoint.reference_from_state else None
    results = run_ordered(spec, in_order, watch, start) if ordered else run_unpartitioned(spec, watch, start)
    for result in results:
        if result.step < job.checkpoint.first_step:
            on_step(result.step)
            continue
        if watch is not None:
            save_arrays(job.layers_file("reference", result.step), watch.take())
        if ordered:
            StepOutcome(result.loss, result.gradients, result.routers).save(job.step_file("ordered", result.step))
            result = unpartitioned_step(spec, result.weights, result.step)
        outcome = StepOutcome(result.loss, result.gradients, result.routers)
        outcome.save(job.step_file("unpartitioned", result.step))
        on_step(result.step)


def main(arguments: list[str]) -> int:
    """Run the reference under pipeproof's launcher."""
    directory, events = Path(arguments[0]), EventSink(int(arguments[1]))
    die_with_parent(int(arguments[2]))
    run_reference(Job.load(directory), lambda step: events.send("step", step=step))
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
