"""Time of a step without a pipeline, kernel by kernel: pipeproof's stages next to plain modules.

    torchrun --nproc-per-node 1 benchmarks/gpu/kernels.py "4096,4096,4,4" [64,8,1024]

The size (hidden, sequence, blocks, micro-batches), and for blocks with experts
how many, how many for a token and their inner size. Forward and backward of all
micro-batches on one GPU, bfloat16. Times are kernel times, in milliseconds of a step; in the rest of the step no kernel
ran.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from measure import Times, captured_anew, forget, timed
from our_step import OurStep, start
from rival import plain_step
from sizes import Size
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NUM_SHOWN = 16
NAME_WIDTH = 90


def main() -> None:
    """Profile both sides."""
    framework, report = start()
    device, size = framework.device, Size.read(sys.argv[1])
    if len(sys.argv) > 2:
        num_experts, top_k, ffn = map(int, sys.argv[2].split(","))
        size = replace(size, moe={"num_experts": num_experts, "top_k": top_k, "ffn_size": ffn})
    report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks, {size.num_micro_batches} "
        f"micro-batches, experts {size.moe}")  # fmt: skip
    for name, make in (
        ("plain", lambda: plain_step(size, device, is_shared_out=False)),
        ("ours", lambda: OurStep(size.plan("1f1b", 1), framework)),
    ):
        step = make()
        eager = timed(step, device, Times())
        kernels = _kernels(step, device)
        replayed = timed(captured_anew(step, device), device, Times()) if name == "ours" else None
        total = sum(ms for ms, _ in kernels.values())
        graph = "" if replayed is None else f", as a graph {replayed.ms:.2f}"
        count = sum(number for _, number in kernels.values())
        report(f"{name}: step {eager.ms:.2f}{graph}, {count} kernels {total:.2f}, {eager.gib:.2f} GiB")
        for kernel, (ms, number) in sorted(kernels.items(), key=lambda item: -item[1][0])[:NUM_SHOWN]:
            report(f"  {ms:8.3f} {ms / total:6.1%} {number:6} {kernel[:NAME_WIDTH]}")
        del step
        forget(device)
    os._exit(0)  # communicators of captured graphs would hold a normal exit up


def _kernels(step: Callable[[], object], device: torch.device) -> dict[str, tuple[float, int]]:
    """By name, milliseconds in a step and how many; on a CPU, of PyTorch's operations."""
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == kind:
            found[event.name].append(event.time_range.elapsed_us() / 1e3)
    return {name: (sum(times), len(times)) for name, times in found.items()}


if __name__ == "__main__":
    main()
