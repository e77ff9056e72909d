"""A script's module on one GPU: each way of splitting its backward, next to PyTorch's own autograd and `torch.compile`.

    torchrun --nproc-per-node 1 benchmarks/gpu/module_splits.py 4096,4096,4,8 1536,2048,6,10 1024,1024,4,16
    torchrun --nproc-per-node 1 benchmarks/gpu/module_splits.py --replay 1024,1024,4,16    # also replayed steps

Each size is hidden, sequence, blocks, micro-batches. A step is the forward and backward of all micro-batches in
bfloat16, one row of tokens each, gradients added up; it has no messages. ``products`` are the matrix products with
their accumulation and the attention alone, which no way can beat. It prints milliseconds (median of the rounds, in
which the ways alternate), the ratio to the compiled blocks under plain autograd, GiB of a step above the weights (of a
replay nothing: its memory is the graph's), and how far the gradients are from eager ones: the largest norm of a
difference by the norm of the gradient. Attention's backward adds in no fixed order, so two steps differ in their last
bits in every way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_gpt import PlainBlock, PlainStage
from sizes import Size

from pipeproof.torch import Pipeline

NUM_ROUNDS, NUM_WARM_UPS = 5, 3
HEAD = 128


def blocks_of(size: Size, device: torch.device, *, compiled: bool) -> PlainStage:
    """The same weights in every call."""
    torch.manual_seed(0)
    made = [
        PlainBlock(size.hidden, size.hidden // HEAD, 4 * size.hidden, size.seq_length, torch.bfloat16, device)
        for _ in range(size.num_layers)
    ]
    if compiled:
        for block in made:
            block.compile()
    return PlainStage(made, None, None)


def loss_of(output: torch.Tensor, _: object) -> torch.Tensor:
    """A loss of little work, with a gradient that is not constant."""
    return output.float().pow(2).mean()


def plain(module: torch.nn.Module, inputs: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward by autograd, micro-batch by micro-batch."""

    def step() -> None:
        for x in inputs:
            loss_of(module(x.requires_grad_()), None).backward()
            x.grad = None

    return step


def products(size: Size, device: torch.device) -> Callable[[], object]:
    """The products of all blocks and micro-batches, forward, of inputs and of weights, and the attention."""
    tokens, hidden = size.seq_length, size.hidden
    shapes = [(hidden, 3 * hidden), (hidden, hidden), *[(hidden, 4 * hidden)] * 2, (4 * hidden, hidden)]

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    sets = [(made(tokens, n), made(n, m), made(tokens, m), made(n, m)) for n, m in shapes]
    heads = [made(1, hidden // HEAD, tokens, HEAD).requires_grad_() for _ in range(3)]
    gradient = made(1, hidden // HEAD, tokens, HEAD)

    def step() -> None:
        for _ in range(size.num_layers * size.num_micro_batches):
            for x, weight, of_y, of_weight in sets:
                torch.mm(x, weight)
                torch.mm(of_y, weight.T)
                of_weight.addmm_(x.T, of_y)
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            torch.autograd.grad(mixed, heads, gradient)

    return step


def measured(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways] * NUM_ROUNDS:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        ways[name]()
        end.record()
        end.synchronize()
        times[name].append(start.elapsed_time(end))
    return {name: median(values) for name, values in times.items()}


def peak_gib(step: Callable[[], object]) -> float:
    """GiB that a step needs above the memory at its start."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def gradients_of(module: torch.nn.Module, step: Callable[[], object]) -> list[torch.Tensor]:
    """The gradients of one step."""
    for weight in module.parameters():
        weight.grad = None
    step()
    torch.cuda.synchronize()
    return [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]


def main() -> int:
    """Measure each size."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for text in (text for text in sys.argv[1:] if text != "--replay"):
        size = Size.read(text)
        torch.manual_seed(1)
        shape = (1, size.seq_length, size.hidden)
        x = torch.randn(size.num_micro_batches, *shape[1:], device=device, dtype=torch.bfloat16)
        inputs = [part.contiguous() for part in x.split(1)]
        modules: dict[str, torch.nn.Module] = {}
        ways: dict[str, Callable[[], Any]] = {}
        notes: dict[str, str] = {}
        for compiled in (False, True):
            name = "autograd, compiled blocks" if compiled else "autograd, eager"
            modules[name] = blocks_of(size, device, compiled=compiled)
            ways[name] = plain(modules[name], inputs)
        for name, schedule, split, replay in (
            ("Pipeline, B, whole", "1f1b", "whole", False),
            ("Pipeline, B, whole, compiled blocks", "1f1b", "whole", False),
            ("Pipeline, B, graph", "1f1b", "graph", False),
            ("Pipeline, I and W, linear", "zb_h1", "linear", False),
            ("Pipeline, I and W, graph", "zb_h1", "graph", False),
            ("Pipeline, B, whole, replayed", "1f1b", "whole", True),
            ("Pipeline, I and W, graph, replayed", "zb_h1", "graph", True),
        ):
            if replay and "--replay" not in sys.argv:
                continue
            modules[name] = blocks_of(size, device, compiled="compiled" in name)
            pipe = Pipeline(
                {0: modules[name]}, schedule=schedule, num_micro_batches=size.num_micro_batches, loss_fn=loss_of,
                example=(x[:1],), split=split, scale_grads=False, replay=replay,
            )  # fmt: skip
            ways[name] = partial(pipe.step, x, target=x)
            notes[name] = str(pipe.splits)
        facts = {}
        for name, step in ways.items():
            sys.stderr.write(f"warming up: {name}\n")
            for _ in range(NUM_WARM_UPS):
                step()
            facts[name] = peak_gib(step), gradients_of(modules[name], step)
        reference = facts["autograd, eager"][1]
        ways["products"] = products(size, device)
        ways["products"]()
        times = measured(ways)
        sys.stdout.write(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks, "
                         f"{size.num_micro_batches} micro-batches\n")  # fmt: skip
        for name, ms in times.items():
            line = f"  {name:36} {ms:8.2f} ms {ms / times['autograd, compiled blocks']:6.3f}"
            if name in facts:
                gib, gradients = facts[name]
                off = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, reference, strict=True))
                line += f" {gib:6.2f} GiB, off eager by {off:.1e} {notes.get(name, '')}"
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        del modules, ways, facts, reference, pipe
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
