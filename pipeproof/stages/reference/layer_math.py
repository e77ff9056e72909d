"""Arithmetic of layers on one tensor, and masks of dropout, for the references on Paddle.

The tensor is a shard with the shards of weights, or a whole activation with whole weights. Sums over shards, sequence
splits and micro-batches are not here.

Shape letters: S sequence, B rows, K heads of keys and values, G query heads of each, D head size; of latent attention A
heads, N and R elements of a head's query without and with positions, Z of its value. [..] is [S, B] or [B, S], as in
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import paddle
import paddle.nn.functional as F

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.synthetic import dropout_gain
from pipeproof.stages.reference.sharded_tensors import Copies
from pipeproof.stages.reference.shared_math import Choice, Dropout, rotary_angles


class DropoutRng(Dropout):
    """Dropout on Paddle."""

    def _gains(self, mask: Choice, rate: float, like: Tensor) -> Tensor:
        dtype = str(like.dtype).removeprefix("paddle.")
        return paddle.to_tensor(mask.astype(dtype) * np.asarray(dropout_gain(rate), dtype=dtype))


Tensor: TypeAlias = paddle.Tensor
Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries [B, K, G, S, D], keys [B, K, S, D] and values [B, K, S, Z]."""


def gated(gate: Tensor, up: Tensor, model: ModelSpec) -> Tensor:
    """SwiGLU; with a limit both factors are clamped, and the gradient is zero beyond the limit."""
    if model.swiglu_limit is None:
        return F.silu(gate) * up
    bound = paddle.full_like(gate, model.swiglu_limit)
    gate = paddle.where(gate <= bound, gate, bound)
    up = paddle.where(up <= bound, paddle.where(up >= -bound, up, -bound), bound)
    if model.swiglu_formula == "silu":
        return F.silu(gate) * up
    return gate * F.sigmoid(gate * 1.702) * (1.0 + up)


class LayerMath:
    """The arithmetic of the plan's GPT. ``weight_of`` returns the weight, or its shard, of a name.

    ``begin`` is the position in the sequence of a tensor's first token.
    """

    def __init__(self, plan: PlanSpec) -> None:
        self._model = plan.gpt
        self._sequence_first = plan.gpt.activation_order == "sbh"
        self._to_heads = [1, 2, 0, 3] if self._sequence_first else [0, 2, 1, 3]
        angles = rotary_angles(plan)
        self._cos = paddle.to_tensor(np.cos(angles), dtype=plan.run.dtype)
        self._sin = paddle.to_tensor(np.sin(angles), dtype=plan.run.dtype)

    def placed(self, x: Tensor, weight_of: Callable[[str], Tensor], begin: int = 0) -> Tensor:
        """Embedded tokens [.., H] with the learned vectors of their positions, if the model has them."""
        if self._model.positions == "rotary":
            return x
        end = begin + x.shape[0 if self._sequence_first else 1]
        return x + weight_of("embed.positions.weight")[begin:end].unsqueeze(1 if self._sequence_first else 0)

    def rotary(self, heads: Tensor, begin: int = 0) -> Tensor:
        """Rotate each pair (i, i + D/2) of a head by the angle of its position, unless positions are learned."""
        if self._model.positions == "learned":
            return heads
        a, b = heads.split(2, axis=-1)
        cos, sin = (table[begin : begin + heads.shape[-2]] for table in (self._cos, self._sin))
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def norm_names(self, name: str) -> list[str]:
        """The weight of an RMSNorm, or the weight and the bias of a LayerNorm."""
        return [f"{name}.{end}" for end in (("weight",) if self._model.norm == "rms" else ("weight", "bias"))]

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dim, or with a bias LayerNorm."""
        # A copy: x then feeds two operations and not three, because autograd does not guarantee the order in which it
        # adds three gradients.
        x = paddle.assign(x)
        if bias is not None:
            x = x - x.mean(axis=-1, keepdim=True)
        y = x * paddle.rsqrt(paddle.square(x).mean(axis=-1, keepdim=True) + 1e-6) * weight
        return y if bias is None else y + bias

    def grouped_heads(self, qkv: Tensor, name: str, weight_of: Callable[[str], Tensor], begin: int = 0) -> Heads:
        """The heads of fused queries, keys and values [.., K (G + 2) D] of the attention ``name``."""
        group, size = self._model.num_heads // self._model.kv_heads, self._model.size_of_head
        if self._model.qk_norm:
            parts = qkv.reshape([*qkv.shape[:2], -1, group + 2, size]).split([group, 1, 1], axis=3)
            for number, norm in enumerate((f"{name}.q_head_norm", f"{name}.k_head_norm")):
                parts[number] = self.normed(parts[number], *map(weight_of, self.norm_names(norm)))
            qkv = paddle.concat(parts, axis=3)
        heads = qkv.reshape([*qkv.shape[:2], -1, (group + 2) * size]).transpose(self._to_heads)
        q, k, v = heads.split([group * size, size, size], axis=-1)  # k, v [B, K, S, D], q [B, K, S, G * D]
        groups = q.reshape([*k.shape[:3], -1, size]).transpose([0, 1, 3, 2, 4])
        return self.rotary(groups, begin), self.rotary(k, begin), v

    def latent_heads(self, q: Tensor, kv: Tensor, shared: Tensor, begin: int = 0) -> Heads:
        """The heads of queries [.., A (N + R)], keys without positions and values [.., A (N + Z)], and keys [.., R].

        K is A and G is 1. All heads share the part of the key with positions; its gradient adds the heads' gradients in
        order.
        """
        mla = self._model.mla
        assert mla is not None
        nope, rope, value = mla.nope_head_size, mla.rope_head_size, mla.value_head_size
        q = q.reshape([*q.shape[:2], -1, nope + rope]).transpose(self._to_heads)
        kv = kv.reshape([*kv.shape[:2], -1, nope + value]).transpose(self._to_heads)
        (q_nope, q_rope), (k_nope, v) = q.split([nope, rope], axis=-1), kv.split([nope, value], axis=-1)
        rotated = self.rotary(shared.transpose([1, 0, 2]) if self._sequence_first else shared, begin)
        k_rope = paddle.stack(list(Copies.apply(rotated, v.shape[1])), axis=1)
        query = paddle.concat([q_nope, self.rotary(q_rope, begin)], axis=-1)
        return query.unsqueeze(2), paddle.concat([k_nope, k_rope], axis=-1), v

    @property
    def mlp_inputs(self) -> Sequence[str]:
        """The products whose results ``mlp_inner`` takes."""
        return ("gate", "up") if self._model.mlp == "swiglu" else ("up",)

    def mlp_inner(self, *factors: Tensor) -> Tensor:
        """SwiGLU of gate and up, or GELU of up."""
        if self._model.mlp == "swiglu":
            gate, up = factors
            return gated(gate, up, self._model)
        return F.gelu(*factors, approximate=self._model.mlp == "gelu_tanh")
