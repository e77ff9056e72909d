"""Time of a pipeline's step by class of kernel: a script's modules as graphs next to PyTorch's own compiled blocks.

    torchrun --nproc-per-node 2 benchmarks/gpu/module_kernels.py "4096,4096,4,8" 1f1b 1f1b,zb_v

The arguments are as in ``module_pipelines.py``. For each rank it prints the milliseconds of a step in matrix products,
attention, other computation and messages, and the time in which no computation ran. *Slower* is the time that
computation lost next to messages: its time above the median of the same kernel on the same grid without a message, if
there was one. Kernels are classified by their names. On a CPU it counts operations, with those inside of others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measure import forget, leave
from module_pipelines import our_step
from our_step import start
from rival import rival_step
from sizes import Size
from torch.profiler import ProfilerActivity, profile

CLASSES = (
    ("messages", ("nccl", "ptop")),
    ("attention", ("attention", "flash", "fmha", "sdpa", "cudnn_generated")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")),
)
"""Classes of kernels, by parts of their names; all others are ``other``."""
WARM_UP = 3


@dataclass(frozen=True)
class Kernel:
    """One kernel on the GPU; microseconds."""

    name: str
    grid: str
    begin: float
    end: float

    @property
    def kind(self) -> str:
        """Its class."""
        name = self.name.lower()
        return next((kind for kind, parts in CLASSES if any(part in name for part in parts)), "other")


def main() -> None:
    """Profile all sizes and schedules that the command line names."""
    framework, report = start()
    device, rank, num_ranks = framework.device, dist.get_rank(), dist.get_world_size()
    for size in [Size.read(text) for text in sys.argv[1].split(";")]:
        report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
               f"{size.num_micro_batches} micro-batches")  # fmt: skip
        rivals, ours = (argument.split(",") for argument in sys.argv[2:4])
        place = (rank, num_ranks, device)
        sides = [
            ("rival, compiled", kind, partial(rival_step, kind, size, *place, is_compiled=True)) for kind in rivals
        ]
        sides += [("graph", kind, partial(our_step, kind, size, device, replay=False)) for kind in ours]
        for name, kind, make in sides:
            lines: list[str] = [""] * num_ranks
            dist.all_gather_object(lines, _shares(_kernels(make(), device)))
            for number, line in enumerate(lines):
                report(f"{name:16} {kind:12} rank {number}: {line}")
            forget(device)
    leave()


def _kernels(step: Callable[[], object], device: torch.device) -> list[Kernel]:
    """The kernels of one step, by start time; on a CPU, PyTorch's operations."""
    for _ in range(WARM_UP):
        step()
    on_gpu = device.type == "cuda"
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy") if on_gpu else ("cpu_op",)
    found = [
        Kernel(event["name"], str(event["args"].get("grid")), event["ts"], event["ts"] + event["dur"])
        for event in events if event.get("cat") in kinds
    ]  # fmt: skip
    return sorted(found, key=lambda kernel: kernel.begin)


def _shares(kernels: Sequence[Kernel]) -> str:
    """The line of one rank."""
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_kind[kernel.kind] += kernel.end - kernel.begin
    work = [kernel for kernel in kernels if kernel.kind != "messages"]
    messages = [kernel for kernel in kernels if kernel.kind == "messages"]
    step = max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)
    shares = {**{kind: by_kind[kind] for kind in ("products", "attention", "other", "messages")},
              "nothing computed": step - _covered(work), "slower": _lost(work, messages)}  # fmt: skip
    return f"step {step / 1e3:.1f}; " + ", ".join(f"{name} {us / 1e3:.1f}" for name, us in shares.items())


def _covered(kernels: Sequence[Kernel]) -> float:
    """Time in which at least one ran."""
    total, end = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.begin, end))
        end = max(end, kernel.end)
    return total


def _lost(work: Sequence[Kernel], messages: Sequence[Kernel]) -> float:
    """Time that kernels took next to messages above the median of the same kernel without."""
    begins, ends = [m.begin for m in messages], sorted(m.end for m in messages)
    alone, together = defaultdict(list), defaultdict(list)
    for kernel in work:
        is_alone = bisect(begins, kernel.end) == bisect(ends, kernel.begin)
        (alone if is_alone else together)[kernel.name, kernel.grid].append(kernel.end - kernel.begin)
    return sum(sum(times) - len(times) * median(alone[key]) for key, times in together.items() if alone[key])


if __name__ == "__main__":
    main()
