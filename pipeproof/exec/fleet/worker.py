"""One rank of Fleet's own pipeline: ``python -m pipeproof.exec.fleet.worker DIRECTORY EVENT_FD``.

The same job, reference and files as a run of ours (``exec.worker``); what
trains is ``fleet.distributed_model(PipelineLayer).train_batch``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pipeproof.exec.fleet.watch import Watch
from pipeproof.exec.jobs import Job, save_step
from pipeproof.exec.own_layers import require_same_start
from pipeproof.exec.rendezvous import await_store
from pipeproof.exec.worker import Emit, main, require_same_plan
from pipeproof.verify.subject import make_subject


def run_fleet_rank(
    job: Job,
    rank: int,
    emit: Emit,
    recording: Callable[[Job], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> None:
    """Train every step with Fleet; leaves step files, and the rank's story. All steps are within ``recording``.

    Raises:
        RuntimeError: the plan is not the one that was verified, or the processes do not begin with equal weights.
    """
    from pipeproof.stages.paddle.runtime import num_math_threads, quiet_native, quiet_python, start_paddle

    start_paddle()
    from paddle.distributed import fleet

    from pipeproof.exec.fleet.groups import connect_fleet, fleet_groups
    from pipeproof.exec.fleet.model import Clock, fleet_model, micro_batches
    from pipeproof.exec.fleet.settings import hook_into, strategy_of
    from pipeproof.stages.own.model import OwnModel
    from pipeproof.stages.paddle.optimizer import update_rule

    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.digest)
    plan, spec = subject.plan, subject.plan.spec
    assert spec.own_layers is not None
    place, replica, count = plan.mesh.coords(rank)["pp"], plan.mesh.coords(rank)["dp"], spec.schedule.num_micro_batches
    op_ids = {str(plan.graph.ops[op_id]): op_id for op_id in plan.graph.rank_ops(rank)}
    clock = Clock(replica * count)

    def enter(op: str) -> None:
        if op in op_ids:  # what is not planned comes out when the story is held against the plan
            emit("at", step=clock.step, op=op_ids[op])

    watch = Watch(place, plan.mesh.size("pp"), enter)
    if rank:
        await_store(os.environ["PADDLE_MASTER"])
    edges = sorted({(channel.src, channel.dst) for channel in plan.graph.channels})
    world = connect_fleet(rank, plan.mesh.num_ranks, edges, watch, lambda what: emit("setup", what=what))
    emit("setup", what="fleet.init")
    own = OwnModel(spec, [layer.name for layer in spec.own_layers.layers])
    with quiet_python(), quiet_native(), fleet_groups(world):
        fleet.init(is_collective=True, strategy=strategy_of(spec), log_level="ERROR")
        topology = fleet.get_hybrid_communicate_group().topology()
        mine = [stage for stage, holders in enumerate(plan.holders) if place in holders]
        layers = fleet_model(own, plan.stages, mine, spec.schedule.num_chunks, topology, clock)
        model = fleet.distributed_model(layers)
    watch.chunk_of = hook_into(model, watch)
    held = {id(weight) for weight in layers.parameters()}
    weights = {name: weight for name, weight in own.weights().items() if id(weight) in held}
    require_same_start(job, {name: weight.numpy() for name, weight in weights.items()})
    update = update_rule(spec.run, list(weights.values()))
    gradients: dict[str, Any] = {}
    _keep_gradients(update, weights, gradients)
    optimizer = fleet.distributed_optimizer(update)
    watch.take()
    emit("ready", threads=num_math_threads())
    stories = []
    with recording(job):
        for step in range(spec.run.steps):
            clock.begin(step)
            data = micro_batches(own, step, replica * count, count)
            loss = model.train_batch(data, optimizer)
            is_last = place == plan.mesh.size("pp") - 1
            of_replica = np.float32(loss.numpy().reshape([]))  # the mean of its own micro-batches
            share = of_replica / np.float32(plan.mesh.size("dp")) if is_last else None
            save_step(job.step_file(f"rank{rank}", step), share, gradients)
            stories.append(watch.take().to_json())
            emit("step", step=step)
    world.world.channels.close()
    job.log_file(rank).write_text(json.dumps({"scheduler": type(model).__name__, "stories": stories}))
    emit("finished")


def _keep_gradients(update: Any, weights: dict[str, Any], into: dict[str, Any]) -> None:
    """Copy every gradient when Fleet, which has summed them by then, steps its inner optimizer.

    Fleet's buffers begin as the first micro-batch's gradient and ours as +0.0; adding that makes every zero positive.
    """
    step = update.step

    def stepping() -> None:
        into.update(
            {
                name: np.zeros(weight.shape, weight.numpy().dtype) if weight.grad is None else weight.grad.numpy() + 0.0
                for name, weight in weights.items()
            }
        )
        step()

    update.step = stepping


if __name__ == "__main__":
    status = main(sys.argv[1:], run_fleet_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
