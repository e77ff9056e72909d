"""Inputs of weights that were gathered over TP, and are gathered again for the weights' gradients.

With sequence parallelism each rank has its own tokens of what lies between
layers, and products with weights read all of them. Kept for W, the gathered
tensor takes T times the memory of the rank's own tokens; forgotten, it costs
one more gather in W (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import paddle

Tensor: TypeAlias = paddle.Tensor

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

    def mark_part(self, tensor: Tensor, part: Callable[[Tensor], Tensor]) -> None:
        """This has the values of a part of what ``gather`` makes."""
        PartOfGathered(self, part).mark(tensor)

    def forgotten(
        self, value_of: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """``value_of`` of the tensor; what autograd would keep of the tensor for it is gathered again when needed."""

        def value(x: Tensor) -> Tensor:
            self._num_uses += 1

            def pack(kept: Tensor) -> Any:
                return self if kept.data_ptr() == x.data_ptr() else kept

            def unpack(kept: Any) -> Tensor:
                if kept is not self:
                    return kept
                again = self._take()
                return again if part is None else part(again)

            with paddle.autograd.saved_tensors_hooks(pack, unpack):
                return value_of(x)

        return value

    def _take(self) -> Tensor:
        again = self._gather() if self._again is None else self._again
        self._num_uses -= 1
        self._again = again if self._num_uses else None
        return again


class PartOfGathered:
    """Where a tensor came from that is a part of what is gathered: its parts share one gather in W."""

    def __init__(self, whole: GatheredInput, part: Callable[[Tensor], Tensor]) -> None:
        self._whole, self._part = whole, part

    def mark(self, *tensors: Tensor) -> None:
        """These have the values of the part."""
        for tensor in tensors:
            setattr(tensor, _SOURCE, self)

    def forgotten(self, value_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """As that of the whole."""
        return self._whole.forgotten(value_of, self._part)


def source_of(tensor: Tensor) -> GatheredInput | PartOfGathered | None:
    """Where a tensor came from that is not to be kept; None for any other."""
    source: GatheredInput | PartOfGathered | None = getattr(tensor, _SOURCE, None)
    return source
