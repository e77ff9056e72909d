"""Inputs of products that W gathers again, and marks on the tensors that have their values.

With sequence parallelism each rank has its own tokens between layers, and products with weights read all tokens. If
the gathered tensor is kept for W, it takes T times the memory of the rank's own tokens. If it is not kept, W needs one
more gather (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeproof.stages.common.backend_ops import Tensor

_SOURCE = "pipeproof_gathered_input"


def mark(source: object, *tensors: Tensor) -> None:
    """Mark tensors that have the values of a source."""
    for tensor in tensors:
        setattr(tensor, _SOURCE, source)


def source_of(tensor: Tensor) -> Any:
    """The source of a tensor that must not be kept; None for any other tensor."""
    return getattr(tensor, _SOURCE, None)


class GatheredInput:
    """The source of a gathered tensor that products with weights read. ``gather`` returns it with the same bits.

    W gathers at the first use and frees the tensor after the last.
    """

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather, self._num_uses = gather, 0
        self._tensor: Tensor | None = None

    def use(self) -> None:
        """Count a product that will call ``take`` once."""
        self._num_uses += 1

    def take(self) -> Tensor:
        """Return the gathered tensor for one use."""
        gathered = self._gather() if self._tensor is None else self._tensor
        self._num_uses -= 1
        self._tensor = gathered if self._num_uses else None
        return gathered
