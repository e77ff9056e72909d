"""Attention's kernels on one GPU: time of forward and backward, and the bits of gradients that are computed again.

    python benchmarks/gpu/attention_kernels.py 1024,1024 2048,4096 4096,4096 3072,8192

Each size is hidden, sequence. One row of tokens, heads of 128, causal, bfloat16. Each kernel runs as PyTorch calls it,
and after ``torch.use_deterministic_algorithms(True)``. It prints milliseconds (smallest median of three series) and the
number of different gradients among ten backward passes with the same inputs: 1 is deterministic. *default* is the
kernel that PyTorch chooses.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD = 128
NUM_REPEATS = 10
KERNELS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ms_of(work: Callable[[], object]) -> float:
    """Milliseconds of one call by events of the GPU."""
    for _ in range(3):
        work()
    medians = []
    for _ in range(3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        for mark in marks:
            mark.record()
            work()
        torch.cuda.synchronize()
        medians.append(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)))
    return min(medians)


def measured(hidden: int, seq_length: int) -> str:
    """Milliseconds of the forward, of the backward, and the number of different gradients."""
    torch.manual_seed(0)
    shape = (1, hidden // HEAD, seq_length, HEAD)
    heads = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
    forward = ms_of(lambda: F.scaled_dot_product_attention(*heads, is_causal=True))
    backward = ms_of(lambda: torch.autograd.grad(mixed, heads, gradient, retain_graph=True))
    found = [torch.autograd.grad(mixed, heads, gradient, retain_graph=True) for _ in range(NUM_REPEATS)]
    kinds: list[tuple[torch.Tensor, ...]] = []
    for gradients in found:
        if not any(all(map(torch.equal, gradients, other)) for other in kinds):
            kinds.append(gradients)
    return f"{forward:8.3f} {backward:8.3f} {len(kinds):4}   {mixed.grad_fn.name()}"


def main() -> None:
    """Measure the sizes of the command line."""
    print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version(), flush=True)
    for hidden, seq_length in [tuple(map(int, text.split(","))) for text in sys.argv[1:]]:
        for name, backend in KERNELS.items():
            for is_deterministic in (False, True):
                torch.use_deterministic_algorithms(is_deterministic)  # with `warn_only` the fast kernels stay
                torch.utils.deterministic.fill_uninitialized_memory = False
                try:
                    if backend is None:
                        row = measured(hidden, seq_length)
                    else:
                        with sdpa_kernel(backend):
                            row = measured(hidden, seq_length)
                except RuntimeError as error:
                    row = str(error).splitlines()[0]
                way = name + ", deterministic" * is_deterministic
                print(f"{hidden:5} {seq_length:5} {way:26} {row}", flush=True)


if __name__ == "__main__":
    main()
