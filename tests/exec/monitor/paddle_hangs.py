"""Small Paddle jobs over gloo with one planted kind of hang; arguments: name, rank, directory of the rings.

A step sends from rank 0 to rank 1 and back, and ends with two all-reduces. The hang comes in step ``BAD_STEP``.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import paddle
import paddle.distributed as dist

from pipeproof.paddle import watch
from pipeproof.signals import die_with_parent

die_with_parent(os.getppid())
name, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
BAD_STEP = 3
dist.init_parallel_env()
watch(directory=directory)
hidden, gradient, loss = paddle.ones([4, 8]), paddle.ones([4, 8]), paddle.ones([1])


def next_batch():
    threading.Event().wait()  # as a data loader whose worker has died


for step in range(8):
    bad = step == BAD_STEP and rank == 1
    time.sleep(0.05)
    if bad and name == "data_loader_stuck":
        next_batch()
    if bad and name == "exception":
        raise KeyError("loss")
    if bad and name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if bad and name == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        dist.send(hidden, 1)
        dist.recv(gradient, 1)
    elif not (bad and name == "missing_receive"):
        dist.recv(hidden, 0)
        dist.send(gradient, 0)
    dist.all_reduce(loss)
    dist.all_reduce(gradient)
dist.barrier()
