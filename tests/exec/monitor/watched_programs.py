"""Programs of watched ranks; run by the tests of this directory: name, rank, number of ranks, directory."""

import sys
from pathlib import Path

name, rank, num_ranks, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


def torch_ops():
    import torch
    import torch.distributed as dist

    from pipeproof.torch import watch

    store = dist.FileStore(str(directory.with_name("store")), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    with watch(directory=directory) as watched:
        tensor = torch.ones(2, 3)
        dist.all_reduce(tensor)
        with watched.mark(stage=rank, micro_batch=5, kind="F"):
            dist.send(tensor, 1, tag=4) if rank == 0 else dist.recv(tensor, 0, tag=4)
        dist.all_gather([torch.empty(2, 3) for _ in range(num_ranks)], tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.barrier()
    dist.all_reduce(tensor)  # after the block: not recorded
    dist.destroy_process_group()


def paddle_ops():
    import paddle
    import paddle.distributed as dist

    from pipeproof.paddle import watch

    dist.init_parallel_env()
    with watch(directory=directory):
        tensor = paddle.ones([2, 3])
        dist.all_reduce(tensor)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.barrier()


{"torch_ops": torch_ops, "paddle_ops": paddle_ops}[name]()
