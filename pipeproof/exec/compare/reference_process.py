"""Process of the single-process reference, next to the ranks.

The launcher starts it as ``python -m pipeproof.exec.compare.reference_process DIRECTORY EVENT_FD LAUNCHER``. It trains
the unpartitioned model. If the plan adds in another order (tensor and data parallelism, backwards that are not in the
order of micro-batches, copies of stages), the optimizer would turn rounding differences into whole steps:

- On Paddle it trains the ordered model instead, and computes each step of the unpartitioned model from the same
  weights. Both write a file per step.
- On PyTorch there is no ordered model. Each step after the first is computed from the weights with which the ranks
  ended the previous step.

For a run that resumes from a state it repeats the steps from step 0 on, which shows values that the state lost or mixed
up. If these steps do not have the run's bits (another plan or another program computed the state), it starts from the
state itself, and not from the weights that the ranks loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeproof.comm.accumulation_order import sum_orders, tied_sums
from pipeproof.comm.lower import lower_loaded
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.compare_gradients import (
    assembled_weights,
    is_checked_by_bound,
    needs_ordered_reference,
)
from pipeproof.exec.rank.framework_protocol import Array
from pipeproof.exec.rank.job_files import (
    CheckpointOptions,
    EventSink,
    Job,
    StepOutcome,
    end_process,
    load_arrays,
    save_arrays,
)
from pipeproof.exec.store.rendezvous import wait_until
from pipeproof.signals import die_with_parent
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import bias_key, bias_name, moves_biases, routers
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.model_family import describe_layers
from pipeproof.stages.reference.reference_state import InitialState, StepResult
from pipeproof.state.byte_ranges import ByteArray, bits_dtype, cast
from pipeproof.state.read_state import SavedState, read_whole
from pipeproof.state.state_index import read_index
from pipeproof.state.state_layout import COUNTERS, MOMENTS, moment_name


def run_reference(job: Job, on_step: Callable[[int], None]) -> None:
    """Run every step; write ``unpartitioned`` and, if needed, ``ordered`` step files, and layer files.

    ``on_step`` is called after each step.
    """
    plan = lower_loaded(job.loaded_plan())
    is_torch = plan.spec.run.backend == "torch"
    watch = None if not job.layers else LayerWatch() if is_torch else LayerWatch(join_dim=plan.boundary.tp.dim)
    results = _torch_results(job, plan, watch) if is_torch else _paddle_results(job, plan, watch)
    for result in results:
        if result.step >= job.checkpoint.first_step:
            if watch is not None:
                save_arrays(job.layers_file("reference", result.step), watch.take())
            _outcome(result).save(job.step_file("unpartitioned", result.step))
        on_step(result.step)


def _paddle_results(job: Job, plan: LoweredPlan, watch: LayerWatch | None) -> Iterator[StepResult]:
    """Yield the steps of the unpartitioned model, and write the ordered model's steps."""
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle(0 if plan.spec.run.device == "gpu" else None)
    from pipeproof.stages.reference.ordered import Orders, run_ordered
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned, unpartitioned_step

    spec, orders = plan.spec, sum_orders(plan)
    start = reference_start(job.checkpoint, spec) if job.checkpoint.reference_from_state else None
    if not needs_ordered_reference(plan):
        yield from run_unpartitioned(spec, watch, start)
        return
    in_order = Orders(orders.loss, orders.by_parameter(plan), tied_sums(plan))
    for result in run_ordered(spec, in_order, watch, start):
        if result.step < job.checkpoint.first_step:
            yield result
            continue
        _outcome(result).save(job.step_file("ordered", result.step))
        yield unpartitioned_step(spec, result.weights, result.step)


def _torch_results(job: Job, plan: LoweredPlan, watch: LayerWatch | None) -> Iterator[StepResult]:
    from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned, unpartitioned_step
    from pipeproof.stages.torch.runtime import start_torch

    start_torch(plan.spec.run.device, deterministic=plan.spec.run.deterministic)
    by_bound = is_checked_by_bound(plan)
    from_state = job.checkpoint.reference_from_state or (by_bound and job.checkpoint.resume is not None)
    results = run_unpartitioned(plan.spec, watch, reference_start(job.checkpoint, plan.spec) if from_state else None)
    if not by_bound:
        yield from results
        return
    yield next(results)
    for step in range(job.checkpoint.first_step + 1, plan.spec.run.steps):
        files = {rank: job.weights_file(rank, step) for rank in range(plan.mesh.num_ranks)}
        weights = assembled_weights(plan, {rank: _await_arrays(file) for rank, file in files.items()})
        yield unpartitioned_step(plan.spec, weights, step)


def _outcome(result: StepResult) -> StepOutcome:
    return StepOutcome(result.loss, result.gradients, result.routers)


def _await_arrays(file: Path) -> dict[str, Array]:
    """Wait for a file, read its arrays and remove it."""
    wait_until(file.exists)  # if it never appears, the launcher ends this process
    arrays = load_arrays(file)
    file.unlink()
    return arrays


def reference_start(options: CheckpointOptions, plan: PlanSpec) -> InitialState:
    """Return the whole state to resume from, as a reference takes it; it was checked against the plan before.

    With a state of weights only, the optimizer and missing biases keep their initial values.

    Raises:
        StateError: a file has changed since the check.
    """
    assert options.resume is not None, "only runs that resume have a state"
    state, run = SavedState(options.resume, read_index(options.resume)), plan.run
    layers = describe_layers(plan)
    whole = {name: _numbers(array) for name, array in read_whole(state).items()}
    names = [p.name for layer in layers for p in layer.parameters]  # sums of squares go in this order
    biased = {bias_key(router): bias_name(router) for router in routers(layers)} if moves_biases(plan) else {}
    slots = MOMENTS[run.optimizer] + COUNTERS[run.optimizer][run.backend]
    optimizer_slots = {(name, slot): moment_name(name, slot) for name in names for slot in slots}
    return InitialState(
        state.steps_done,
        {name: whole[name] for name in names} | {key: whole[name] for key, name in biased.items() if name in whole},
        {key: whole[name] for key, name in optimizer_slots.items() if name in whole},
    )


def _numbers(array: ByteArray) -> Array:
    """Return the values as a numpy array; bfloat16, which numpy lacks, becomes float32."""
    dtype = "float32" if array.dtype == "bfloat16" else array.dtype
    bits = cast(array.content.view(bits_dtype(array.dtype)), array.dtype, dtype)
    return bits.view(dtype).reshape(array.shape)


def main(arguments: list[str]) -> int:
    """Run the reference under pipeproof's launcher."""
    directory, events = Path(arguments[0]), EventSink(int(arguments[1]))
    die_with_parent(int(arguments[2]))
    run_reference(Job.load(directory), lambda step: events.send("step", step=step))
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
