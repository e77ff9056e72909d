"""The rival: the same stages under ``torch.distributed.pipelining`` of the same PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
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


def rival_step(kind: str, size: Size, rank: int, num_ranks: int, device: torch.device) -> Callable[[], object]:
    """A forward and backward of all micro-batches, without an optimizer; gradients add up over calls."""
    num_stages = num_ranks * size.chunks(kind)
    if size.chunks(kind) == 1:
        numbers = [rank]
    elif kind in ("zb_v", "dualpipe_v"):
        numbers = [rank, num_stages - 1 - rank]
    else:
        numbers = [rank, rank + num_ranks]
    stages = [_stage(size, number, num_stages, num_ranks, device) for number in numbers]
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


def _stage(size: Size, number: int, num_stages: int, num_ranks: int, device: torch.device) -> PipelineStage:
    hidden, made = size.hidden, {"dtype": size.dtype, "device": device}
    block = hidden, size.num_heads, size.ffn, size.seq_length, size.dtype, device
    blocks = [PlainBlock(*block) for _ in range(size.num_layers * num_ranks // num_stages)]
    embed = nn.Embedding(size.vocab_size, hidden, **made) if number == 0 else None
    last = nn.Sequential(nn.RMSNorm(hidden, 1e-6, **made), nn.Linear(hidden, size.vocab_size, bias=False, **made))
    module = PlainStage(blocks, embed, last if number == num_stages - 1 else None)
    for weight in module.parameters():
        if weight.dim() > 1:
            nn.init.uniform_(weight, -0.02, 0.02)
    return PipelineStage(module, number, num_stages, device)
