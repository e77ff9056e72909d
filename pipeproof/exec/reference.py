"""The process that runs the single-process reference beside the ranks.

Started by the launcher as ``python -m pipeproof.exec.reference DIRECTORY
EVENT_FD``. It trains the uncut model. Where the plan adds in another order, as
tensor and data parallelism do, schedules whose backwards are not in the order
of micro-batches, and copies of stages, it trains the ordered model instead, and
takes each step of the uncut one from the same weights: the optimizer would turn
differences that are rounding alone into whole steps. Both leave a file per step.

Of a run that goes on from a state it repeats the steps before, from step 0 on:
what a state lost or mixed then shows. Where these steps have no such bits (they
were added in another plan's order, or were another program's) it begins with
the whole state.
PyTorch's is ``exec.torch.reference``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipeproof.comm.accumulation import sum_orders, tied_sums
from pipeproof.comm.loaded import lower_loaded
from pipeproof.exec.jobs import EventSink, Job, save_arrays, save_step
from pipeproof.exec.judged import needs_ordered
from pipeproof.exec.own_layers import require_same_start
from pipeproof.exec.worker import end_with_launcher
from pipeproof.stages.describe.watch import LayerWatch


def run_reference(job: Job, on_step: Callable[[int], None]) -> None:
    """Run every step of the reference; leaves ``uncut`` and, where needed and there is one, ``ordered`` step files."""
    plan = lower_loaded(job.loaded_plan())
    if plan.spec.run.backend == "torch":
        from pipeproof.exec.torch.reference import run_torch_reference

        run_torch_reference(job, plan, on_step)
        return
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle(0 if plan.spec.run.device == "gpu" else None)
    from pipeproof.exec.reference_start import start_of
    from pipeproof.stages.reference.ordered import run_ordered
    from pipeproof.stages.reference.orders import Orders
    from pipeproof.stages.reference.uncut import run_uncut, uncut_step

    spec, ordered, orders = plan.spec, needs_ordered(plan), sum_orders(plan)
    watch = LayerWatch(join_dim=plan.boundary.tp.dim) if job.layers else None
    in_order = Orders(orders.loss, orders.by_parameter(plan), tied_sums(plan))
    start = start_of(job.kept, spec) if job.kept.reference_from_state else None
    results = run_ordered(spec, in_order, watch, start) if ordered else run_uncut(spec, watch, start)
    for result in results:
        if start is None and result.step == 0 and spec.own_layers is not None:
            require_same_start(job, {name: result.weights[name] for name in result.gradients})
        if result.step < job.kept.first_step:
            on_step(result.step)
            continue
        if watch is not None:
            save_arrays(job.layers_file("reference", result.step), watch.take())
        if ordered:
            save_step(job.step_file("ordered", result.step), result.loss, result.gradients, result.routers)
            result = uncut_step(spec, result.weights, result.step)
        save_step(job.step_file("uncut", result.step), result.loss, result.gradients, result.routers)
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
