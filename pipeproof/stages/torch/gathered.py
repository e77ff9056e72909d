"""Inputs of weights that were gathered over TP, and are gathered again for the weights' gradients.

With sequence parallelism each rank has its own tokens of what lies between
layers, and products with weights read all of them. Kept for W, the gathered
tensor takes T times the memory of the rank's own tokens; forgotten, it costs
one more gather in W (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor

_SOURCE = "pipeproof_gathered_input"


class GatheredInput:
    """Where a tensor came from that products with weights read; ``gather`` makes it once more, with the same bits.

    W gathers at the first of its uses, and forgets it after the last.
    """

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather, self._num_uses = gather, 0
        self._again: Tensor | None = None

    def mark(self, *tensors: Tensor) -> None:
        """These have the values that ``gather`` makes."""
        for tensor in tensors:
            setattr(tensor, _SOURCE, self)

    def use(self) -> None:
        """Count a product that will ``take`` what it read, once."""
        self._num_uses += 1

    def take(self) -> Tensor:
        """The tensor, for one use."""
        again = self._gather() if self._again is None else self._again
        self._num_uses -= 1
        self._again = again if self._num_uses else None
        return again


def source_of(tensor: Tensor) -> GatheredInput | None:
    """Where a tensor came from that is not to be kept; None for any other."""
    source: GatheredInput | None = getattr(tensor, _SOURCE, None)
    return source
