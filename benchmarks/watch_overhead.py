"""Cost of `pipeproof.torch.watch`: steps with and without it, side by side in one job of two ranks over gloo.

Blocks of steps alternate between watched and not watched, so that both see the same load of the machine. A step has
micro-batches of matrix products, a message for each in both directions, and two all-reduces. Prints the quarter (25th
percentile, which other jobs of the machine disturb less) and the median of the steps, and the processor time that the
main thread spends per operation for the watch.

    python benchmarks/watch_overhead.py --blocks 20 --steps 10 --width 768
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles

NUM_MICRO_BATCHES = 8
OPS_PER_STEP = 2 * NUM_MICRO_BATCHES + 2


def run_rank(rank: int, directory: Path, arguments: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    from pipeproof.exec.monitor.torch_watch import watch

    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    weight = torch.randn(arguments.width, arguments.width)
    activation = torch.randn(arguments.width, arguments.width)

    def step() -> None:
        for _ in range(NUM_MICRO_BATCHES):
            for _ in range(2):
                torch.mm(activation, weight)
            if rank == 0:
                dist.send(activation, 1)
                dist.recv(activation, 1)
            else:
                dist.recv(activation, 0)
                dist.send(activation, 0)
        for _ in range(2):
            dist.all_reduce(weight)
        weight.div_(4)

    for _ in range(3):
        step()
    walls: dict[bool, list[float]] = {False: [], True: []}
    cpus: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * arguments.blocks):
        is_watched = block % 4 in (1, 2)  # off, on, on, off: a drift of the machine's speed is in both
        context = watch(directory=directory / "rings") if is_watched else None
        for _ in range(arguments.steps):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.thread_time()
            step()
            walls[is_watched].append(time.perf_counter() - wall)
            cpus[is_watched].append(time.thread_time() - cpu)
        if context is not None:
            context.close()
    if rank == 0:
        print(f"{len(walls[True])} steps each, {OPS_PER_STEP} operations per step and rank")
        for name, at in (("quarter", 0), ("median", 1)):
            off, on = (quantiles(walls[is_watched])[at] for is_watched in (False, True))
            print(
                f"{name}: without watch {off * 1e3:.2f} ms, with watch {on * 1e3:.2f} ms: {(on / off - 1) * 100:+.2f} %"
            )
            cpu_off, cpu_on = (quantiles(cpus[is_watched])[at] for is_watched in (False, True))
            per_op = (cpu_on - cpu_off) / OPS_PER_STEP
            share = (cpu_on - cpu_off) / off
            print(f"  main thread: {per_op * 1e6:+.0f} us per operation, {share * 100:+.2f} % of a step")


def main() -> None:
    """Start both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.directory, arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *sys.argv, "--directory", directory]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=os.environ) for rank in range(2)]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
