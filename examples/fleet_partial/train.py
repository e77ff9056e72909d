"""Fleet's partial messages with sequence parallelism: two tensor-parallel ranks, two stages, on the CPU.

``python examples/fleet_partial/train.py`` trains one small model three times
from the same weights, on the same data: in one process, and with Fleet's
``train_batch`` on four processes, with ``enable_partial_send_recv`` off and on
(Fleet's default). Everything except the groups is Fleet's code: its
sequence-parallel linear layers, its 1F1B scheduler, its batched messages.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SEQUENCE, ROWS, INPUTS, HIDDEN, INNER, CLASSES = 8, 2, 4, 8, 16, 5
STEPS, MICRO_BATCHES, TENSOR_PARALLEL, STAGES = 3, 4, 2, 2
SHAPES = {
    "first": (INPUTS, HIDDEN),
    "block.0.norm": (HIDDEN,), "block.0.up": (HIDDEN, INNER), "block.0.down": (INNER, HIDDEN),
    "block.1.norm": (HIDDEN,), "block.1.up": (HIDDEN, INNER), "block.1.down": (INNER, HIDDEN),
    "last": (HIDDEN, CLASSES),
}  # fmt: skip
SHARDED_DIM = {"up": 1, "down": 0}
"""The dim along which tensor-parallel ranks shard a weight."""


def weight(name):
    """Return the initial weight, the same in all three trainings."""
    rng = np.random.default_rng([len(name), *name.encode()])
    return (rng.standard_normal(SHAPES[name]) / SHAPES[name][0] ** 0.5).astype("float32")


def micro_batch(step, index):
    """Return inputs and labels, with the sequence dim first, as sequence parallelism needs it."""
    rng = np.random.default_rng([step, index])
    inputs = rng.standard_normal((SEQUENCE, ROWS, INPUTS)).astype("float32")
    return inputs, rng.integers(0, CLASSES, (SEQUENCE, ROWS))


def in_one_process():
    """Return the losses of all steps and the gradients of the first, without any parallelism."""
    import paddle
    import paddle.nn.functional as F

    weights = {name: paddle.to_tensor(weight(name), stop_gradient=False) for name in SHAPES}
    optimizer = paddle.optimizer.SGD(0.05, parameters=list(weights.values()))
    losses, gradients = [], {}
    for step in range(STEPS):
        total = 0.0
        for index in range(MICRO_BATCHES):
            inputs, labels = (paddle.to_tensor(array) for array in micro_batch(step, index))
            x = inputs @ weights["first"]
            for block in ("block.0", "block.1"):
                y = F.layer_norm(x, HIDDEN, weights[f"{block}.norm"])
                x = x + F.gelu(y @ weights[f"{block}.up"]) @ weights[f"{block}.down"]
            loss = F.cross_entropy(x @ weights["last"], labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step == 0:
            gradients = {name: one.grad.numpy() for name, one in weights.items()}
        optimizer.step()
        optimizer.clear_grad()
    return losses, gradients


def pipeline_of(topology):
    """Return the same model with Fleet's sequence-parallel layers, as a ``PipelineLayer``, and its weights by name."""
    import paddle.nn.functional as F
    from paddle import nn
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
    from paddle.distributed.fleet.utils import sequence_parallel_utils as sp

    rank = fleet.get_hybrid_communicate_group().get_model_parallel_rank()
    weights = {}

    def initialize(name, parameter):
        whole, dim = weight(name), SHARDED_DIM.get(name.rpartition(".")[2])
        parameter.set_value(whole if dim is None else np.split(whole, TENSOR_PARALLEL, dim)[rank])
        weights[name] = parameter

    class First(nn.Layer):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(INPUTS, HIDDEN, bias_attr=False)
            initialize("first", self.linear.weight)

        def forward(self, x):
            return sp.ScatterOp.apply(self.linear(x))

    class Block(nn.Layer):
        def __init__(self, name):
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN, bias_attr=False)
            self.up = sp.ColumnSequenceParallelLinear(HIDDEN, INNER, has_bias=False, gather_output=False)
            self.down = sp.RowSequenceParallelLinear(INNER, HIDDEN, has_bias=False, input_is_parallel=True)
            sp.mark_as_sequence_parallel_parameter(self.norm.weight)
            for part in ("norm", "up", "down"):
                initialize(f"{name}.{part}", getattr(self, part).weight)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Last(nn.Layer):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, CLASSES, bias_attr=False)
            initialize("last", self.linear.weight)

        def forward(self, x):
            return self.linear(sp.GatherOp.apply(x))

    described = [LayerDesc(First), LayerDesc(Block, "block.0"), LayerDesc(Block, "block.1"), LayerDesc(Last)]
    layers = PipelineLayer(layers=described, topology=topology, loss_fn=F.cross_entropy, seg_method="uniform")
    sp.register_sequence_parallel_allreduce_hooks(layers, MICRO_BATCHES, fuse_sequence_parallel_allreduce=False)
    return layers, weights


