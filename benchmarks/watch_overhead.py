"""Cost of `pipeproof.torch.watch`: steps with and without it, side by side in one job of two ranks.

Short blocks of steps alternate between watched and not watched (off, on, on, off): both then see the same load of the
machine. A step has micro-batches of matrix products, a message for each in both directions, and two all-reduces. For
wall clock and for the processor time of the main thread, the benchmark prints the median over pairs of blocks of the
difference, in percent of the step, with a 95 % interval (order statistics of the pairs). It also prints the processor
time that one operation takes in a loop of operations alone. On GPUs it also captures a CUDA graph under the watch.

    python benchmarks/watch_overhead.py --seconds 120
    python benchmarks/watch_overhead.py --backend nccl --seconds 60       # two GPUs
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import floor, sqrt
from pathlib import Path
from statistics import median
from subprocess import Popen, TimeoutExpired

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipeproof.signals import die_with_parent, terminate_raises  # noqa: E402

NUM_MICRO_BATCHES = 8
OPS_PER_STEP = 2 * NUM_MICRO_BATCHES + 2
NUM_LOOP_OPS = 300


def run_rank(rank: int, directory: Path, arguments: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    from pipeproof.exec.monitor.torch_watch import watch

    torch.set_num_threads(1)
    device = torch.device("cpu" if arguments.backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group(arguments.backend, store=store, rank=rank, world_size=2)
    width = arguments.width
    weight, activation = (torch.randn(width, width, device=device) for _ in range(2))
    small = torch.ones(4, device=device)

    def step() -> None:
        for _ in range(NUM_MICRO_BATCHES):
            for _ in range(arguments.products):
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
        synchronize()

    def operations() -> None:
        for _ in range(NUM_LOOP_OPS):
            dist.all_reduce(small)
        synchronize()

    def timed(work: Callable[[], None], count: int, *, watched: bool) -> tuple[float, float]:
        """Return wall and processor time of the main thread for one call of ``work``, in seconds."""
        context = watch(directory=directory / "rings") if watched else None
        work()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(count):
            work()
        result = (time.perf_counter() - wall) / count, (time.thread_time() - cpu) / count
        if context is not None:
            context.close()
        return result

    for _ in range(3):
        step()
    loop = [[timed(operations, 1, watched=watched)[1] for watched in (False, True)] for _ in range(5)]
    per_op = median(on - off for off, on in loop) / NUM_LOOP_OPS
    report(rank, f"{per_op * 1e6:.1f} us of the main thread for one operation in a loop of operations")
    walls, cpus, offs = [], [], []
    is_over, end = torch.zeros(1, device=device), time.monotonic() + arguments.seconds
    while not is_over.item():
        first, second, third, fourth = (
            timed(step, arguments.steps, watched=watched) for watched in (False, True, True, False)
        )
        offs.append((first[0] + fourth[0]) / 2)
        walls.append((second[0] + third[0] - first[0] - fourth[0]) / 2)
        cpus.append((second[1] + third[1] - first[1] - fourth[1]) / 2)
        is_over.fill_(rank == 0 and time.monotonic() > end)
        dist.broadcast(is_over, 0)
    step_s = median(offs)
    num_steps = 2 * arguments.steps * len(offs)
    report(rank, f"{num_steps} steps each, {step_s * 1e3:.2f} ms, {OPS_PER_STEP} operations per step and rank")
    for name, differences in (("wall clock", walls), ("main thread", cpus)):
        low, middle, high = (value / step_s * 100 for value in median_interval(differences))
        report(rank, f"{name}: {middle:+.3f} % of a step, 95 % interval {low:+.3f} to {high:+.3f} %")
    share = per_op * OPS_PER_STEP / step_s * 100
    report(rank, f"operations of a step times the time of one in a loop: {share:.3f} % of a step")
    if device.type == "cuda":
        with watch(directory=directory / "rings"):
            dist.all_reduce(small)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.mm(activation, weight)
                time.sleep(1)  # the heartbeat queries the event of the all-reduce meanwhile
            graph.replay()
            synchronize()
        report(rank, "a CUDA graph was captured while the rank was watched")
    dist.barrier()
    dist.destroy_process_group()


def report(rank: int, text: str) -> None:
    """Print a line on rank 0."""
    if rank == 0:
        print(text, flush=True)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median with its distribution-free 95 % interval: the order statistics of the binomial's quantiles."""
    ordered = sorted(values)
    count = len(ordered)
    low = max(0, floor((count - 1.96 * sqrt(count)) / 2))
    return ordered[low], median(ordered), ordered[count - 1 - low]


def main() -> None:
    """Start both ranks; end them at an error, a signal, or when the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the alternating blocks")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--width", type=int, help="rows and columns of the matrices; default 768, on GPUs 4096")
    parser.add_argument("--products", type=int, default=2, help="matrix products of a micro-batch")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.width = arguments.width or (768 if arguments.backend == "gloo" else 4096)
    if arguments.rank is not None:
        die_with_parent(os.getppid())
        run_rank(arguments.rank, arguments.directory, arguments)
        return
    with terminate_raises(), tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *sys.argv, "--directory", directory]
        ranks = [Popen([*command, "--rank", str(rank)]) for rank in range(2)]
        try:
            end = time.monotonic() + arguments.seconds + 120
            status = max(abs(rank.wait(max(1.0, end - time.monotonic()))) for rank in ranks)
        except TimeoutExpired:
            status = 1
            print("the ranks did not end in time", flush=True)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    sys.exit(min(status, 1))


if __name__ == "__main__":
    main()
