"""A script that trains by 1F1B on two ranks until rank 1 stops; its arguments are the rank and a directory.

It knows nothing of the plan: its messages have no marks, and its metrics are in another group.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.signals import die_with_parent

die_with_parent(os.getppid())
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
NUM_MICRO_BATCHES, BAD_STEP, BAD_MICRO_BATCH = 4, 2, 3
store = dist.FileStore(str(directory.with_name("store")), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
pipeline = dist.new_group([0, 1])
watch(pipeline, directory)
hidden, gradient, loss = torch.ones(4, 64), torch.ones(4, 64), torch.ones(1)


def compute(step: int, micro_batch: int) -> None:
    if (step, micro_batch) == (BAD_STEP, BAD_MICRO_BATCH):
        threading.Event().wait()


for step in range(4):
    if rank == 0:
        sends = []
        for micro_batch in range(NUM_MICRO_BATCHES + 1):
            if micro_batch < NUM_MICRO_BATCHES:
                sends.append(dist.isend(hidden, 1, group=pipeline))
            if micro_batch > 0:
                dist.recv(gradient, 1, group=pipeline)
    else:
        for micro_batch in range(NUM_MICRO_BATCHES):
            dist.recv(hidden, 0, group=pipeline)
            compute(step, micro_batch)
            dist.send(gradient, 0, group=pipeline)
    dist.all_reduce(loss)
dist.destroy_process_group()
