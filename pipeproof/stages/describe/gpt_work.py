"""FLOPs and bytes of the GPT's layers on one rank, operation by operation, for F, I and W.

The layers are those of ``describe_gpt``. The costs of single operations are in ``op_work``.

- Tensor parallelism shards heads, feed-forward and vocabulary. Context parallelism shards tokens, with an even number
  of causal pairs. Sequence parallelism shards norms and additions between blocks (arXiv:2205.05198), and the
  compression of latent attention.
- Each rank has an even part of the visits to experts: as many as its own tokens make. Every expert of the rank is read
  once for all its tokens. Every TP rank routes all tokens. Moving tokens into the order of experts, and back, reads and
  writes each visit.
- Several residual streams: see ``residual_streams``.
- For embedding, final norm and head, MTP streams are more rows.

Shape letters: S sequence, H hidden, A heads, M feed-forward size, V vocabulary.
"""

from __future__ import annotations

from fractions import Fraction

from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import router_losses
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layers import layer_kind
from pipeproof.stages.describe.mtp_streams import embeds_again, mtp_streams_at
from pipeproof.stages.describe.op_work import (
    SOFTMAX,
    SOFTMAX_BACK,
    WEIGHT_GRADIENT_BYTES,
    ComputeUnit,
    Phase,
    RankOperations,
    Work,
)
from pipeproof.stages.describe.residual_streams import BlockStreams, residual_streams_of, work_around, work_at_ends

_SWIGLU, _SWIGLU_BACK = 5, 10
"""FLOPs per element, as in ``op_work``."""
_CLAMPED, _CLAMPED_BACK = 5, 7
"""Additional FLOPs of the clamped SwiGLU: three comparisons, the 1.702 and the 1."""


def layer_work(
    plan: PlanSpec, layer: str, size: MicroBatchSize, item_bytes: int, *, flash: bool = True
) -> tuple[Work, ...]:
    """The operations of ``layer`` on one rank for one work item of ``size``. Sequence splits have mean costs.

    ``layer`` is a name as in ``stages``, ``item_bytes`` the size of an element of weights and activations.
    """
    rank = _RankLayers(plan, size.with_mtp_streams(mtp_streams_at(plan.model, layer)), item_bytes, flash=flash)
    match layer_kind(plan.model, layer):
        case "embed":
            return rank.embed()
        case "empty":
            return ()
        case "norm":
            return rank.norm("norm")
        case "head":
            return rank.head()
        case "mtp":
            return rank.module()
        case kind:
            return rank.block(has_experts=kind.endswith("moe_block"), streams=residual_streams_of(plan.model, layer))


