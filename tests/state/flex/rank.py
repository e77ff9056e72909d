"""One rank of a test: ``python -m tests.state.flex.rank TASKS``, with Paddle's environment of the rank.

Prints, as its last line, a JSON list with the result of each task.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeproof.stages.paddle.runtime import start_paddle
from tests.state.flex.ranks import here, moe_plan, shard_of, values_of


def save(root, topology):
    """A state of known values, as a run of the plan saves it."""
    import paddle
    import paddle.distributed as dist

    from pipeproof.exec.rank.paddle.framework import write_flex_part
    from pipeproof.state.flex.flex_output import require_all_written
    from pipeproof.state.state_layout import shards_of_rank
    from pipeproof.state.write_state import finish_state, partial_directory
    from pipeproof.verify.certificate import graph_digest

    at, root = moe_plan(**topology), Path(root)
    values = values_of(at.plan)
    held = {
        (piece.weight, piece.slot): paddle.to_tensor(shard_of(values[piece.shard.tensor], piece.shard))
        for piece in shards_of_rank(at.plan, here())
    }
    directory = partial_directory(root, 2, "job")
    write_flex_part(directory, at.plan, here(), held)
    dist.barrier()
    if here() == 0:
        require_all_written(directory, at.plan)
        finish_state(root, 2, "job", at.plan, graph_digest(at), "3.3.1")
    dist.barrier()


def load(directory, topology):
    """The tensors that Paddle's own loading reads wrongly on this rank of a plan."""
    import paddle
    from paddle.distributed import load_state_dict

    from pipeproof.exec.rank.paddle.framework import sharded
    from pipeproof.state.state_layout import shards_of_rank

    at = moe_plan(**topology)
    values, pieces = values_of(at.plan), list(shards_of_rank(at.plan, here()))
    targets = {}
    for piece in pieces:
        empty = paddle.full(piece.shape, -1.0, dtype=piece.tensor.dtype)
        one = sharded(piece, empty)
        targets[one.key] = one
    with with_gpu_calls_on_cpu(paddle):
        load_state_dict(targets, directory, safetensors=True)
    return [
        piece.shard.tensor
        for piece, one in zip(pieces, targets.values(), strict=True)
        if one.local_tensor.numpy().ravel().tobytes() != shard_of(values[piece.shard.tensor], piece.shard).tobytes()
    ]


def load_without_gpu(root):
    """Return Paddle's error on CPUs where a rank needs a tensor that another rank reads."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed import ShardedWeight, load_state_dict, save_state_dict

    row = ShardedWeight("w", paddle.ones([1, 4]), (1, 4), (2, 4), (here(), 0))
    save_state_dict({"w": row}, root, unique_id=0, safetensors=True)
    dist.barrier()
    whole = ShardedWeight("w", paddle.zeros([2, 4]), (2, 4), (2, 4), (0, 0))
    try:
        load_state_dict({"w": whole}, root, safetensors=True)
    except ValueError as error:
        return str(error)
    return "loaded"


def flattened(root, shape, cut):
    """Number of wrong elements when two shares of a flattened tensor are loaded as a whole one."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed import ShardedWeight, load_state_dict, save_state_dict

    values, zeros = np.arange(np.prod(shape), dtype=np.float32) + 1, (0,) * len(shape)
    start, stop = [(0, cut), (cut, values.size)][here()]
    share = ShardedWeight("m", paddle.to_tensor(values[start:stop]), shape, shape, zeros, True, slice(start, stop))
    save_state_dict({"m": share}, root, unique_id=0, safetensors=True)
    dist.barrier()
    whole = ShardedWeight("m", paddle.zeros(shape), shape, shape, zeros)
    with with_gpu_calls_on_cpu(paddle):
        load_state_dict({"m": whole}, root, safetensors=True)
    return int((whole.local_tensor.numpy().ravel() != values).sum())


