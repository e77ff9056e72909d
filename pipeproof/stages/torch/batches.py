"""The tokens of a step on the rank's device, there before the step begins, so that nothing in it waits for the host.

Words are tokens or labels, int64 [S, B] or [B, S] in the order of the plan's activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.lanes import lane_batches
from pipeproof.stages.common.units import Lane, Unit
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.torch.functional import wide_type

Tensor: TypeAlias = torch.Tensor


class StepBatches:
    """The units of work of one data-parallel rank; ``load`` puts those of a step in the same memory each time.

    Pieces are those of sequences that are cut, over time or over context-parallel ranks.
    """

    def __init__(self, plan: PlanSpec, first: int, device: torch.device) -> None:
        self._plan, self._first, self._device = plan, first, device
        self._scale_type = wide_type(getattr(torch, plan.run.dtype))
        self._units: dict[tuple[int, int], Unit] = {}

    def load(self, step: int) -> None:
        """Draw the step's micro-batches, those of the rank from ``first`` on over all data ranks."""
        for index in range(self._first, self._first + self._plan.schedule.num_micro_batches):
            scale = torch.tensor(loss_scale(self._plan, step, index), dtype=self._scale_type)
            for piece, lanes in enumerate(self._pieces(step, index)):
                self._put(index, piece, lanes, scale)

    def unit(self, index: int, piece: int = 0) -> Unit:
        """The unit of a micro-batch, counted over all data ranks, and a piece of its sequences."""
        return self._units[index, piece]

    def _pieces(self, step: int, index: int) -> Iterator[list[Lane]]:
        """On the host: of each piece, its lanes."""
        num_pieces = self._plan.schedule.num_sequence_splits * self._plan.topology.cp
        lanes = lane_batches(self._plan, micro_batch(self._plan, step, index))
        cut = [[np.split(words, num_pieces, axis=1) for words in (lane.tokens, lane.labels)] for lane in lanes]
        for piece in range(num_pieces):
            yield [Lane(*(self._in_order(words[piece]) for words in lane)) for lane in cut]

    def _in_order(self, words: npt.NDArray[np.int64]) -> Tensor:
        batch_first = self._plan.model.activation_order == "bsh"
        return torch.from_numpy(np.ascontiguousarray(words if batch_first else words.T))

    def _put(self, index: int, piece: int, lanes: Sequence[Lane], scale: Tensor) -> None:
        there = self._units.get((index, piece))
        if there is None:
            placed = tuple(Lane(lane.tokens.to(self._device), lane.labels.to(self._device)) for lane in lanes)
            self._units[index, piece] = Unit(placed, scale.to(self._device))
            return
        there.scale.copy_(scale)
        for place, lane in zip(there.lanes, lanes, strict=True):
            place.tokens.copy_(lane.tokens)
            place.labels.copy_(lane.labels)
