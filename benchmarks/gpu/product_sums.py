"""Products of a training next to the products of the measured tables: sums inside a product, and sums into a gradient.

    python benchmarks/gpu/product_sums.py

Products in eight bits of one block of Llama 3.1 405B (tp 8, 4,096 tokens), with and without fast accumulation:
gradients are computed without it on Hopper, as TransformerEngine does, while the tables have products of inference.
Then weight gradients in bfloat16 that are written, and that are added to the old ones. Kinds alternate on a GPU that
stays busy: both then have the clock of a training.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

_SECONDS, _ROUNDS = 1.0, 5
_SIZES = {
    "gate_up F": (4096, 16384, 13312), "gate_up I": (4096, 13312, 16384), "gate_up W": (16384, 4096, 13312),
    "down F": (4096, 6656, 16384), "down I": (4096, 16384, 6656), "down W": (6656, 4096, 16384),
    "qkv F": (4096, 16384, 2304), "qkv I": (4096, 2304, 16384), "qkv W": (16384, 4096, 2304),
}  # fmt: skip
"""Rows, inner and columns."""


def _us(run: Callable[[], object], number: int) -> float:
    """Mean time of a call in a row of ``number``, in microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(number):
        run()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / number


def _alternating(kinds: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median time of each kind over rounds in which they follow one another."""
    first = next(iter(kinds.values()))
    number = max(1, round(_SECONDS * 1e6 / len(kinds) / _ROUNDS / _us(first, 5)))
    for run in kinds.values():
        _us(run, number)
    rounds = [{name: _us(run, number) for name, run in kinds.items()} for _ in range(_ROUNDS)]
    return {name: median(times[name] for times in rounds) for name in kinds}


def main() -> None:
    """Print the times of each product."""
    print(torch.cuda.get_device_name(), torch.__version__)
    one = torch.ones((), device="cuda")
    for name, (rows, inner, columns) in _SIZES.items():
        left = torch.randn(rows, inner, device="cuda").to(torch.float8_e4m3fn)
        right = torch.randn(columns, inner, device="cuda").to(torch.float8_e4m3fn).t()

        def narrow(*, fast: bool, a: torch.Tensor = left, b: torch.Tensor = right) -> torch.Tensor:
            return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        times = _alternating({"fast": lambda: narrow(fast=True), "not": lambda: narrow(fast=False)})
        tera = 2e-6 * rows * inner * columns
        print(
            f"float8 {name:10} fast {times['fast']:7.1f} us {tera / times['fast']:6.0f} TFLOP/s"
            f"   not {times['not']:7.1f} us   ratio {times['not'] / times['fast']:.3f}"
        )
    for hidden, wide, tokens in ((4096, 32768, 4096), (16384, 4096, 13312)):
        left = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(tokens, wide, device="cuda", dtype=torch.bfloat16)
        gradient = torch.zeros(hidden, wide, device="cuda", dtype=torch.bfloat16)

        def written(a: torch.Tensor = left, b: torch.Tensor = right, out: torch.Tensor = gradient) -> torch.Tensor:
            return torch.mm(a.t(), b, out=out)

        def added(a: torch.Tensor = left, b: torch.Tensor = right, out: torch.Tensor = gradient) -> torch.Tensor:
            return out.addmm_(a.t(), b)

        times = _alternating({"written": written, "added": added})
        print(
            f"bfloat16 [{hidden}, {tokens}] x [{tokens}, {wide}]: written {times['written']:.1f} us, "
            f"added {times['added']:.1f} us, by {2 * hidden * wide / 1e6:.0f} MB more"
        )


if __name__ == "__main__":
    main()
