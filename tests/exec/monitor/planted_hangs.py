"""Small training jobs with one planted kind of hang; arguments: name, rank, number of ranks, directory, steps.

They run over gloo, or with PLANTED_BACKEND=nccl on one GPU for each rank.
A step sends each micro-batch from rank 0 to rank 1, and so on to the last rank, and ends with all-reduces of all ranks.
The hang comes in step ``BAD_STEP``; the steps before it are sound.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.signals import die_with_parent

die_with_parent(os.getppid())
name, rank, num_ranks, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
BAD_STEP, NUM_MICRO_BATCHES = 4, 3
num_steps = int(sys.argv[5]) if len(sys.argv) > 5 else 8
jitter = random.Random(rank)

store = dist.FileStore(str(directory.with_name("store")), num_ranks)
backend = os.environ.get("PLANTED_BACKEND", "gloo")
device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
last = num_ranks - 1
pair = dist.new_group([last - 1, last])
watch(directory=directory)

# NCCL copies a small message to a buffer and lets its sender pass, so that a hang would come steps later
is_small = device.type == "cpu"
sizes = ((64, 64), (256,), (1,)) if is_small else ((4096, 4096), (1 << 24,), (1,))
activation, gradient, loss = (torch.ones(size, device=device) for size in sizes)


def pipeline(num_micro_batches: int, skipped: int = -1) -> None:
    for micro_batch in range(num_micro_batches):
        if rank > 0 and micro_batch != skipped:
            dist.recv(activation, rank - 1)
        if rank < num_ranks - 1:
            dist.send(activation, rank + 1)


def next_batch(*, stuck: bool) -> None:
    if stuck:
        threading.Event().wait()  # as a data loader whose worker has died


def metrics(keys: list[str]) -> None:
    for _ in keys:
        dist.all_reduce(loss)


for step in range(num_steps):
    bad = step == BAD_STEP and rank == 1  # the planted rank
    if name == "healthy":  # one rank is often slower than the others, and now and then much slower
        time.sleep(jitter.choice([0.01, 0.05, 0.1, 0.3, 1.5 if rank == 2 else 0.3]))
    else:
        time.sleep(0.05)
    next_batch(stuck=bad and name == "data_loader_stuck")
    if bad and name == "exception":
        raise KeyError("loss")
    if bad and name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if bad and name == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == BAD_STEP and name == "crossed_sends" and rank in (last - 1, last):
        dist.send(activation, 2 * last - 1 - rank)
        dist.recv(activation, 2 * last - 1 - rank)
    counts = NUM_MICRO_BATCHES + (rank == last and step == BAD_STEP and name == "micro_batch_counts")
    pipeline(counts, skipped=1 if bad and name == "missing_receive" else -1)
    if bad and name == "extra_collective":
        dist.all_reduce(loss)
    if step == BAD_STEP and name == "rank_local_keys":
        metrics(["loss", "accuracy", *(["new"] if rank == 1 else [])])
    else:
        metrics(["loss", "accuracy"])
    if name == "wrong_group" and rank >= last - 1:
        dist.all_reduce(loss, group=pair)
    if bad and name == "shape_mismatch":
        dist.all_reduce(gradient[:100])
    elif bad and name == "wrong_group":
        dist.all_reduce(gradient, group=pair)
    else:
        dist.all_reduce(gradient)
    if device.type == "cuda":
        torch.cuda.synchronize()
dist.barrier()
