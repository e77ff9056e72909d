"""Pipelines of a script's modules: ``pipeproof.torch.Pipeline`` next to PyTorch's own with compiled blocks, in one run.

    torchrun --nproc-per-node 2 benchmarks/gpu/module_pipelines.py "2048,4096,6,8" 1f1b,interleaved 1f1b,zb_v

The first argument has sizes (hidden, sequence, blocks of a rank, micro-batches) with ``;`` between, the second the
rival's schedules, the third ours. Forward and backward of all micro-batches, bfloat16, no optimizer, a GPU a rank. The
rival is ``torch.distributed.pipelining`` with ``torch.compile`` of each block; ours are the same modules with
``split="graph"``, operation by operation and replayed as one CUDA graph. Milliseconds, ratios to the best of the rival,
and GiB. The rival cannot split the backward of compiled blocks, so its ``zb_v`` does not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Measured, Times, forget, leave, timed
from our_step import start
from plain_gpt import summed_loss
from rival import plain_stage, rival_step, stage_numbers
from sizes import Size

from pipeproof.torch import Pipeline


def our_step(kind: str, size: Size, device: torch.device, *, replay: bool) -> Callable[[], object]:
    """A step of the modules as graphs."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_stages = num_ranks * size.chunks(kind)
    numbers = stage_numbers(kind, size.chunks(kind), rank, num_ranks)
    modules = {number: plain_stage(size, number, num_stages, num_ranks, device) for number in numbers}
    shape = (size.num_micro_batches, size.seq_length)
    tokens, labels = (torch.randint(0, size.vocab_size, shape, device=device) for _ in range(2))
    pipe = Pipeline(
        modules, schedule=kind, num_micro_batches=size.num_micro_batches, loss_fn=summed_loss, example=(tokens[:1],),
        split="graph", replay=replay, timeout_s=120,
    )  # fmt: skip

    def step() -> None:
        pipe.step(tokens, target=labels)

    step()
    sys.stderr.write(f"rank {rank}: {kind}, {pipe.splits}\n")
    return step


def main() -> None:
    """Time all sizes and schedules that the command line names."""
    framework, report = start()
    device, rank, num_ranks = framework.device, dist.get_rank(), dist.get_world_size()
    times = Times(warm_up=3, steps=4, series=2)
    for size in [Size.read(text) for text in sys.argv[1].split(";")]:
        report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
               f"{size.num_micro_batches} micro-batches")  # fmt: skip
        best: Measured | None = None
        for kind in sys.argv[2].split(","):
            theirs = timed(rival_step(kind, size, rank, num_ranks, device, is_compiled=True), device, times)
            forget(device)
            report(f"rival, compiled, {kind:12} {theirs.ms:8.2f}        {theirs.gib:6.2f} GiB")
            best = theirs if best is None or theirs.ms < best.ms else best
        assert best is not None
        for kind in sys.argv[3].split(","):
            replays = (False, True) if device.type == "cuda" else (False,)
            for replay in replays:
                ours = timed(our_step(kind, size, device, replay=replay), device, times)
                forget(device)
                way = f"graph{', replayed' * replay}"
                report(f"{way:24} {kind:12} {ours.ratio_to(best)} {ours.gib:6.2f} GiB")
    leave()


if __name__ == "__main__":
    main()
