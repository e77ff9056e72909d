"""Microseconds of the host and of the GPU for each message and each word of progress, next to the usual ways.

torchrun --nproc-per-node 2 benchmarks/gpu/host_costs.py

With one GPU both ranks use it, and NCCL connects them by sockets: the host's part of a message is the same. Printed are
medians of rounds, as JSON lines by rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

RANK = int(os.environ["RANK"])
os.environ.setdefault("NCCL_HOSTID", f"rank {RANK}")  # two ranks of one GPU

import torch  # noqa: E402 - NCCL reads its variables when it is loaded
import torch.distributed as dist  # noqa: E402

from pipeproof.exec.rank.torch.comm import BatchedMessages  # noqa: E402
from pipeproof.exec.rank.torch.cuda_graph import StreamWord  # noqa: E402

NUM_CALLS, NUM_ROUNDS = 200, 15


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds of the host in one call; the GPU is idle when a round begins."""
    times = []
    for _ in range(NUM_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        times.append((time.perf_counter() - start) / NUM_CALLS * 1e6)
    torch.cuda.synchronize()
    return median(times)


def gpu_us(call: Callable[[], object], work: torch.Tensor) -> float:
    """Median microseconds that a call adds to the GPU between two kernels, the host being ahead."""

    def timed(*, with_call: bool) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        start.record()
        for _ in range(NUM_CALLS):
            work.add_(1)
            if with_call:
                call()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / NUM_CALLS

    return median(timed(with_call=True) - timed(with_call=False) for _ in range(NUM_ROUNDS))


def words() -> dict[str, float]:
    """Costs of a progress word: a copy of sixteen bytes to pinned memory, and the driver's stream write."""
    pairs = torch.zeros(100, 2, dtype=torch.int64, device="cuda")
    pinned, word = torch.zeros(2, dtype=torch.int64, pin_memory=True), StreamWord()
    calls = {
        "copy": lambda: pinned.copy_(pairs[7], non_blocking=True),
        "stream write": lambda: word.write(7),
    }
    work = torch.zeros(1 << 20, device="cuda")
    for call in calls.values():
        call()
    found = {f"{name}, {side}": value(call) for name, call in calls.items() for side, value in (
        ("host", host_us), ("GPU", lambda each: gpu_us(each, work)))}  # fmt: skip
    word.write(1234567890123)
    torch.cuda.synchronize()
    if word.read() != 1234567890123:
        raise SystemExit("the word does not arrive")
    return found


def messages(device: torch.device) -> dict[str, float]:
    """Host time of posting a message of 8 bytes and making the stream wait for it, from rank 0 to rank 1."""
    buffer, found = torch.ones(2, device=device), {}
    alone = BatchedMessages(device)

    def through(name: str, post: Callable[[], object]) -> None:
        post()
        torch.cuda.synchronize()
        dist.barrier(device_ids=[device.index])
        found[name] = host_us(post)

    def unbatched(group: dist.ProcessGroup) -> None:
        work = dist.isend(buffer, dst=1, group=group) if RANK == 0 else dist.irecv(buffer, src=0, group=group)
        assert work is not None
        work.wait()

    def batched(group: dist.ProcessGroup) -> None:
        op = dist.P2POp(dist.isend if RANK == 0 else dist.irecv, buffer, 1 - RANK, group)
        for work in dist.batch_isend_irecv([op]):
            work.wait()

    def ours(group: dist.ProcessGroup) -> None:
        (alone.isend(buffer, dst=1, group=group) if RANK == 0 else alone.irecv(buffer, src=0, group=group)).wait()

    ways = {"batch of one (ours)": ours, "batch_isend_irecv": batched, "isend, irecv": unbatched}
    for name, way in ways.items():
        group = dist.new_group([0, 1])
        through(name, lambda way=way, group=group: way(group))
    return found


def main() -> int:
    """Measure and print."""
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl")
    dist.barrier(device_ids=[device.index])
    for title, found in (("progress word", words()), ("message", messages(device))):
        if RANK == 0:
            rounded = {name: round(value, 2) for name, value in found.items()}
            sys.stdout.write(json.dumps({"us of each": title, **rounded}) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
