"""Host-bound steps of a Llama: ours and PyTorch's own pipeline alternately, all of them in one process of each rank.

    torchrun --nproc-per-node 2 benchmarks/gpu/host.py RESULTS.jsonl --profile PROFILES
    torchrun --nproc-per-node 2 benchmarks/gpu/host.py RESULTS.jsonl --device cpu --size 128,8,8,16

The default size keeps an H200 idle most of the time when its kernels are launched one by one. With tiny tensors on a
CPU the step is host time alone. A round times a few steps of each way; all rounds are appended to RESULTS.jsonl as they
come: milliseconds of the wall, and of the processors, which other processes disturb less, by the slowest rank. The last
lines are medians: ``ratio`` is the median over rounds of the time divided by the time of PyTorch's eager step in the
same round, ``cpu_ratio`` the same ratio of processor times. The eager ways are timed first, then all of them; a way
that takes longer than its time limit to make or run ends the job, with the stacks of the rank. ``--profile`` writes
where each rank spends five steps of the eager ways, for ``python -m pstats``.
"""

from __future__ import annotations

import argparse
import cProfile
import faulthandler
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from llama_pipelines import COMPILED_RIVAL, Job, Way
from llama_stages import Layout
from measure import leave, meet
from sizes import Size

WAYS = (
    ("1f1b", Way()), ("1f1b", Way("whole")), ("1f1b", COMPILED_RIVAL), ("1f1b", Way("whole", is_compiled=True)),
    ("zb_v", Way("graph")), ("zb_v", Way("graph", replay=True)),
)  # fmt: skip
"""Schedules, and how they run; the first two are the eager ones."""
NUM_WARM_UPS, NUM_STEPS = 3, 3
PROFILED_STEPS = 5


def main() -> None:
    """Measure the sizes on the command line."""
    parser = argparse.ArgumentParser(description="Host-bound steps of a Llama, ours and PyTorch's.")
    parser.add_argument("results", type=Path, help="file to which rows are appended")
    parser.add_argument("--size", default="2048,1024,8,16", help="hidden, sequence, blocks of a rank, micro-batches")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=90, help="seconds in which a way is made, or timed in a round")
    parser.add_argument("--profile", type=Path, help="directory of profiles")
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else "cpu"
    device, size = torch.device(device), Size.read(options.size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        size = replace(size, dtype=torch.float32, vocab_size=256)
    bench = Bench(Job(size, Layout.of("pp", 1, device), device, "llama", None), options)
    for chosen in (WAYS[:2], WAYS) if device.type == "cuda" else (WAYS[:2],):
        for kind, way in chosen:
            bench.make(kind, way)
        bench.run()
        if options.profile and chosen == WAYS[:2]:
            bench.profile(options.profile)
    leave()


class Bench:
    """The steps that have been made, and their times."""

    def __init__(self, job: Job, options: argparse.Namespace) -> None:
        self._job, self._options, self._steps = job, options, dict[str, Callable[[], Any]]()
        self._kept: list[Any] = []

    def make(self, kind: str, way: Way) -> None:
        """Make a way to run the steps of a schedule, unless it exists, and run some."""
        name = f"{kind}, {way}"
        if name in self._steps:
            return
        faulthandler.dump_traceback_later(self._options.limit, exit=True)
        began = time.perf_counter()
        num_stages, stages = self._job.stages(kind, way)
        if way.split:
            pipe, step = self._job.ours(kind, stages, way)
            self._kept.append(pipe)
        else:
            step = self._job.theirs(kind, num_stages, stages)
        for _ in range(NUM_WARM_UPS):
            step()
        meet(self._job.device)
        faulthandler.cancel_dump_traceback_later()
        self._steps[name] = step
        self._put({"way": name, "made_s": round(time.perf_counter() - began, 1)})

    def run(self) -> None:
        """Time the rounds, in which the ways alternate, and put medians."""
        rounds, allocated = [], self._num_allocated()
        for number in range(self._options.rounds):
            names = [*self._steps] if number % 2 == 0 else [*reversed(self._steps)]
            rounds.append({name: self._timed(name) for name in names})
            self._put({"round": number, "ms": rounds[-1]})
        self._put({"blocks of memory that the driver allocated in all rounds": self._num_allocated() - allocated})
        first = next(iter(self._steps))
        for name in self._steps:
            wall, cpu = ([each[name][kind] / each[first][kind] for each in rounds] for kind in (0, 1))
            ms = [each[name][0] for each in rounds]
            self._put({
                "way": name, "ms": median(ms), "best_ms": min(ms), "ratio": round(median(wall), 3),
                "cpu_ms": median(each[name][1] for each in rounds), "cpu_ratio": round(median(cpu), 3),
            })  # fmt: skip

    def _num_allocated(self) -> int:
        device = self._job.device
        return torch.cuda.memory_stats(device)["num_device_alloc"] if device.type == "cuda" else 0

    def _timed(self, name: str) -> tuple[float, float]:
        """Milliseconds of a step by the wall, and of the processors, of the slowest rank."""
        faulthandler.dump_traceback_later(self._options.limit, exit=True)
        device, step = self._job.device, self._steps[name]
        meet(device)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(NUM_STEPS):
            step()
        cpu = time.process_time() - cpu
        meet(device)
        times = torch.tensor([time.perf_counter() - began, cpu], dtype=torch.float64, device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        faulthandler.cancel_dump_traceback_later()
        wall_ms, cpu_ms = (round(seconds / NUM_STEPS * 1e3, 2) for seconds in times.tolist())
        return wall_ms, cpu_ms

    def profile(self, directory: Path) -> None:
        """Write a profile of each way and rank."""
        directory.mkdir(parents=True, exist_ok=True)
        for number, (name, step) in enumerate(self._steps.items()):
            meet(self._job.device)
            with cProfile.Profile() as profile:
                for _ in range(PROFILED_STEPS):
                    step()
            file = directory / f"way{number}-rank{dist.get_rank()}.prof"
            profile.dump_stats(file)
            self._put({"way": name, "profile": str(file)})

    def _put(self, row: dict[str, Any]) -> None:
        """Append a row to the results, on the first rank."""
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            with self._options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
