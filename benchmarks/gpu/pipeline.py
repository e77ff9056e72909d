"""Steps of real pipelines on GPUs: pipeproof's executor, op by op and as one CUDA graph, beside PyTorch's own.

    torchrun --nproc-per-node 2 benchmarks/gpu/pipeline.py 4096,4096,4,8 1f1b,zb_v

The first argument has sizes (hidden, sequence, blocks of a rank, micro-batches),
several with ``;`` between; the second schedules. Forward and backward of all
micro-batches, bfloat16, no optimizer; wall time between barriers, the best of
two series. A GPU a rank. Memory is PyTorch's own largest allocation of any rank.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rival import CLASSES, rival_step
from sizes import Size

from pipeproof.comm.lower import lower
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.adapter import RankAdapter
from pipeproof.exec.machine import Instruction
from pipeproof.exec.torch.comm import connect_groups
from pipeproof.exec.torch.framework import TorchFramework
from pipeproof.exec.torch.replay import captured
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import NONE
from pipeproof.specs.load import plan_from_dict
from pipeproof.stages.torch import stage as torch_stage

NUM_STEPS = 6
SERIES = 2
WARM_UP = 3


def main() -> None:
    """Time all sizes and schedules that the command line names."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sizes = [Size.read(text) for text in sys.argv[1].split(";")]
    kinds = sys.argv[2].split(",") if len(sys.argv) > 2 else list(CLASSES)
    framework = TorchFramework("gpu", int(os.environ["LOCAL_RANK"]))
    device = framework.device
    dist.init_process_group("nccl", device_id=device)
    torch_stage.initial_weight = _quick_weight  # as many normal draws as a large model has weights take a minute

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {num_ranks} ranks; milliseconds a step")
    for size in sizes:
        say(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
            f"{size.num_micro_batches} micro-batches")  # fmt: skip
        say(f"{'':15} {'rival':>8} {'ours':>8} {'ratio':>6} {'graph':>8} {'ratio':>6}   GiB: rival, ours, graph")
        for kind in kinds:
            theirs, their_gib = _timed(rival_step(kind, size, rank, num_ranks, device), device)
            _forget()
            step = _our_step(kind, size, rank, num_ranks, framework)
            ours, our_gib = _timed(step, device)
            replay, graph_gib = _timed(captured(step, device), device)
            say(f"{kind:15} {theirs:8.2f} {ours:8.2f} {ours / theirs:6.3f} {replay:8.2f} {replay / theirs:6.3f}   "
                f"{their_gib:.2f} {our_gib:.2f} {graph_gib:.2f}")  # fmt: skip
            del step, replay
            _forget()
    dist.barrier()
    os._exit(0)  # communicators of captured graphs would hold a normal exit up


def _our_step(kind: str, size: Size, rank: int, num_ranks: int, framework: TorchFramework) -> Callable[[], None]:
    plan = lower(plan_from_dict(size.plan(kind, num_ranks)).spec)
    world = connect_groups(rank, framework.device, plan.graph.channels, plan.graph.groups, lambda _: None)
    adapter = RankAdapter(plan, rank, framework, world, lambda *_: None)
    program = _program(plan, rank)
    adapter.begin(0)

    def step() -> None:
        for instruction in program:
            adapter.carry_out(instruction)
        adapter.log.clear()

    return step


def _program(plan: LoweredPlan, rank: int) -> list[Instruction]:
    """What a rank does in a step, but for the optimizer."""
    graph = plan.graph
    ids = [i for i in graph.rank_ops(rank) if graph.parent[i] == NONE and graph.ops[i].kind is not OpKind.STEP]
    return [Instruction(i, graph.row(i)) for i in ids]


def _timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step, and the most GiB of any rank."""
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP):
        step()
    best = float("inf")
    for _ in range(SERIES):
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            step()
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    most = torch.tensor([torch.cuda.max_memory_allocated(device) / 2**30], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return best / NUM_STEPS * 1e3, float(most)


def _quick_weight(parameter: Any, seed: int, dtype: str) -> np.ndarray:
    if parameter.init_std is None:
        return np.ones(parameter.shape, dtype=dtype)
    draws = np.random.default_rng(seed).random(parameter.shape, dtype=np.float32)
    return ((draws - 0.5) * 2 * parameter.init_std).astype(dtype)


def _forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
