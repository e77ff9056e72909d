"""FLOPs and bytes of the GPT's layers on one rank, operation by operation, for F, I and W.

The layers are those of ``describe_gpt``; what an operation costs is in ``operations``.

- Rank for rank, tensor parallelism cuts heads, feed-forward and vocabulary,
  context parallelism tokens, evenly in causal pairs too; sequence parallelism
  cuts norms and additions between blocks (arXiv:2205.05198), and what latent
  attention compresses there.
- Of a token's visits to experts, each rank has its even share: as many as its
  own tokens make. Every expert of the rank is read once for all its tokens.
  Routing is done on every TP rank for all tokens; moving tokens into the order
  of experts, and back, reads and writes each visit.
- Several residual streams, where there are: ``stream_costs``.
- Embedding, last norm and head compute on the lanes of multi-token prediction
  as on so many times the rows.

Shape letters: S sequence, H hidden, A heads, M feed-forward size, V vocabulary.
"""

from __future__ import annotations

from fractions import Fraction

from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import router_losses
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.lanes import embeds_again, lanes_at
from pipeproof.stages.describe.layers import layer_kind
from pipeproof.stages.describe.operations import (
    SOFTMAX,
    SOFTMAX_BACK,
    WEIGHT_GRADIENT_BYTES,
    Phase,
    RankOperations,
    Unit,
    Work,
)
from pipeproof.stages.describe.stream_costs import work_around, work_at_ends
from pipeproof.stages.describe.streams import BlockStreams, streams_of

_SWIGLU, _SWIGLU_BACK = 5, 10
"""FLOPs per element, as in ``operations``."""
_CLAMPED, _CLAMPED_BACK = 5, 7
"""What the clamped SwiGLU has besides: three comparisons, the 1.702 and the 1."""


def layer_work(
    plan: PlanSpec, layer: str, size: MicroBatchSize, item_bytes: int, *, flash: bool = True
) -> tuple[Work, ...]:
    """The operations of ``layer`` on one rank for one unit of work of ``size``; any split is the mean one.

    ``layer`` is a name as ``stages`` has it, ``item_bytes`` the size of an
    element of weights and activations.
    """
    rank = _RankLayers(plan, size.of_lanes(lanes_at(plan.model, layer)), item_bytes, flash=flash)
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
            return rank.block(has_experts=kind.endswith("moe_block"), streams=streams_of(plan.model, layer))


class _RankLayers(RankOperations):
    """What operations each layer has."""

    def module(self) -> tuple[Work, ...]:
        """Multi-token prediction: a lane and an embedding normed, put side by side and joined, and a block.

        The lane has another reader: going back, two gradients are added.
        """
        model, numel = self.model, self.between * self.hidden
        return (
            *(self.embed() if embeds_again(model) else ()),
            *self.norm("hidden_norm"),
            *self.norm("embed_norm"),
            *self._elementwise("join", 2 * numel, (0, 2), (0, 2)),
            *self._matmul("proj", 2 * self.hidden, self.hidden, rows=self.between),
            Work("lane.add", Phase.INPUT, Unit.VECTOR, numel, 3 * self.item * numel),
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

    def _swiglu(self, name: str, own_ffn: int, *, rows: Fraction | None = None, experts: int = 1) -> tuple[Work, ...]:
        """A SwiGLU MLP, or several of them that share out the rows."""
        rows = self.tokens if rows is None else rows
        more, more_back = (0, 0) if self.model.swiglu_limit is None else (_CLAMPED, _CLAMPED_BACK)
        return (
            *self._matmul(f"{name}.gate_up", self.hidden, 2 * own_ffn, rows=rows, weights=experts),
            *self._elementwise(f"{name}.swiglu", rows * own_ffn, (_SWIGLU + more, 3), (_SWIGLU_BACK + more_back, 5)),
            *self._matmul(f"{name}.down", own_ffn, self.hidden, rows=rows, weights=experts),
        )

    def _experts(self, moe: MoeSpec) -> tuple[Work, ...]:
        own_ffn, visits = moe.ffn_size // self.tp, moe.top_k * self.tokens
        works = [
            *self._matmul("mlp.router", self.hidden, moe.num_experts, narrow=False),
            *self._elementwise("mlp.scores", self.tokens * moe.num_experts, (SOFTMAX, 2), (SOFTMAX_BACK, 3)),
            *self._balance(moe),
            *self._elementwise("mlp.permute", visits * self.hidden, (0, 2), (1, 2)),
            *self._swiglu("mlp.experts", own_ffn, rows=visits, experts=moe.num_experts // self.ep),
            *self._elementwise("mlp.unpermute", visits * self.hidden, (2, 2), (2, 3)),
        ]
        if moe.num_shared_experts:
            works += self._swiglu("mlp.shared", moe.num_shared_experts * own_ffn)
            works += self._elementwise("mlp.shared.add", self.tokens * self.hidden, (1, 3), (1, 3))
        return tuple(works)

    def _balance(self, moe: MoeSpec) -> tuple[Work, ...]:
        """Losses of the router, with their gradient at once; the way back only adds it."""
        num = len(router_losses(moe))
        forward = num * (SOFTMAX + SOFTMAX_BACK), num * (2 + 3)
        return self._elementwise("mlp.balance", self.tokens * moe.num_experts, forward, (1, 3)) if num else ()

    def embed(self) -> tuple[Work, ...]:
        rows = self.tokens * self.hidden
        own = rows / self.tp  # of the tokens whose row this rank has
        gradient = self.item * rows + 2 * WEIGHT_GRADIENT_BYTES * own
        return (
            Work("embed", Phase.FORWARD, Unit.VECTOR, Fraction(0), 2 * self.item * rows),
            Work("embed", Phase.WEIGHT, Unit.VECTOR, own, gradient),
            *self._dropout("embed.dropout", "embedding"),
        )

    def head(self) -> tuple[Work, ...]:
        logits = self.tokens * self.own_vocab
        return (
            *self._matmul("head", self.hidden, self.own_vocab, narrow=False),
            *self._elementwise("head.loss", logits, (SOFTMAX, 2), (2, 2)),  # read for the maximum, and for the sum
        )

    def _residual(self, name: str, streams: BlockStreams | None) -> tuple[Work, ...]:
        """The sum with what goes around the layer; going back, the sum of both gradients. Or several streams."""
        if streams is None:
            return self._elementwise(f"{name}.add", self.between * self.hidden, (1, 3), (1, 3))
        return self._passes(work_around(streams, self.hidden, name))
