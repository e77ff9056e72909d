"""The model's arithmetic without parameters or communication.

Shape letters: S sequence, B rows, K heads of keys and values of this rank, G query heads of each, D head size, Z head
size of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.common.backend_ops import NORM_EPSILON, gated, rotary_angles

Tensor: TypeAlias = torch.Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of losses and of other values that need more than 16 bits: float32 for 16-bit types."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rms_norm(activation: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dim (arXiv:1910.07467), without a weight."""
    return F.rms_norm(activation, (activation.shape[-1],), None, NORM_EPSILON)


def rotary_tables(seq_length: int, head_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), [S, D] each.

    Position p rotates the pair (i, i + D/2) by p * 10000^(-2i/D). The tables are computed in float64, then rounded.
    The sines have the signs that ``rotate`` needs.
    """
    angles = rotary_angles(seq_length, head_size)
    cos, sin = np.tile(np.cos(angles), 2), np.concatenate([-np.sin(angles), np.sin(angles)], axis=1)
    return torch.tensor(cos, dtype=dtype, device=device), torch.tensor(sin, dtype=dtype, device=device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``(a cos - b sin, b cos + a sin)`` for the halves ``(a, b)`` of each head; heads are [.., S, D]."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def causal_attention(query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
    """Causal softmax attention, [B, K, G, S, Z]: a position sees itself and the positions before it.

    ``query`` is [B, K, G, S, D], ``key`` [B, K, S, D] and ``value`` [B, K, S, Z]. With more keys than queries, the
    queries are the last positions. PyTorch chooses the kernel: flash attention (arXiv:2205.14135) on GPUs for 16-bit
    types. The dropout ``factors`` [B, K, G, S, keys] multiply the probabilities, which are then computed explicitly.
    """
    rows, num_kv_heads, group, num_queries, head_size = query.shape
    num_keys = key.shape[-2]
    if factors is not None:
        return _dropped_attention(query, key, value, factors)
    heads = query.reshape(rows, num_kv_heads * group, num_queries, head_size)
    mask = None if num_keys == num_queries else _seen(num_queries, num_keys, query.device)
    mixed = F.scaled_dot_product_attention(
        heads, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1
    )
    return mixed.reshape(rows, num_kv_heads, group, num_queries, -1)


def _dropped_attention(query: Tensor, key: Tensor, value: Tensor, factors: Tensor) -> Tensor:
    scores = torch.matmul(query.contiguous(), key.contiguous().unsqueeze(2).transpose(-2, -1)) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~_seen(query.shape[-2], key.shape[-2], query.device), -torch.inf)
    return torch.matmul(scores.softmax(-1) * factors, value.unsqueeze(2))


def _seen(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Mask [num_queries, num_keys] of the keys that each of the last positions sees."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202). Only the two inputs are kept; backward recomputes the rest."""
    return _SwiGlu.apply(gate, up)


