"""Small training jobs with one planted kind of hang; arguments: framework, name, rank, ranks, directory, steps.

They run over gloo with PyTorch or Paddle, or with PLANTED_BACKEND=nccl with PyTorch on GPUs, which ranks share if there
are too few. A step sends each micro-batch from rank 0 to rank 1, and so on to the last rank, and ends with all-reduces
of all ranks. The hang comes in step ``BAD_STEP``; the steps before it are sound. In the healthy job ``slow_start``, the
first two ranks exchange messages for some seconds before the first step, while the others wait for rank 1.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pipeproof.exec.rank.gpu_assignment import shared_gpu
from pipeproof.signals import die_with_parent

die_with_parent(os.getppid())
framework, name, rank, num_ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
directory, num_steps = Path(sys.argv[5]), int(sys.argv[6])
BAD_STEP, NUM_MICRO_BATCHES = 4, 3
jitter = random.Random(rank)
last = num_ranks - 1
backend = os.environ.get("PLANTED_BACKEND", "gloo")
activations = 64

links: list[Any]
"""The group of the messages of each rank and the next one; None for the group of all ranks."""
if framework == "torch":
    import torch
    import torch.distributed as dist

    from pipeproof.torch import watch

    store = dist.FileStore(str(directory.with_name("store")), num_ranks)
    device = torch.device("cpu")
    if backend == "nccl":
        num_gpus = torch.cuda.device_count()
        activations = 16384 if num_gpus >= num_ranks else 4096  # ranks that share a GPU have slow sockets
        device = torch.device("cuda", shared_gpu(rank, num_gpus, num_ranks))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    pair, links = dist.new_group([last - 1, last]), [None] * last
    ones, synchronize = torch.ones, torch.cuda.synchronize
    options = {"device": device}
else:
    import paddle
    import paddle.distributed as dist

    from pipeproof.paddle import watch

    # Over gloo, Paddle matches messages of a group by a count of each rank. It hangs if a rank of the group has sent
    # others meanwhile.
    dist.init_parallel_env()
    links = [dist.new_group([other, other + 1]) for other in range(last)]
    pair, ones, options = links[-1], paddle.ones, {}
watch(directory=directory)

# NCCL lets a sender pass once its message fits into the buffers: 4 MiB on each of up to 64 channels, far fewer over
# sockets. Only a larger message waits for its receive.
gradients = 256 if backend == "gloo" else 1 << 24
activation, gradient, loss = (ones(size, **options) for size in ((activations, activations), (gradients,), (1,)))


def pipeline(num_micro_batches: int, skipped: int = -1) -> None:
    for micro_batch in range(num_micro_batches):
        if rank > 0 and micro_batch != skipped:
            dist.recv(activation, rank - 1, group=links[rank - 1])
        if rank < num_ranks - 1:
            dist.send(activation, rank + 1, group=links[rank])


def next_batch(*, stuck: bool) -> None:
    if stuck:
        threading.Event().wait()  # as a data loader whose worker has died


def metrics(keys: list[str]) -> None:
    for _ in keys:
        dist.all_reduce(loss)


if name == "slow_start" and rank < 2:
    for _ in range(16):
        if rank == 0:
            time.sleep(0.5)
            dist.send(loss, 1, group=links[0])
        else:
            dist.recv(loss, 0, group=links[0])
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
        dist.send(activation, 2 * last - 1 - rank, group=links[-1])
        dist.recv(activation, 2 * last - 1 - rank, group=links[-1])
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
    if backend == "nccl":
        synchronize()
dist.barrier()
