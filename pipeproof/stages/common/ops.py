"""What the shared half of a stage asks of a framework: a table of its own functions, and a few of ours on it.

Members are the framework's functions themselves wherever they agree, so that a
call costs what it would cost there. Beside them, only what tensors of both
frameworks have alike is used: arithmetic, slices, ``@``, ``detach``, ``clone``,
``contiguous``, ``reshape``, ``flatten``, ``squeeze``, ``unsqueeze``, ``sigmoid``,
``exp``, ``logsumexp`` and ``shape``.

Shape letters: B rows, K heads of keys and values of this rank, G query heads of each, S sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

Tensor: TypeAlias = Any
Weight: TypeAlias = Any
"""What layers compute with and the optimizer updates: a tensor, or a tensor with a gradient buffer of its own."""


class Ops(Protocol):
    """The functions of one framework. Dims may be negative; the last argument of most is the dim."""

    def passed(
        self,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor]],
        *inputs: Tensor,
    ) -> Sequence[Tensor]:
        """``forward(*inputs)`` as one node of autograd, which sees neither of the two inside.

        ``backward`` makes the gradients of the inputs from those of what ``forward`` made. What ``forward`` makes is
        new to autograd: an input that it hands on goes through ``alias``.
        """
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """The same values in a tensor of its own, which may share the memory."""
        ...

    def leaf(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that begins a graph, with a gradient of its own."""
        ...

    def concat(self, tensors: Sequence[Tensor], dim: int, /) -> Tensor:
        """One behind the other."""
        ...

    def stack(self, tensors: Sequence[Tensor], dim: int, /) -> Tensor:
        """Side by side along a new dim."""
        ...

    def chunk(self, tensor: Tensor, number: int, dim: int, /) -> Sequence[Tensor]:
        """Equal parts."""
        ...

    def split(self, tensor: Tensor, sizes: Sequence[int], dim: int, /) -> Sequence[Tensor]:
        """Parts of these sizes."""
        ...

    def permuted(self, tensor: Tensor, dims: Sequence[int], /) -> Tensor:
        """With its dims in this order."""
        ...

    def zeros_like(self, tensor: Tensor, /) -> Tensor:
        """Zeros of the shape and type."""
        ...

    def fork(self, tensor: Tensor, num_readers: int, /) -> Sequence[Tensor]:
        """One tensor for each reader; their gradients are added in the order of the readers."""
        ...

    def repeated(self, tensor: Tensor, number: int, dim: int, /) -> Tensor:
        """``number`` times the same along a new dim."""
        ...

    def wide(self, tensor: Tensor, /) -> Tensor:
        """In the type for what is too fine for 16 bits: float32 in place of such a type."""
        ...

    def as_type_of(self, tensor: Tensor, like: Tensor, /) -> Tensor:
        """Back from ``wide``."""
        ...

    def masked_gain(self, kept: npt.NDArray[Any], gain: float, like: Tensor, /) -> Tensor:
        """``gain`` where a boolean of the host is true, else 0, of the type and at the place of ``like``."""
        ...

    def gather_again(self, tensor: Tensor, gather: Callable[[], Tensor], /) -> None:
        """Let products with weights forget the tensor that they read: W gathers its values again."""
        ...

    def computed_again(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``compute(*inputs)``, of which only the inputs are kept; backward computes it again."""
        ...

    def rms_norm(self, activation: Tensor, /) -> Tensor:
        """``x / sqrt(mean(x^2) + eps)`` over the last dim, without a weight."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, /) -> Tensor:
        """The rotary embedding of heads [.., S, D], by tables of the framework's own."""
        ...

    def causal_attention(self, query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
        """Attention [B, K, G, S, D of values] in which a position sees itself and what is before it."""
        ...