class _SwiGlu(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """SwiGLU with the bits of plain autograd, which would also keep ``silu(gate)``: a sixth of a block's memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = F.silu(gate).mul_(gradient)
        return torch.ops.aten.silu_backward(gradient * up, gate), of_up


def clip(x: Tensor, *, max: float, min: float | None = None) -> Tensor:
    """``torch.clip``, whose gradient at a limit changed with PyTorch 2.14; this one has the gradient from inside."""
    inside = x if min is None else torch.where(x >= min, x, min)
    return torch.where(x <= max, inside, max)


def mlp_activation(model: ModelSpec) -> Callable[..., Tensor]:
    """The activation function of a model's MLPs: SwiGLU of gate and up, or GELU (arXiv:1606.08415) of up."""
    if model.mlp == "swiglu":
        return gated(swiglu, model, clip)
    return partial(F.gelu, approximate="tanh" if model.mlp == "gelu_tanh" else "none")


def fork(activation: Tensor, num_readers: int) -> list[Tensor]:
    """Return one tensor for each reader. Their gradients are added in the order of the readers."""
    return list(_Fork.apply(activation, num_readers))


class _Fork(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, activation: Tensor, num_readers: int) -> tuple[Tensor, ...]:
        return tuple(activation.view_as(activation) for _ in range(num_readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        total, *others = gradients
        for other in others:
            total = total + other
        return total, None


_OF_GROUP = 2
"""The dim of heads [B, K, G + 2, S, D] with the queries, then the key, then the value."""


def rotated_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, K, G + 2, S, D] into query [B, K, G, S, D], key and value [B, K, S, D]; rotate query and key.

    The tables come from ``rotary_tables``, [S, D]. The bits equal ``rotate`` on slices under plain autograd, but with
    fewer passes over memory, which limits the speed on a GPU. The value is copied. Gradients have the memory layout of
    ``heads``.
    """
    query, key, value = _RotatedHeads.apply(heads, cos, sin)
    return query, key, value


class _RotatedHeads(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.like = torch.empty_like(heads, device="meta")
        num_rotated = heads.shape[_OF_GROUP] - 1
        rotated = heads.narrow(_OF_GROUP, 0, num_rotated)
        output = rotated * cos
        half = cos.shape[-1] // 2
        swapped = torch.empty_like(output)
        torch.mul(rotated[..., half:], sin[:, :half], out=swapped[..., :half])
        torch.mul(rotated[..., :half], sin[:, half:], out=swapped[..., half:])
        output.add_(swapped)
        query, key = output.split([num_rotated - 1, 1], dim=_OF_GROUP)
        # A copy: a view of ``heads`` would keep all of it for backward.
        value = heads.select(_OF_GROUP, num_rotated).clone(memory_format=torch.contiguous_format)
        return query, key.squeeze(_OF_GROUP), value

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor, of_value: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        gradients = torch.cat([of_query, of_key.unsqueeze(_OF_GROUP)], dim=_OF_GROUP)
        output = torch.empty_like(ctx.like, device=gradients.device)
        rotated = output.narrow(_OF_GROUP, 0, gradients.shape[_OF_GROUP])
        torch.mul(gradients, cos, out=rotated)
        half = cos.shape[-1] // 2
        swapped = torch.empty_like(gradients)
        torch.mul(gradients[..., half:], sin[:, half:], out=swapped[..., :half])
        torch.mul(gradients[..., :half], sin[:, :half], out=swapped[..., half:])
        rotated.add_(swapped)
        output.select(_OF_GROUP, gradients.shape[_OF_GROUP]).copy_(of_value)
        return output, None, None


ALIGNMENT_BYTES = 16
"""Alignment of the rows of every factor that the kernel needs."""


class Groups:
    """The number of rows of each group, int64 [E] on the device. The host waits for them if it reads ``sizes``."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def ends(self) -> Tensor:
        """The end of each group, int32 [E] on the device."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of rows on the host, which waits for them once."""
        sizes: list[int] = self.counts.tolist()
        return sizes


def even_groups(number: int, rows: Tensor) -> Groups:
    """Groups of equally many rows. The host knows the sizes."""
    size = len(rows) // number
    groups = Groups(torch.full((number,), size, dtype=torch.int64, device=rows.device))
    groups.sizes = [size] * number
    return groups


def is_one_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """True if PyTorch multiplies [N, K] with [E, K, M] in one kernel.

    It does for bfloat16 (``torch.nn.functional.grouped_mm``) and reads the ends of groups on the device, so the host
    does not need the sizes.
    """
    per_row = ALIGNMENT_BYTES // rows.element_size()
    is_aligned = matrices.shape[1] % per_row == 0 and matrices.shape[2] % per_row == 0
    return rows.dtype == torch.bfloat16 and is_aligned and len(rows) > 0 and hasattr(F, "grouped_mm")


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of group e by ``matrices[e]``: [N, K] and [E, K, M] to [N, M]."""
    if is_one_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=groups.ends)
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(groups.sizes), matrices, strict=True)])


def grouped_gradients(inputs: Tensor, outputs: Tensor, groups: Groups) -> Tensor:
    """Gradients of the matrices, [N, K] and [N, M] to [E, K, M], zero for an empty group. Needs ``is_one_kernel``."""
    return F.grouped_mm(inputs.t(), outputs, offs=groups.ends)
