"""A script that trains by ``pipeproof.torch.Pipeline``; the second stage hangs in step 1: rank, directory of the store.

The rings are in ``$PIPEPROOF_WATCH``; the script does not know of them.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.signals import die_with_parent
from pipeproof.torch import Pipeline

die_with_parent(os.getppid())
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(8, 8), 0

    def forward(self, x):
        self.count += self.training and rank == 1
        if self.count > 1 + 4 + 2:  # the boundaries are found by one call, and a step has four
            threading.Event().wait()
        return self.layer(x)


pipeline = Pipeline(
    {rank: Stage()}, num_micro_batches=4, loss_fn=nn.functional.mse_loss, example=(torch.ones(2, 8),), timeout_s=300
)
for _ in range(3):
    pipeline.step(*([torch.ones(8, 8)] if rank == 0 else []), target=torch.ones(8, 8) if rank == 1 else None)