def one_rank(directory, partial):
    """Train with Fleet; write the losses and the gradients of the first step."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # the repository, for `validation`
    from pipeproof.stages.paddle.runtime import quiet_native, start_paddle
    from validation.fleet.fleet_groups import connect_fleet, fleet_groups

    start_paddle()
    import paddle
    from paddle.distributed import fleet

    rank = int(os.environ["PADDLE_TRAINER_ID"])
    edges = [(a + x, b + x) for a, b in ((0, TENSOR_PARALLEL), (TENSOR_PARALLEL, 0)) for x in range(TENSOR_PARALLEL)]
    world = connect_fleet(rank, STAGES * TENSOR_PARALLEL, edges)
    with fleet_groups(world), quiet_native():
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": TENSOR_PARALLEL, "pp_degree": STAGES}
        strategy.pipeline_configs = {
            "micro_batch_size": ROWS, "accumulate_steps": MICRO_BATCHES, "enable_partial_send_recv": partial,
        }  # fmt: skip
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        layers, weights = pipeline_of(fleet.get_hybrid_communicate_group().topology())
        model = fleet.distributed_model(layers)
    update = paddle.optimizer.SGD(0.05, parameters=layers.parameters())
    step_weights, gradients = update.step, {}

    def step_and_record():
        if not gradients:
            gradients.update({name: one.grad.numpy() for name, one in weights.items()})
        step_weights()

    update.step = step_and_record
    optimizer, losses = fleet.distributed_optimizer(update), []
    for step in range(STEPS):
        batches = (micro_batch(step, index) for index in range(MICRO_BATCHES))
        data = (tuple(paddle.to_tensor(array) for array in arrays) for arrays in batches)
        losses.append(model.train_batch(data, optimizer).item())
    np.savez(Path(directory) / f"rank{rank}.npz", losses=np.array(losses), **gradients)
    os._exit(0)  # the threads of groups would block a normal exit


def with_fleet(partial):
    """Return losses and first-step gradients, by weight and tensor-parallel rank, of Fleet on four processes."""
    from pipeproof.exec.store.rendezvous import rank_environment, reserved_ports

    size = STAGES * TENSOR_PARALLEL
    with tempfile.TemporaryDirectory() as directory, reserved_ports(size + 1) as ports:
        command = [sys.executable, __file__, "rank", directory, "partial" if partial else "full"]
        ranks = [subprocess.Popen(command, env=rank_environment("paddle", rank, size, ports)) for rank in range(size)]
        try:
            statuses = [process.wait(timeout=120) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(statuses):
            sys.exit("a rank failed")
        outputs = [dict(np.load(Path(directory) / f"rank{rank}.npz")) for rank in range(size)]
    losses = outputs[-1]["losses"].tolist()
    shards = {name: [output[name] for output in outputs if name in output] for name in SHAPES}
    return losses, shards


def whole(name, shards):
    """Return a gradient from its shards or, if ranks should hold equal gradients, the gradients of all ranks."""
    dim = SHARDED_DIM.get(name.rpartition(".")[2])
    return shards if dim is None else [np.concatenate(shards, dim)]


def compared():
    """Return the results of the three trainings, as JSON data."""
    losses, gradients = in_one_process()
    results = {"one process": {"losses": losses}}
    for name, partial in (("Fleet, full", False), ("Fleet, partial", True)):
        fleet_losses, shards = with_fleet(partial)
        farthest = {
            key: max(
                float(abs(one - gradients[key]).max() / abs(gradients[key]).max()) for one in whole(key, shards[key])
            )
            for key in SHAPES
        }
        results[name] = {"losses": fleet_losses, "farthest": farthest}
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        one_rank(sys.argv[2], partial=sys.argv[3] == "partial")
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    result = compared()
    if sys.argv[1:] == ["--json"]:
        print(json.dumps(result))
    else:
        for name, one in result.items():
            farthest = max(one["farthest"].values()) if "farthest" in one else 0.0
            shown = "  ".join(f"{loss:.6f}" for loss in one["losses"])
            print(f"{name:15}  losses {shown}  gradients of the first step, farthest {farthest:.1g}")
