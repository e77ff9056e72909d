"""What crosses the borders between layers, kept for a record: activations, and the gradients that come back.

Both the stages and the reference tell a ``LayerWatch`` which tensors stand at
a border. It only looks: a hook on a tensor sees the gradient after autograd has
added it up, and leaves every bit as it is. Nothing of any framework is
imported here; a tensor is whatever has ``detach``, ``cpu``, ``numpy`` and
``register_hook``, and either ``stop_gradient`` or ``requires_grad``. Values of
bfloat16, which numpy has not, are kept as float32.
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
class BorderTensor:
    """Which tensor it is: what a layer takes (``input``) or gives (``output``) in one direction.

    In the backward direction a layer takes the gradient of its output and gives
    that of its input. ``micro_batch`` counts over all data-parallel ranks,
    ``piece`` over the pieces of a cut sequence.
    """

    layer: str
    direction: Direction
    side: Side
    micro_batch: int
    piece: int = 0

    @property
    def key(self) -> str:
        """The name as one word; ``parse`` reads it."""
        return f"{self.layer}/{self.direction}/{self.side}/{self.micro_batch}/{self.piece}"

    @classmethod
    def parse(cls, key: str) -> BorderTensor:
        """The tensor of a key."""
        layer, direction, side, micro_batch, piece = key.split("/")
        return cls(layer, direction, side, int(micro_batch), int(piece))  # type: ignore[arg-type]  # as ``key`` wrote


class LayerWatch:
    """Copies of what it was shown, by name.

    A tensor that one process holds in parts is joined along ``join_dim``.
    """

    def __init__(self, join_dim: int | None = None) -> None:
        self._join_dim = join_dim
        self._parts: dict[BorderTensor, list[Array | None]] = {}

    def see(self, layer: str, side: Side, micro_batch: int, piece: int, parts: Sequence[Any]) -> None:
        """Take a copy of what a layer takes or gives forward, and later of its gradient."""
        name = BorderTensor(layer, "forward", side, micro_batch, piece)
        self._parts[name] = [_copy(part) for part in parts]
        other: Side = "output" if side == "input" else "input"
        gradients: list[Array | None] = [None] * len(parts)
        self._parts[replace(name, direction="backward", side=other)] = gradients
        for place, part in enumerate(parts):
            if _has_gradient(part):
                part.register_hook(partial(_keep, gradients, place))

    @staticmethod
    def apart(lanes: list[Any], place: int) -> Any:
        """What a layer takes of a lane that another layer takes, too: what each of them gives backward is its own.

        The gradient of a tensor with two readers is a sum, wherever it is looked
        at; a reader on another stage has an addend. The other reader's copy is
        put in the lane's place. A sum of two has the same bits in either order.
        """
        taken, lanes[place] = lanes[place].clone(), lanes[place].clone()
        return taken

    def see_loss(self, layer: str, micro_batch: int, piece: int, loss: Any) -> None:
        """Take a copy of the scaled loss that the last layer gives; its gradient is one, and is not kept."""
        self._parts[BorderTensor(layer, "forward", "output", micro_batch, piece)] = [_copy(loss)]

    def take(self) -> dict[str, Array]:
        """All that was seen since the last call, whole, by key; what had no gradient has no backward tensor."""
        taken = {}
        for name, parts in self._parts.items():
            arrays = [part for part in parts if part is not None]
            if len(arrays) == len(parts):
                taken[name.key] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=self._join_dim)
        self._parts = {}
        return taken


def _keep(gradients: list[Array | None], place: int, gradient: Any) -> None:
    gradients[place] = _copy(gradient)


def _has_gradient(tensor: Any) -> bool:
    return not tensor.stop_gradient if hasattr(tensor, "stop_gradient") else bool(tensor.requires_grad)


def _copy(tensor: Any) -> Array:
    there = tensor.detach().cpu()
    if str(there.dtype) == "torch.bfloat16":
        there = there.float()
    return np.array(there.numpy(), copy=True)