class _RankLayers(RankOperations):
    """The operations of each layer."""

    def module(self) -> tuple[Work, ...]:
        """An MTP module: an MTP stream and an embedding are normed, concatenated and projected; then a block.

        The stream has another reader, so backward adds two gradients.
        """
        model, numel = self.model, self.between * self.hidden
        return (
            *(self.embed() if embeds_again(model) else ()),
            *self.norm("hidden_norm"),
            *self.norm("embed_norm"),
            *self._elementwise("join", 2 * numel, (0, 2), (0, 2)),
            *self._matmul("proj", 2 * self.hidden, self.hidden, rows=self.between),
            Work("mtp.add", Phase.INPUT, ComputeUnit.VECTOR, numel, 3 * self.item * numel),
            *self.block(has_experts=model.has_experts(model.num_layers - 1)),
        )

    def block(self, *, has_experts: bool, streams: BlockStreams | None = None) -> tuple[Work, ...]:
        model = self.model
        return (
            *self.norm("attn_norm"),
            *(self._attention() if model.mla is None else self._latent(model.mla)),
            *(self._flash() if self.flash else self._unfused()),
            *self._matmul("attn.out", self.heads.mixed, self.hidden),
            *self._dropout("attn.dropout", "hidden"),
            *self._residual("attn", streams),
            *self.norm("mlp_norm"),
            *(
                self._experts(model.moe)
                if has_experts and model.moe is not None
                else self._swiglu("mlp", model.ffn_size // self.tp)
            ),
            *self._dropout("mlp.dropout", "hidden"),
            *self._residual("mlp", streams),
            *(self._passes(work_at_ends(streams, self.hidden)) if streams is not None else ()),
        )

    def _attention(self) -> tuple[Work, ...]:
        heads = self.heads
        return (
            *self._matmul("attn.qkv", self.hidden, heads.queries + heads.keys + heads.values),
            *self._rotary(heads.queries + heads.keys),
        )

    def _latent(self, mla: MlaSpec) -> tuple[Work, ...]:
        """Queries, keys and values from compressed vectors; the key of positions once for all heads."""
        expanded = self.num_heads * (mla.nope_head_size + mla.value_head_size)
        if mla.q_rank is None:
            query = self._matmul("attn.q", self.hidden, self.heads.queries)
        else:
            query = (
                *self._matmul("attn.q_down", self.hidden, mla.q_rank, rows=self.between),
                *self.norm("attn.q_norm", mla.q_rank),
                *self._matmul("attn.q_up", mla.q_rank, self.heads.queries),
            )
        return (
            *query,
            *self._matmul("attn.kv_down", self.hidden, mla.kv_rank + mla.rope_head_size, rows=self.between),
            *self.norm("attn.kv_norm", mla.kv_rank),
            *self._matmul("attn.kv_up", mla.kv_rank, expanded),
            *self._rotary((self.num_heads + 1) * mla.rope_head_size),
        )

    def _swiglu(self, name: str, local_ffn: int, *, rows: Fraction | None = None, experts: int = 1) -> tuple[Work, ...]:
        """A SwiGLU MLP, or several that each process a part of the rows."""
        rows = self.tokens if rows is None else rows
        more, more_back = (0, 0) if self.model.swiglu_limit is None else (_CLAMPED, _CLAMPED_BACK)
        return (
            *self._matmul(f"{name}.gate_up", self.hidden, 2 * local_ffn, rows=rows, weights=experts),
            *self._elementwise(f"{name}.swiglu", rows * local_ffn, (_SWIGLU + more, 3), (_SWIGLU_BACK + more_back, 5)),
            *self._matmul(f"{name}.down", local_ffn, self.hidden, rows=rows, weights=experts),
        )

    def _experts(self, moe: MoeSpec) -> tuple[Work, ...]:
        local_ffn, visits = moe.ffn_size // self.tp, moe.top_k * self.tokens
        works = [
            *self._matmul("mlp.router", self.hidden, moe.num_experts, narrow=False),
            *self._elementwise("mlp.scores", self.tokens * moe.num_experts, (SOFTMAX, 2), (SOFTMAX_BACK, 3)),
            *self._balance(moe),
            *self._elementwise("mlp.permute", visits * self.hidden, (0, 2), (1, 2)),
            *self._swiglu("mlp.experts", local_ffn, rows=visits, experts=moe.num_experts // self.ep),
            *self._elementwise("mlp.unpermute", visits * self.hidden, (2, 2), (2, 3)),
        ]
        if moe.num_shared_experts:
            works += self._swiglu("mlp.shared", moe.num_shared_experts * local_ffn)
            works += self._elementwise("mlp.shared.add", self.tokens * self.hidden, (1, 3), (1, 3))
        return tuple(works)

    def _balance(self, moe: MoeSpec) -> tuple[Work, ...]:
        """Router losses, with their gradient in forward; backward only adds it."""
        num = len(router_losses(moe))
        forward = num * (SOFTMAX + SOFTMAX_BACK), num * (2 + 3)
        return self._elementwise("mlp.balance", self.tokens * moe.num_experts, forward, (1, 3)) if num else ()

    def embed(self) -> tuple[Work, ...]:
        rows = self.tokens * self.hidden
        local = rows / self.tp  # of the tokens whose row this rank has
        gradient = self.item * rows + 2 * WEIGHT_GRADIENT_BYTES * local
        return (
            Work("embed", Phase.FORWARD, ComputeUnit.VECTOR, Fraction(0), 2 * self.item * rows),
            Work("embed", Phase.WEIGHT, ComputeUnit.VECTOR, local, gradient),
            *self._dropout("embed.dropout", "embedding"),
        )

    def head(self) -> tuple[Work, ...]:
        logits = self.tokens * self.local_vocab
        return (
            *self._matmul("head", self.hidden, self.local_vocab, narrow=False),
            *self._elementwise("head.loss", logits, (SOFTMAX, 2), (2, 2)),  # read for the maximum, and for the sum
        )

    def _residual(self, name: str, streams: BlockStreams | None) -> tuple[Work, ...]:
        """The residual addition, and in backward the sum of both gradients; or several residual streams."""
        if streams is None:
            return self._elementwise(f"{name}.add", self.between * self.hidden, (1, 3), (1, 3))
        return self._passes(work_around(streams, self.hidden, name))
