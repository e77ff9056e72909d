"""The rival: the same stages under ``torch.distributed.pipelining`` of the same PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from plain_experts import PlainExperts, PlainExpertsBlock
from plain_gpt import PlainBlock, PlainStage, summed_loss
from sizes import Size
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "interleaved_zb": "ScheduleInterleavedZeroBubble",
        "zb_v": "ScheduleZBVZeroBubble",
        "dualpipe_v": "ScheduleDualPipeV",
    }
)
"""Its schedules by the names that plans have for them."""


def rival_step(
    kind: str, size: Size, rank: int, num_ranks: int, device: torch.device, *, is_compiled: bool = False
) -> Callable[[], object]:
    """A forward and backward of all micro-batches, without an optimizer; gradients add up over calls."""
    num_stages = num_ranks * size.chunks(kind)
    numbers = stage_numbers(kind, size.chunks(kind), rank, num_ranks)
    modules = {number: plain_stage(size, number, num_stages, num_ranks, device) for number in numbers}
    for block in (block for module in modules.values() for block in module.blocks if is_compiled):
        block.compile()
    stages = [PipelineStage(module, number, num_stages, device) for number, module in modules.items()]
    made = getattr(schedules, CLASSES[kind])
    scale = 1 / (size.seq_length * size.num_micro_batches)
    schedule = made(
        stages if len(stages) > 1 else stages[0],
        size.num_micro_batches,
        loss_fn=lambda logits, labels: summed_loss(logits, labels) * scale,
    )
    shape = (size.num_micro_batches, size.seq_length)
    tokens, labels = (torch.randint(0, size.vocab_size, shape, device=device) for _ in range(2))
    inputs = (tokens,) if 0 in numbers else ()
    if num_stages - 1 in numbers:
        return lambda: schedule.step(*inputs, target=labels, losses=[])
    return lambda: schedule.step(*inputs)


def plain_step(
    size: Size, device: torch.device, *, is_shared_out: bool, is_compiled: bool = False
) -> Callable[[], object]:
    """The same without a pipeline: the whole model on this rank, but for experts that the world's ranks share out.

    Each micro-batch goes forward and back; in the end replicated gradients are summed over the ranks. ``is_compiled``
    compiles each block.
    """
    model = plain_stage(size, 0, 1, 1, device, is_shared_out=is_shared_out)
    if is_compiled:
        for block in model.blocks:
            block.compile()
    scale = 1 / (size.seq_length * size.num_micro_batches)
    shape = (size.num_micro_batches, 1, size.seq_length)
    tokens, labels = (torch.randint(0, size.vocab_size, shape, device=device) for _ in range(2))
    replicated = [weight for name, weight in model.named_parameters() if ".experts." not in name or "router" in name]

    def step() -> None:
        for words, targets in zip(tokens, labels, strict=True):
            (summed_loss(model(words), targets) * scale).backward()
        if is_shared_out:
            for weight in replicated:
                dist.all_reduce(weight.grad)

    return step


def stage_numbers(kind: str, num_chunks: int, place: int, num_places: int) -> list[int]:
    """The stages of one place in the pipeline, first chunks first."""
    if num_chunks == 1:
        return [place]
    if kind in ("zb_v", "dualpipe_v"):
        return [place, 2 * num_places - 1 - place]
    return [place, place + num_places]


def plain_stage(
    size: Size, number: int, num_stages: int, num_ranks: int, device: torch.device, *, is_shared_out: bool = False
) -> PlainStage:
    """One of the stages, with small random weights."""
    hidden, made = size.hidden, {"dtype": size.dtype, "device": device}
    blocks = [
        _block(size, device, is_shared_out=is_shared_out) for _ in range(size.num_layers * num_ranks // num_stages)
    ]
    embed = nn.Embedding(size.vocab_size, hidden, **made) if number == 0 else None
    last = nn.Sequential(nn.RMSNorm(hidden, 1e-6, **made), nn.Linear(hidden, size.vocab_size, bias=False, **made))
    module = PlainStage(blocks, embed, last if number == num_stages - 1 else None)
    for weight in module.parameters():
        if weight.dim() > 1:
            nn.init.uniform_(weight, -0.02, 0.02)
    return module


def _block(size: Size, device: torch.device, *, is_shared_out: bool) -> PlainBlock:
    block = size.hidden, size.num_heads, size.ffn, size.seq_length, size.dtype, device
    if size.moe is None:
        return PlainBlock(*block)
    moe = size.moe["num_experts"], size.moe["top_k"], size.moe["ffn_size"]
    experts = PlainExperts(size.hidden, *moe, size.dtype, device, is_shared_out=is_shared_out)
    return PlainExpertsBlock(*block, experts=experts)
