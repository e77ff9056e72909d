"""Functions of a framework that the shared part of a stage calls, and arithmetic that is one code on both frameworks.

Where both frameworks have the same function, the member is that function itself, so a call has no extra cost. In
addition, the shared code uses only features of both frameworks' tensors: arithmetic, slices, ``@``, ``detach``,
``clone``, ``contiguous``, ``reshape``, ``flatten``, ``squeeze``, ``unsqueeze``, ``sigmoid``, ``exp``, ``sum`` over a
dim, ``logsumexp`` and ``shape``.

Shape letters: B rows, K heads of keys and values of this rank, G query heads of each, S sequence, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeproof.specs.compressed_attention import YarnSpec
from pipeproof.specs.model import ModelSpec

Tensor: TypeAlias = Any
Weight: TypeAlias = Any
"""A weight of a layer: a tensor, or a tensor with its own gradient buffer."""


class BackendOps(Protocol):
    """Functions of one framework. Dims may be negative. For most functions the last argument is the dim."""

    def autograd_node(
        self,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor]],
        *inputs: Tensor,
    ) -> Sequence[Tensor]:
        """Run ``forward(*inputs)`` as one node of autograd, which records nothing inside of ``forward``.

        ``backward`` computes the gradients of the inputs from the gradients of the outputs. Every output must be a new
        tensor for autograd: an input that is also an output goes through ``alias``.
        """

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a new tensor with the same values. It may share the memory."""

    def leaf(self, tensor: Tensor) -> Tensor:
        """Return a leaf of autograd with the same memory and its own gradient."""

    def concat(self, tensors: Sequence[Tensor], dim: int, /) -> Tensor:
        """Concatenate along an existing dim."""

    def stack(self, tensors: Sequence[Tensor], dim: int, /) -> Tensor:
        """Stack along a new dim."""

    def chunk(self, tensor: Tensor, number: int, dim: int, /) -> Sequence[Tensor]:
        """Split into ``number`` equal parts."""

    def split(self, tensor: Tensor, sizes: Sequence[int], dim: int, /) -> Sequence[Tensor]:
        """Split into parts of these sizes."""

    def permute(self, tensor: Tensor, dims: Sequence[int], /) -> Tensor:
        """Return the tensor with its dims in this order."""

    def take_rows(self, tensor: Tensor, indices: Tensor, /) -> Tensor:
        """Rows of the tensor by index, along its first dim."""

    def zeros_like(self, tensor: Tensor, /) -> Tensor:
        """Zeros of the tensor's shape and type."""

    def fork(self, tensor: Tensor, num_readers: int, /) -> Sequence[Tensor]:
        """Return one tensor for each reader. Their gradients are added in the order of the readers."""

    def repeat(self, tensor: Tensor, number: int, dim: int, /) -> Tensor:
        """Repeat the tensor ``number`` times along a new dim."""

    def widened(self, tensor: Tensor, /) -> Tensor:
        """Convert 16-bit types to float32, for computations that need more precision."""

    def as_type_of(self, tensor: Tensor, like: Tensor, /) -> Tensor:
        """Convert to the type of ``like``: the inverse of ``widened``."""

    def masked_gain(self, mask: npt.NDArray[Any], gain: float, like: Tensor, /) -> Tensor:
        """``gain`` where the mask (booleans as ``Dropouts`` has them) is true, else 0; type and device of ``like``."""

    def constant(self, values: npt.NDArray[Any], like: Tensor, /) -> Tensor:
        """The values as a tensor without a gradient on the device of ``like``; integers stay, others have its type."""

    def softmax(self, tensor: Tensor, dim: int, /) -> Tensor:
        """Softmax along a dim."""

    def relu(self, tensor: Tensor, /) -> Tensor:
        """The larger of each element and zero."""

    def unchosen(self, scores: Tensor, number: int, /) -> Tensor:
        """0 for the ``number`` largest of the last dim, at equal ones the first, else minus infinity; no gradient."""

    def regather_input(self, tensor: Tensor, gather: Callable[[], Tensor], /) -> None:
        """Do not keep the tensor for products with weights that read it: W gathers its values again."""

    def recompute_in_backward(
        self, compute: Callable[..., Tensor], *inputs: Tensor, after: Callable[[], None] | None = None
    ) -> Tensor:
        """Return ``compute(*inputs)`` and keep only the inputs. Backward computes it again and calls ``after``.

        Source: arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5. ``compute`` must be
        deterministic. Each input is a tensor with a gradient. The gradients have the bits of a direct call.
        """

    def rms_norm(self, activation: Tensor, /) -> Tensor:
        """``x / sqrt(mean(x^2) + eps)`` over the last dim, without a weight."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, /) -> Tensor:
        """The rotary embedding of heads [.., S, D], with tables in the framework's own format."""

    def rotated_heads(self, heads: Tensor, cos: Tensor, sin: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, K, G, S, D] and key [B, K, S, D], rotated, and value [B, K, S, D], of [B, K, G + 2, S, D]."""

    def causal_attention(self, query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
        """Causal attention, [B, K, G, S, D of values]: a position sees itself and the positions before it."""


NORM_EPSILON = 1e-6
ROTARY_BASE = 10000.0
CLAMPED_SWIGLU_ALPHA = 1.702


def rotary_angles(
    seq_length: int, head_size: int, base: float = ROTARY_BASE, scaling: YarnSpec | None = None
) -> npt.NDArray[np.float64]:
    """Angles of the rotary embedding (arXiv:2104.09864), [S, D/2]: position p has p * base^(-2i/D) at i.

    Scaling divides by its factor where i has at most ``beta_slow`` rotations over the original tokens, by less up to
    ``beta_fast``; the limits are rounded outwards to whole i.
    """
    frequencies = base ** (-np.arange(0, head_size, 2) / head_size)
    if scaling is not None:
        tokens, betas = scaling.original_max_position_embeddings, (scaling.beta_fast, scaling.beta_slow)
        at = [head_size / 2 * math.log(tokens / (2 * math.pi * beta), base) for beta in betas]
        first, last = max(math.floor(at[0]), 0), min(math.ceil(at[1]), head_size - 1)
        ramp = np.clip((np.arange(head_size // 2) - first) / (last - first or 0.001), 0.0, 1.0)
        frequencies = frequencies * (1 - ramp) + frequencies / scaling.factor * ramp
    return np.outer(np.arange(seq_length), frequencies)


def clamped_swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    clip: Callable[..., Tensor],
    swiglu: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """``swiglu(g, u)`` with g = min(gate, limit) and u = up clamped to [-limit, limit].

    Without ``swiglu`` it is gpt-oss's function (openai/gpt-oss, ``gpt_oss/torch/model.py``),
    ``g sigmoid(1.702 g) (u + 1)``. The gradient of the framework's ``clip`` is zero beyond a limit; at the limit it is
    the gradient from inside.
    """
    g, u = clip(gate, max=limit), clip(up, min=-limit, max=limit)
    return g * (CLAMPED_SWIGLU_ALPHA * g).sigmoid() * (u + 1.0) if swiglu is None else swiglu(g, u)


def gated(
    swiglu: Callable[[Tensor, Tensor], Tensor], model: ModelSpec, clip: Callable[..., Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The activation function of gate and up, with the model's clamp; ``swiglu`` and ``clip`` are the framework's."""
    limit = model.swiglu_limit
    if limit is None:
        return swiglu
    own = swiglu if model.swiglu_formula == "silu" else None
    return partial(clamped_swiglu, limit=limit, clip=clip, swiglu=own)
