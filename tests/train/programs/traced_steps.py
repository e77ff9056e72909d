"""Steps of a pipeline on two ranks under PyTorch's profiler, a trace of each rank; the argument is a directory.

The stages sleep in place of computing: other programs on the processors then change their times little.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeproof.torch import Pipeline

folder = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient.clone(), None


class Slow(nn.Linear):
    """A linear layer that takes a given time, and twice as long backward."""

    def __init__(self, seconds):
        super().__init__(16, 16)
        self.seconds = seconds

    def forward(self, x):
        return _Sleep.apply(super().forward(x), self.seconds)


torch.manual_seed(0)
inputs, target = torch.randn(8, 16), torch.randn(8, 16)
stage = Slow(0.03 if rank == 0 else 0.02)
with Pipeline({rank: stage}, num_micro_batches=4, loss_fn=F.mse_loss, example=(inputs[:2],)) as pipe:
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    pipe.step(inputs, target=target)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(8):
            optimizer.zero_grad()
            pipe.step(inputs, target=target)
            optimizer.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    if rank == 0:
        pipe.plan.save(folder / "plan.yaml")
dist.destroy_process_group()
