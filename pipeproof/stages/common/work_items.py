"""Work items of a stage: a micro-batch, or a split of its sequences, with its MTP streams.

Tokens and labels are int64, [S, B] or [B, S] in the order of the plan's activations. Between stages the MTP streams
are one tensor; inside of a stage they are a list of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor
from pipeproof.stages.describe.mtp_streams import module_weight, num_modules, shifted_batch
from pipeproof.stages.describe.synthetic import Batch


@dataclass(frozen=True, slots=True)
class MtpStream:
    """The tokens that one MTP stream reads and the labels that it predicts, for one work item."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One work item: its MTP streams, the main one first, and the scale of their losses, a scalar."""

    streams: tuple[MtpStream, ...]
    scale: Tensor

    @property
    def tokens(self) -> Tensor:
        """The tokens of the main stream."""
        return self.streams[0].tokens

    @property
    def labels(self) -> Tensor:
        """The labels of the main stream."""
        return self.streams[0].labels


def split_mtp_streams(ops: BackendOps, joined: Tensor, num_streams: int, rows_dim: int) -> list[Tensor]:
    """Split a boundary tensor into its MTP streams, along the rows of the micro-batch."""
    return [joined] if num_streams == 1 else list(ops.chunk(joined, num_streams, rows_dim))


def join_mtp_streams(ops: BackendOps, streams: Sequence[Tensor], rows_dim: int) -> Tensor:
    """Join MTP streams into one boundary tensor, along the rows of the micro-batch."""
    return streams[0] if len(streams) == 1 else ops.concat(list(streams), rows_dim)


def mtp_batches(plan: PlanSpec, batch: Batch) -> list[Batch]:
    """Return the micro-batch of each MTP stream, the main one first."""
    return [shifted_batch(batch, distance) for distance in range(1 + num_modules(plan.gpt))]


def training_loss(plan: PlanSpec, losses: Sequence[Tensor]) -> Tensor:
    """The loss that is trained on: the main loss plus the weighted losses of modules; ``losses`` are already scaled."""
    total = losses[0]
    if plan.gpt.mtp is not None:
        for loss in losses[1:]:
            total = total + loss * module_weight(plan.gpt.mtp)
    return total
