"""A data-parallel job whose steps jitter: rank, number of ranks, directory, and how much slower rank 1 is."""

import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.signals import die_with_parent

die_with_parent(os.getppid())
rank, num_ranks, directory, factor = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
store = dist.FileStore(str(directory.with_name("store")), num_ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
jitter, loss, gradient = random.Random(rank), torch.ones(1), torch.ones(256)
dist.barrier()
with watch(directory=directory):
    for _ in range(64):
        time.sleep(0.03 * jitter.uniform(0.9, 1.1) * (factor if rank == 1 else 1.0))
        dist.all_reduce(loss)
        dist.all_reduce(gradient)
dist.destroy_process_group()
