"""Failures that end the processes of a pipeline: each rank trains, and something goes wrong. Argument: the failure.

With DEVICE=cuda in the environment each rank has the GPU of its number.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeproof.torch import Pipeline

ROWS, NUM, WIDTH = 2, 4, 8
STALLS = ("sleep", "stop", "deadlock", "no_pipeline", "no_step", "clip")
"""Failures that are noticed by the time limit alone."""


class Block(nn.Module):
    """A layer; ``fault`` is called in the second forward of a step."""

    def __init__(self, fault=None, in_step=0):
        super().__init__()
        self.inner, self.fault, self.calls = nn.Linear(WIDTH, WIDTH), fault, 0
        self.last = 3 + NUM * in_step  # the first call is the inference of shapes

    def forward(self, x):
        self.calls += 1
        if self.calls == self.last and self.fault is not None:
            self.fault()
        return self.inner(x)


def announce():
    sys.stdout.write("now\n")
    sys.stdout.flush()


def fail_now(end):
    announce()
    end()


def sleep():
    fail_now(lambda: time.sleep(1000))


def kill():
    fail_now(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stop():
    fail_now(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def bad_batch():
    announce()
    raise ValueError("bad batch")


def main(failure):
    torch.set_num_threads(1)
    device = torch.device(os.environ.get("DEVICE", "cpu"), int(os.environ["RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    faults = {"sleep": sleep, "kill": kill, "stop": stop, "raise": bad_batch, "kill_first": kill}
    failing = {"kill_first": 0}.get(failure, 1)
    in_step = int(failure == "kill_first")  # before the end of step 0 other ranks still read this one's store
    options = {}
    if failure == "deadlock":  # refused without unsafe
        options = {"schedule": [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]], "unsafe": True}
    if failure == "no_pipeline" and rank == failing:
        sleep()
    pipe = Pipeline(
        {rank: Block(faults.get(failure) if rank == failing else None, in_step).to(device)}, loss_fn=F.mse_loss,
        num_micro_batches=2 if failure == "deadlock" else NUM, example=(torch.zeros(ROWS, WIDTH, device=device),),
        timeout_s=10 if failure in STALLS else 120,  # a busy machine does not count as a stall
        **options,
    )  # fmt: skip
    x = torch.randn(pipe.num_micro_batches * ROWS, WIDTH, device=device)

    def step():
        pipe.step(*((x,) if rank == 0 else ()), target=x if rank == size - 1 else None)

    if failure == "deadlock":
        announce()
    step()
    if failure == "interrupt":
        announce()
        while True:
            step()
    if failure in ("no_step", "clip") and rank == failing:
        sleep()
    elif failure == "clip":
        pipe.clip_grad_norm_(1.0)
    elif failure != "no_close":
        step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
