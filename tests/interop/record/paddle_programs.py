"""Programs that are recorded: ``python paddle_programs.py NAME RANK RANKS DIRECTORY``; run by test_paddle."""

import sys
from pathlib import Path

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

from pipeproof.interop.traces import record_paddle

name, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[4])
peer = 1 - rank


def pipeline():
    """A step of Fleet's own pipeline; then two messages, received in another order than they were sent in."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    strategy.hybrid_configs["pp_configs"].use_batch_p2p_comm = False  # gloo has no batches
    dist.ParallelEnv._device_id = 0  # a build for CPUs has none, and PipelineLayer notes it down
    fleet.init(is_collective=True, strategy=strategy)
    layers = [LayerDesc(paddle.nn.Linear, 8, 8) for _ in range(4)]
    model = fleet.distributed_model(PipelineLayer(layers, num_stages=2, loss_fn=paddle.nn.MSELoss()))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    rows = paddle.randn([8, 8])
    send = paddle.base.core.ProcessGroup.send
    with record_paddle(directory / "step"):
        model.train_batch([rows, rows], fleet.distributed_optimizer(optimizer))
    assert paddle.base.core.ProcessGroup.send is send
    with record_paddle(directory / "swapped") as recorder:
        for micro_batch in (1, 0) if rank == 0 else (0, 1):
            with recorder.mark(stage=rank, micro_batch=micro_batch, kind="F"):
                (dist.send if rank == 0 else dist.recv)(paddle.ones([4]), peer)
        dist.all_reduce(rows)


def aborts():
    """Messages of two sizes, received in the other order: gloo ends the process by a signal."""
    dist.init_parallel_env()
    with record_paddle(directory):
        for size in (4, 8):
            values = paddle.ones([size if rank == 0 else 12 - size])
            (dist.send if rank == 0 else dist.recv)(values, peer)


{"pipeline": pipeline, "aborts": aborts}[name]()
