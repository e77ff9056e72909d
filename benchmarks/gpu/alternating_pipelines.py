"""Pipelines of a script's modules, operation by operation, alternately with PyTorch's own: where the host is the limit.

    torchrun --nproc-per-node 2 benchmarks/gpu/alternating_pipelines.py "1536,2048,6,10;1024,1024,4,16" 1f1b,interleaved

The arguments are the first two of ``module_pipelines.py``; both sides have the same schedule, the rival with
``torch.compile`` of each block. The speed of a shared host changes by half within a minute. Therefore one side is timed
directly after the other, and the ratio is the median of such pairs. It also prints both medians in milliseconds and the
smallest and the largest ratio of a pair.
"""

from __future__ import annotations

import sys
from statistics import median

import torch.distributed as dist
from measure import Times, forget, leave, timed
from module_pipelines import our_step
from our_step import start
from rival import rival_step
from sizes import Size

NUM_PAIRS = 12


def main() -> None:
    """Time all sizes and schedules that the command line names."""
    framework, report = start()
    device, rank, num_ranks = framework.device, dist.get_rank(), dist.get_world_size()
    once = Times(warm_up=1, steps=3, series=1)
    for size in [Size.read(text) for text in sys.argv[1].split(";")]:
        report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
               f"{size.num_micro_batches} micro-batches, {NUM_PAIRS} pairs")  # fmt: skip
        for kind in sys.argv[2].split(","):
            rival = rival_step(kind, size, rank, num_ranks, device, is_compiled=True)
            ours = our_step(kind, size, device, replay=False)
            pairs = [(timed(ours, device, once).ms, timed(rival, device, once).ms) for _ in range(NUM_PAIRS + 1)][1:]
            ratios = [our / their for our, their in pairs]
            our, their = (median(side) for side in zip(*pairs, strict=True))
            report(f"{kind:12} ours {our:8.2f} rival {their:8.2f} ratio {median(ratios):6.3f} "
                   f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
            del rival, ours
            forget(device)
    leave()


if __name__ == "__main__":
    main()
