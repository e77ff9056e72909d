"""Steps of real pipelines on GPUs: pipeproof's executor, op by op and as one CUDA graph, next to PyTorch's own.

    torchrun --nproc-per-node 2 benchmarks/gpu/pipeline.py "4096,4096,4,8" 1f1b,zb_v

The first argument has sizes (hidden, sequence, blocks of a rank, micro-batches),
several with ``;`` between; the second schedules. Forward and backward of all
micro-batches, bfloat16, no optimizer. A GPU a rank.

``work`` is the same step of the slowest rank without communication, op by op
and replayed; ``floor`` what the simulator makes of the schedule with each
operation's time in that replay and messages that take none.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from measure import Times, captured_anew, forget, leave, timed
from our_step import OurStep, start
from rival import CLASSES, rival_step
from sizes import Size

ALONE = Times(warm_up=1, steps=3, series=1)


def main() -> None:
    """Time all sizes and schedules that the command line names."""
    framework, report = start()
    device, rank, num_ranks = framework.device, dist.get_rank(), dist.get_world_size()
    kinds = sys.argv[2].split(",") if len(sys.argv) > 2 else list(CLASSES)
    for size in [Size.read(text) for text in sys.argv[1].split(";")]:
        report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
            f"{size.num_micro_batches} micro-batches")  # fmt: skip
        report(f"{'':15} {'rival':>8} {'ours':>8} {'ratio':>6} {'graph':>8} {'ratio':>6} {'work':>8} {'graph':>8} "
            f"{'floor':>8}   GiB: rival, ours")  # fmt: skip
        for kind in kinds:
            theirs = timed(rival_step(kind, size, rank, num_ranks, device), device, Times())
            forget(device)
            data = size.plan(kind, num_ranks)
            step = OurStep(data, framework)
            ours = timed(step, device, Times())
            replayed = captured_anew(step, device)
            graph = timed(replayed, device, Times())
            del step, replayed
            forget(device)
            alone = OurStep(data, framework, alone=True)
            work = timed(alone, device, ALONE)
            replayed = captured_anew(alone, device)
            work_graph = timed(replayed, device, ALONE)
            del replayed
            floor = alone.floor_ms() if device.type == "cuda" else 0.0
            report(f"{kind:15} {theirs.ms:8.2f} {ours.ratio_to(theirs)} {graph.ratio_to(theirs)} {work.ms:8.2f} "
                f"{work_graph.ms:8.2f} {floor:8.2f}   {theirs.gib:.2f} {ours.gib:.2f}")  # fmt: skip
            del alone
            forget(device)
    leave()


if __name__ == "__main__":
    main()
