"""Steps with tensor and sequence parallelism on GPUs: pipeproof's executor next to plain PyTorch.

    torchrun --nproc-per-node 2 benchmarks/gpu/tensor.py "4096,4096,4,8" 2 1f1b

The first argument is the size (hidden, sequence, blocks of a stage, micro-batches),
the second how many ranks share each block, the third the schedule. With as many
ranks as that there is one stage, and the rival is a plain loop over micro-batches;
with more there is a pipeline of stages, and it is ``torch.distributed.pipelining``.
Forward and backward of all micro-batches, bfloat16, no optimizer; gradients of
norms are summed over the ranks. ``work`` is ours without communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from measure import Times, captured_anew, forget, leave, timed
from our_step import OurStep, start
from plain_tensor import TensorStage
from rival import CLASSES, stage_numbers
from sizes import Size
from torch.distributed.pipelining import PipelineStage, schedules

ALONE = Times(warm_up=1, steps=3, series=1)


def main() -> None:
    """Time the sizes on the command line."""
    framework, report = start()
    device, num_ranks = framework.device, dist.get_world_size()
    size, num_tp = replace(Size.read(sys.argv[1]), activation_order="sbh"), int(sys.argv[2])
    kind, num_pp = sys.argv[3], num_ranks // num_tp
    theirs = timed(_rival(kind, size, num_pp, num_tp, device), device, Times())
    forget(device)
    data = size.plan(kind if num_pp > 1 else "1f1b", num_pp, tp=num_tp, sequence_parallel=True)
    step = OurStep(data, framework)
    ours = timed(step, device, Times())
    graph = timed(captured_anew(step, device), device, Times())
    del step
    forget(device)
    work = timed(captured_anew(OurStep(data, framework, alone=True), device), device, ALONE)
    report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a stage, "
        f"{size.num_micro_batches} micro-batches")  # fmt: skip
    report(f"{'':22} {'rival':>8} {'ours':>8} {'ratio':>6} {'graph':>8} {'ratio':>6} {'work':>8}   GiB: rival, ours")
    report(f"{f'tp {num_tp} pp {num_pp} {kind}':22} {theirs.ms:8.2f} {ours.ratio_to(theirs)} {graph.ratio_to(theirs)} "
        f"{work.ms:8.2f}   {theirs.gib:.2f} {ours.gib:.2f}")  # fmt: skip
    leave()


def _rival(kind: str, size: Size, num_pp: int, num_tp: int, device: torch.device) -> Callable[[], object]:
    """Ranks that share a block have neighbouring numbers, as in our plan."""
    own, ranks = dist.get_rank(), torch.arange(num_pp * num_tp).view(num_pp, num_tp)
    shares = [dist.new_group(row.tolist()) for row in ranks][own // num_tp]
    pipes = [dist.new_group(column.tolist()) for column in ranks.t()][own % num_tp]
    scale = 1 / (size.seq_length * size.num_micro_batches)
    shape = size.num_micro_batches, size.seq_length
    tokens, labels = (torch.randint(0, size.vocab_size, shape, device=device) for _ in range(2))
    if num_pp == 1:
        model = TensorStage(size, size.num_layers, shares, device, "first and last")

        def loop() -> None:
            for words, targets in zip(tokens.split(1), labels.split(1), strict=True):
                (model.loss(model(words), targets) * scale).backward()
            model.sum_gradients()

        return loop
    num_chunks = size.chunks(kind)
    num_stages, numbers = num_pp * num_chunks, stage_numbers(kind, num_chunks, own // num_tp, num_pp)
    modules = [
        TensorStage(size, size.num_layers // num_chunks, shares, device, _ends(number, num_stages))
        for number in numbers
    ]
    stages = [PipelineStage(m, n, num_stages, device, group=pipes) for m, n in zip(modules, numbers, strict=True)]
    made = getattr(schedules, CLASSES[kind])
    schedule = made(
        stages if num_chunks > 1 else stages[0],
        size.num_micro_batches,
        loss_fn=lambda logits, targets: modules[-1].loss(logits, targets) * scale,
    )
    inputs = (tokens,) if 0 in numbers else ()
    given = {"target": labels, "losses": []} if num_stages - 1 in numbers else {}

    def step() -> None:
        schedule.step(*inputs, **given)
        for module in modules:
            module.sum_gradients()

    return step


def _ends(number: int, num_stages: int) -> str:
    return "first" if number == 0 else "last" if number == num_stages - 1 else "between"


if __name__ == "__main__":
    main()
