"""One rank of Fleet's own pipeline: ``python -m validation.fleet.fleet_worker DIRECTORY EVENT_FD``.

Job, reference and files are those of a pipeproof run (``exec.rank.worker``); ``train_batch`` of
``fleet.distributed_model(PipelineLayer)`` trains. If the job asks for it, ``record_paddle`` records all steps.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof.exec.launch.custom_layers_check import require_same_start
from pipeproof.exec.launch.job_files import Job, StepOutcome, end_process, save_json
from pipeproof.exec.launch.rendezvous import await_store
from pipeproof.exec.rank.worker import Emit, main, require_same_plan
from pipeproof.verify.subject import make_subject
from validation.fleet.fleet_order import EventRecorder, FleetLog

_RECORD_DIRECTORY_FILE = "record_directory"


def save_record_directory(job_directory: Path, record_directory: Path) -> None:
    """Ask the ranks of a job to record their steps into ``record_directory``."""
    (job_directory / _RECORD_DIRECTORY_FILE).write_text(str(record_directory.resolve()))


def _recording(job: Job) -> AbstractContextManager[object]:
    file = job.directory / _RECORD_DIRECTORY_FILE
    if not file.exists():
        return nullcontext()
    from pipeproof.interop.traces.paddle_calls import record_paddle

    return record_paddle(Path(file.read_text()))


def run_fleet_rank(job: Job, rank: int, emit: Emit) -> None:
    """Train every step with Fleet; write step files and the rank's events.

    Raises:
        RuntimeError: the plan is not the one that was verified, or the processes do not begin with equal weights.
    """
    from pipeproof.stages.paddle.runtime import num_math_threads, quiet_native, quiet_python, start_paddle

    start_paddle()
    from paddle.distributed import fleet

    from pipeproof.stages.custom.built_layers import BuiltModel
    from pipeproof.stages.paddle.optimizer import update_rule
    from validation.fleet.fleet_groups import connect_fleet, fleet_groups
    from validation.fleet.fleet_model import StepClock, fleet_model, hook_into, micro_batches, strategy_of

    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.certificate)
    plan, spec = subject.plan, subject.plan.spec
    pp_rank, replica, count = (
        plan.mesh.coords(rank)["pp"],
        plan.mesh.coords(rank)["dp"],
        spec.schedule.num_micro_batches,
    )
    op_ids = {str(plan.graph.ops[op_id]): op_id for op_id in plan.graph.rank_ops(rank)}
    clock = StepClock(replica * count)

    def enter(op: str) -> None:
        if op in op_ids:  # an unplanned operation is found when the events are compared with the plan
            emit("at", step=clock.step, op=op_ids[op])

    recorder = EventRecorder(pp_rank, plan.mesh.size("pp"), enter)
    if rank:
        await_store(os.environ["PADDLE_MASTER"])
    edges = sorted({(channel.src, channel.dst) for channel in plan.graph.channels})
    world = connect_fleet(rank, plan.mesh.num_ranks, edges, recorder, lambda phase: emit("setup", what=phase))
    emit("setup", what="fleet.init")
    custom_model = BuiltModel(spec, [layer.name for layer in spec.custom.layers])
    with quiet_python(), quiet_native(), fleet_groups(world):
        fleet.init(is_collective=True, strategy=strategy_of(spec), log_level="ERROR")
        topology = fleet.get_hybrid_communicate_group().topology()
        rank_stages = [stage for stage, holders in enumerate(plan.holders) if pp_rank in holders]
        layers = fleet_model(custom_model, plan.stages, rank_stages, spec.schedule.num_chunks, topology, clock)
        model = fleet.distributed_model(layers)
    recorder.chunk_of = hook_into(model, recorder)
    held = {id(weight) for weight in layers.parameters()}
    weights = {name: weight for name, weight in custom_model.weights().items() if id(weight) in held}
    require_same_start(job, {name: weight.numpy() for name, weight in weights.items()})
    update = update_rule(spec.run, list(weights.values()))
    gradients: dict[str, Any] = {}
    _copy_gradients_on_step(update, weights, gradients)
    optimizer = fleet.distributed_optimizer(update)
    recorder.take()
    emit("ready", threads=num_math_threads())
    events = []
    with _recording(job):
        for step in range(spec.run.steps):
            clock.begin(step)
            data = micro_batches(custom_model, step, replica * count, count)
            loss = model.train_batch(data, optimizer)
            is_last = pp_rank == plan.mesh.size("pp") - 1
            replica_loss = np.float32(loss.numpy().reshape([]))  # the mean over the replica's micro-batches
            loss_share = replica_loss / np.float32(plan.mesh.size("dp")) if is_last else None
            StepOutcome(loss_share, gradients).save(job.step_file(f"rank{rank}", step))
            events.append(recorder.take())
            emit("step", step=step)
    world.world.channels.close()
    save_json(job.rank_file(rank, "log"), FleetLog(type(model).__name__, events), FleetLog)
    emit("finished")


def _copy_gradients_on_step(update: Any, weights: dict[str, Any], into: dict[str, Any]) -> None:
    """Copy every gradient into ``into`` when Fleet, which has summed them by then, steps its inner optimizer.

    Fleet's gradient buffers begin with the first micro-batch's gradient, pipeproof's with +0.0. Adding +0.0 makes every
    zero positive.
    """
    step = update.step

    def copy_and_step() -> None:
        into.update(
            {
                name: np.zeros(weight.shape, weight.numpy().dtype) if weight.grad is None else weight.grad.numpy() + 0.0
                for name, weight in weights.items()
            }
        )
        step()

    update.step = copy_and_step


if __name__ == "__main__":
    end_process(main(sys.argv[1:], run_fleet_rank))
