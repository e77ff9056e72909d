"""Work items of a step on the rank's device, loaded before the step begins, so that no kernel waits for the host.

Tokens and labels are int64, [S, B] or [B, S] in the order of the plan's activations. A plan may declare that
``tokens``, ``labels`` or ``mask`` (the positions that count in the loss) cross a boundary in addition to the
activation. They have no gradient. A stage that receives one uses it in place of its own, on its device. Only the main
stream changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.work_items import MtpStream, WorkItem, mtp_batches
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.synthetic import IGNORED, loss_scale, micro_batch
from pipeproof.stages.torch.functional import wide_type

Tensor: TypeAlias = torch.Tensor


class StepBatches:
    """The work items of one data-parallel rank. ``load`` puts those of each step in the same memory.

    Sequences may be split, over time or over context-parallel ranks.
    """

    def __init__(self, plan: PlanSpec, first: int, device: torch.device) -> None:
        self._plan, self._first, self._device = plan, first, device
        self._scale_type = wide_type(getattr(torch, plan.run.dtype))
        self._work_items: dict[tuple[int, int], WorkItem] = {}

    def load(self, step: int) -> None:
        """Draw the step's micro-batches: those of the rank, from ``first`` on over all data ranks."""
        for index in range(self._first, self._first + self._plan.schedule.num_micro_batches):
            scale = torch.tensor(loss_scale(self._plan, step, index), dtype=self._scale_type)
            for split, streams in enumerate(self._splits(step, index)):
                self._put(index, split, streams, scale)

    def work_item(self, index: int, split: int = 0) -> WorkItem:
        """The work item of a micro-batch, counted over all data ranks, and a split of its sequences."""
        return self._work_items[index, split]

    def _splits(self, step: int, index: int) -> Iterator[list[MtpStream]]:
        """The streams of each split, on the host."""
        num_splits = self._plan.schedule.num_sequence_splits * self._plan.topology.cp
        batches = mtp_batches(self._plan, micro_batch(self._plan, step, index))
        parts = [[np.split(ids, num_splits, axis=1) for ids in (batch.tokens, batch.labels)] for batch in batches]
        for split in range(num_splits):
            yield [MtpStream(self._in_order(tokens[split]), self._in_order(labels[split])) for tokens, labels in parts]

    def _in_order(self, token_ids: npt.NDArray[np.int64]) -> Tensor:
        batch_first = self._plan.gpt.activation_order == "bsh"
        return torch.from_numpy(np.ascontiguousarray(token_ids if batch_first else token_ids.T))

    def _put(self, index: int, split: int, streams: Sequence[MtpStream], scale: Tensor) -> None:
        loaded = self._work_items.get((index, split))
        if loaded is None:
            copies = tuple(MtpStream(x.tokens.to(self._device), x.labels.to(self._device)) for x in streams)
            self._work_items[index, split] = WorkItem(copies, scale.to(self._device))
            return
        loaded.scale.copy_(scale)
        for target, stream in zip(loaded.streams, streams, strict=True):
            target.tokens.copy_(stream.tokens)
            target.labels.copy_(stream.labels)


def member_values(work_item: WorkItem, member: Boundary, *, batch_first: bool) -> Tensor:
    """The values of a boundary member for a work item, over all TP ranks, in the member's order of dims and type."""
    values = {"tokens": work_item.tokens, "labels": work_item.labels, "mask": work_item.labels != IGNORED}
    return (
        _in_order(values[member.member], member, batch_first=batch_first).to(getattr(torch, member.dtype)).contiguous()
    )


def with_member(work_item: WorkItem, member: Boundary, received: Tensor, *, batch_first: bool) -> WorkItem:
    """The work item with the received values, whole, in place of its own.

    Tokens also determine the labels: the label of a position is the next token, except for the last position.
    """
    values = _in_order(received, member, batch_first=batch_first)
    tokens, labels = work_item.tokens, work_item.labels
    if member.member == "labels":
        labels = values.to(torch.int64)
    elif member.member == "mask":
        labels = torch.where(values.bool(), labels, IGNORED)
    else:
        tokens, dim = values.to(torch.int64), 1 if batch_first else 0
        length = tokens.shape[dim]
        known, last = labels.split([length - 1, 1], dim)
        next_tokens = tokens.narrow(dim, 1, length - 1)
        labels = torch.cat([torch.where(known == IGNORED, IGNORED, next_tokens), last], dim)
    return replace(work_item, streams=(MtpStream(tokens, labels), *work_item.streams[1:]))


def _in_order(values: Tensor, member: Boundary, *, batch_first: bool) -> Tensor:
    """Convert between the member's order of dims and that of work items."""
    return values if (member.dims == "bs") == batch_first else values.t()
