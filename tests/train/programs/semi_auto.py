"""A pipeline of Paddle's semi-automatic parallelism, its plan, and the same blocks in ``pipeproof.paddle.Pipeline``.

``semi_auto.py OUTPUT KIND LOGS``, on two CPU processes. Each rank writes as JSON the plan and the MD5 of each gradient,
and records the second step. Paddle's gloo has no sends that return early: 1F1B and VPP hang there. Their plans are made
of shapes alone, and 1F1B is recorded until it times out.
"""

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path

from pipeproof.stages.paddle.runtime import start_paddle

start_paddle()
import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.distributed import fleet  # noqa: E402
from paddle.distributed.auto_parallel.pipelining.schedules import Schedule1F1B, ScheduleFThenB, ScheduleVPP  # noqa: E402
from paddle.distributed.auto_parallel.pipelining.stage import PipelineStage  # noqa: E402

from pipeproof.interop.traces.paddle_calls import record_paddle  # noqa: E402
from pipeproof.paddle import Pipeline, PipelineError, plan_of_schedule  # noqa: E402
from tests.train.programs.fleet_script import ROWS, Block, floats  # noqa: E402

COUNT = 4
CLASSES = {"gpipe": ScheduleFThenB, "1f1b": Schedule1F1B, "interleaved": ScheduleVPP}


class Kept(paddle.optimizer.SGD):
    """Leaves the gradients where they are."""

    def clear_grad(self, *_, **__):
        pass


def md5s(layers):
    return {
        f"{number}.{name}": hashlib.md5(weight.grad.numpy().tobytes()).hexdigest()
        for number, layer in layers.items()
        for name, weight in layer.named_parameters()
    }


def main():
    output, kind, logs = sys.argv[1:]
    dist.init_parallel_env()
    rank = dist.get_rank()
    fleet.auto.set_mesh(dist.ProcessMesh([0, 1], dim_names=["pp"]))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    paddle.seed(1)
    blocks = [Block() for _ in range(4 if kind == "interleaved" else 2)]
    x, y = floats(0, COUNT)
    own = {number: blocks[number] for number in range(rank, len(blocks), 2)}
    stages = [PipelineStage(block, number, len(blocks), group=group) for number, block in own.items()]
    loss_fn = nn.MSELoss()
    schedule = CLASSES[kind](stages if kind == "interleaved" else stages[0], COUNT, loss_fn=loss_fn)
    losses = [] if rank else None
    inputs, target = ((x,), {}) if rank == 0 else ((), {"target": y, "losses": losses})
    found = {}
    try:
        plan_of_schedule(schedule)
    except PipelineError as error:
        found["early"] = str(error)
    if kind == "gpipe":
        schedule.step(*inputs, **target)
    else:
        start = schedule._initialize_stages if kind == "interleaved" else schedule._initialize_stage
        start(schedule._split_inputs(inputs, {})[0][0], {}, y[:ROWS])
    plan = plan_of_schedule(schedule)
    found |= {"plan": plan.content, "verdict": plan.certificate.verdict}
    if rank == 0:
        plan.save(f"{output}.yaml")
    if kind == "interleaved":
        found["order"] = [str(action) for action in schedule.pipeline_order[rank] if action is not None]
        found["planned"] = [str(op) for op in plan.lowered.programs[rank]]
    else:
        for block in own.values():
            block.clear_gradients()
        try:
            with record_paddle(logs):
                schedule.step(*inputs, **target)
        except RuntimeError as error:
            found["error"] = str(error)
    if kind == "gpipe":
        found["theirs"] = md5s(own)
        for block in own.values():
            block.clear_gradients()
        pipe = Pipeline(
            blocks, schedule=kind, num_micro_batches=COUNT, loss_fn=lambda out, label: COUNT * loss_fn(out, label)
        )
        each = pipe.train_batch((x, y), Kept(0.0, parameters=pipe.parameters()), return_micro_batch_loss=True)
        found["ours"] = md5s(own)
        found["losses"] = [[float(loss) for loss in losses or ()], [float(loss) for loss in each]]
    Path(f"{output}.{rank}").write_text(json.dumps(found), encoding="utf-8")


main()
