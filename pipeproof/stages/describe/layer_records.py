"""Recording of the tensors between layers: activations and their gradients.

Stages and references pass these tensors to a ``LayerWatch``, which copies them. A hook on a tensor sees the complete
gradient and does not change it. No framework is imported here: a tensor is any object with ``detach``, ``cpu``,
``numpy`` and ``register_hook``, and either ``stop_gradient`` or ``requires_grad``. numpy has no bfloat16, so such
values are stored as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Direction: TypeAlias = Literal["forward", "backward"]
Side: TypeAlias = Literal["input", "output"]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """Identity of a recorded tensor: the ``input`` or ``output`` of a layer in one direction.

    In backward the input is the gradient of the layer's output, and the output the gradient of its input.
    ``micro_batch`` counts over all data-parallel ranks, ``split`` over the splits of a sequence.
    """

    layer: str
    direction: Direction
    side: Side
    micro_batch: int
    split: int = 0

    @property
    def key(self) -> str:
        """The identity as one string, which ``parse`` reads."""
        return f"{self.layer}/{self.direction}/{self.side}/{self.micro_batch}/{self.split}"

    @classmethod
    def parse(cls, key: str) -> RecordedTensor:
        """The identity of a key."""
        layer, direction, side, micro_batch, split = key.split("/")
        return cls(layer, direction, side, int(micro_batch), int(split))  # type: ignore[arg-type]  # as ``key`` wrote


class LayerWatch:
    """Copies of recorded tensors, by name.

    The parts of a tensor in one process are joined along ``join_dim``.
    """

    def __init__(self, join_dim: int | None = None) -> None:
        self._join_dim = join_dim
        self._parts: dict[RecordedTensor, list[Array | None]] = {}

    def see(self, layer: str, side: Side, micro_batch: int, split: int, parts: Sequence[Any]) -> None:
        """Copy a layer's forward input or output, and later its gradient."""
        name = RecordedTensor(layer, "forward", side, micro_batch, split)
        self._parts[name] = [_copy(part) for part in parts]
        backward_side: Side = "output" if side == "input" else "input"
        gradients: list[Array | None] = [None] * len(parts)
        self._parts[replace(name, direction="backward", side=backward_side)] = gradients
        for index, part in enumerate(parts):
            if _has_gradient(part):
                part.register_hook(partial(_keep, gradients, index))

    @staticmethod
    def separate_reader(streams: list[Any], index: int) -> Any:
        """Return a copy of an MTP stream for one of two readers; another copy, in ``streams``, is for the other.

        The gradient of a tensor with two readers is a sum; with copies each reader's gradient can be recorded, as if
        the other were on another stage. A sum of two has the same bits in either order.
        """
        copy, streams[index] = streams[index].clone(), streams[index].clone()
        return copy

    def see_loss(self, layer: str, micro_batch: int, split: int, loss: Any) -> None:
        """Copy the scaled loss of the last layer. Its gradient is one and is not recorded."""
        self._parts[RecordedTensor(layer, "forward", "output", micro_batch, split)] = [_copy(loss)]

    def take(self) -> dict[str, Array]:
        """Return all tensors since the last call, whole, by key. Tensors without a gradient have no backward entry."""
        arrays_by_key = {}
        for name, parts in self._parts.items():
            arrays = [part for part in parts if part is not None]
            if len(arrays) == len(parts):
                whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=self._join_dim)
                arrays_by_key[name.key] = whole
        self._parts = {}
        return arrays_by_key


def _keep(gradients: list[Array | None], index: int, gradient: Any) -> None:
    gradients[index] = _copy(gradient)


def _has_gradient(tensor: Any) -> bool:
    return not tensor.stop_gradient if hasattr(tensor, "stop_gradient") else bool(tensor.requires_grad)


def _copy(tensor: Any) -> Array:
    on_host = tensor.detach().cpu()
    if str(on_host.dtype) == "torch.bfloat16":
        on_host = on_host.float()
    return np.array(on_host.numpy(), copy=True)