def leave_early(root):
    """Return True if rank 0 returns from saving before the file of rank 1 exists."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed import ShardedWeight, save_state_dict

    write, is_back = paddle.save, Path(root) / "is_back"

    def when_rank_0_is_back(*given, **more):
        patience = time.monotonic() + 60
        while here() and not is_back.exists() and time.monotonic() < patience:
            time.sleep(0.01)
        write(*given, **more)

    paddle.save = when_rank_0_is_back
    row = ShardedWeight("w", paddle.ones([1, 4]), (1, 4), (2, 4), (here(), 0))
    save_state_dict({"w": row}, root, unique_id=0, safetensors=True)
    early = not (Path(root) / "1_0.safetensors").exists()
    if here() == 0:
        is_back.touch()
    paddle.save = write
    dist.barrier()
    return early


def fleet(root, kind):
    """Three steps of Fleet's own optimizer over two sharding ranks, saved by its ``sharded_state_dict``.

    ``kind`` is the optimizer: "v1" shards by whole weights, "v2" by elements, "adamw" does not shard. Gradients are
    given as the ranks' sum: gloo has no reduce-scatter. Return the MD5 of each weight and moment after our own steps.
    """
    import paddle
    import paddle.distributed as dist
    from paddle.distributed import save_state_dict
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer as sharding
    from paddle.distributed.fleet.utils import tensor_fusion_helper

    from pipeproof.specs.plan_sections import RunSpec
    from pipeproof.stages.paddle.optimizer import StageOptimizer

    strategy = dist.fleet.DistributedStrategy()
    degrees = {f"{axis}_degree": 1 for axis in ("dp", "mp", "pp")}
    strategy.hybrid_configs = {**degrees, "sharding_degree": 2}
    dist.fleet.init(is_collective=True, strategy=strategy)
    rng = np.random.default_rng(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(80, 7), paddle.nn.Linear(7, 3))
    named = dict(model.named_parameters())
    for weight in named.values():
        weight.set_value(rng.standard_normal(weight.shape).astype("float32"))
    ours = {name: paddle.to_tensor(weight.numpy(), stop_gradient=False) for name, weight in named.items()}
    run = RunSpec(optimizer="adamw", learning_rate=0.01)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.01)
    classes = {"v1": sharding.DygraphShardingOptimizer, "v2": sharding.DygraphShardingOptimizerV2}
    tensor_fusion_helper.__current_device_type__ = "gpu"  # only for the alignment of its buffers
    if kind in classes:
        optimizer = classes[kind](optimizer, dist.fleet.get_hybrid_communicate_group())
    own = StageOptimizer(run, ours)
    for _ in range(3):
        for name, weight in named.items():
            gradient = paddle.to_tensor(rng.standard_normal(weight.shape).astype("float32"))
            ours[name].grad = gradient
            if kind == "v2":  # a view of its buffer
                weight.grad.set_value(gradient)
            else:
                weight.grad = gradient.clone()
        optimizer.step()
        own.step()
    shards = model.sharded_state_dict()
    save_state_dict({**shards, **optimizer.sharded_state_dict(shards)}, root, unique_id=0, safetensors=True)
    dist.barrier()
    states = {f"optimizer/{slot}/{name}": tensor for (name, slot), tensor in own.state().items()}
    return {name: tensor._md5sum() for name, tensor in (ours | states).items()}


@contextmanager
def with_gpu_calls_on_cpu(paddle):
    """Paddle moves every tensor to a GPU before it sends it; here it stays where it is."""
    to_gpu = paddle.Tensor.cuda
    paddle.Tensor.cuda = lambda tensor, *given, **more: tensor.clone()
    yield
    paddle.Tensor.cuda = to_gpu


def main(tasks):
    start_paddle()
    import paddle.distributed as dist
    from paddle.distributed.fleet.utils.log_util import logger

    logger.setLevel("ERROR")
    dist.init_parallel_env()
    results = [globals()[name](*given) for name, *given in tasks]
    dist.barrier()
    sys.stdout.write("\n" + json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
