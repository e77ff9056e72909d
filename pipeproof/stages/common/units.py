"""What a stage reads of a micro-batch, or of a piece of its sequences.

Words are tokens or labels, int64 [S, B] or [B, S] in the order of the plan's activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.stages.common.ops import Tensor


@dataclass(frozen=True, slots=True)
class Lane:
    """What one lane of multi-token prediction reads and predicts, of a unit's piece of the sequences."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: what each lane reads, the main one first, and the scale of their losses, one number."""

    lanes: tuple[Lane, ...]
    scale: Tensor

    @property
    def tokens(self) -> Tensor:
        """Those of the main lane."""
        return self.lanes[0].tokens

    @property
    def labels(self) -> Tensor:
        """Those of the main lane."""
        return self.lanes[0].labels
