"""Slowdown of a GPU while a posted receive waits for its message: ``cost.recv_slowdown``.

``torchrun --nproc-per-node 2 benchmarks/recv_slowdown.py`` times computations of a GPT block on the second GPU, by
themselves and during an NCCL receive whose message the first GPU sends only afterwards, in turn. It prints the medians,
and by which share the second is longer. It needs PyTorch with NCCL and two GPUs, and no pipeproof.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

HIDDEN, HEADS, SEQUENCE = 4096, 32, 4096
CALLS, REPEATS, WARM_UPS = 20, 11, 3
MESSAGE_BYTES = 2 * HIDDEN * SEQUENCE


def main() -> None:
    """Measure on rank 1, with rank 0 to send."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    hosts = dist.new_group(backend="gloo")
    message = torch.zeros(MESSAGE_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    _message(dist, message, rank, wait=True)
    calls = _computations(torch)
    if rank == 1:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
        print(f"{'computation':<16}{'alone':>9}{'with recv':>11}  longer by")
    for name, call in calls.items():
        alone, receiving = [], []
        for repeat in range(WARM_UPS + REPEATS):
            for times, is_receiving in ((alone, False), (receiving, True)):
                pending = _message(dist, message, rank, wait=False) if is_receiving and rank == 1 else None
                us = _time_us(torch, call) if rank == 1 else 0.0
                dist.barrier(hosts)  # only now may the message come
                if is_receiving and rank == 0:
                    _message(dist, message, rank, wait=True)
                if pending is not None:
                    pending.wait()
                torch.cuda.synchronize()
                dist.barrier(hosts)
                if repeat >= WARM_UPS:
                    times.append(us)
        if rank == 1:
            first, second = median(alone), median(receiving)
            print(f"{name:<16}{first:>9.0f}{second:>11.0f}  {second / first - 1:>8.1%}", flush=True)
    dist.destroy_process_group()


def _message(dist: Any, tensor: Any, rank: int, *, wait: bool) -> Any:
    """Send or receive it; the work, over already if ``wait``."""
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    if wait:
        work.wait()
    return work


def _time_us(torch: Any, call: Callable[[], object]) -> float:
    """Microseconds of one of ``CALLS`` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / CALLS


def _computations(torch: Any) -> dict[str, Callable[[], object]]:
    functional = torch.nn.functional

    def random(*shape: int, grad: bool = False) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    tokens, weight = random(SEQUENCE, HIDDEN), random(HIDDEN, 4 * HIDDEN)
    heads = [random(1, HEADS, SEQUENCE, HIDDEN // HEADS) for _ in range(3)]
    other = random(SEQUENCE, HIDDEN)
    scale = HIDDEN**-0.5
    fused, out = random(HIDDEN, 3 * HIDDEN, grad=True), random(HIDDEN, HIDDEN, grad=True)
    up, down = random(HIDDEN, 8 * HIDDEN, grad=True), random(4 * HIDDEN, HIDDEN, grad=True)
    entering, leaving = random(SEQUENCE, HIDDEN, grad=True), random(SEQUENCE, HIDDEN)

    def block(x: Any) -> Any:
        qkv = (functional.rms_norm(x, (HIDDEN,)) @ (fused * scale)).view(1, SEQUENCE, 3, HEADS, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(SEQUENCE, HIDDEN) @ (out * scale)
        gate, linear = (functional.rms_norm(x, (HIDDEN,)) @ (up * scale)).chunk(2, dim=-1)
        return x + (functional.silu(gate) * linear) @ (down * scale)

    def forward() -> Any:
        with torch.no_grad():
            return block(entering)

    def both() -> None:
        block(entering).backward(leaving)

    return {
        "product": lambda: tokens @ weight,
        "attention": lambda: functional.scaled_dot_product_attention(*heads, is_causal=True),
        "addition": lambda: tokens + other,
        "block F": forward,
        "block F and B": both,
    }


if __name__ == "__main__":
    main()
