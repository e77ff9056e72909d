"""The GPT as a list of layers: parameters, their placement over TP, and their collectives.

This list is written by hand, so that it can be compared with the stages. ``typed_gpt`` derives the same from the types
of the operations, and a rule compares the two.

Shape letters: S sequence, B micro-batch rows, H hidden, A heads, D head size,
M feed-forward size, V vocabulary, T tensor-parallel ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipeproof.specs.axis_layout import INVARIANT, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layers import (
    COUNTS_DTYPE,
    Collective,
    CollectiveKind,
    Layer,
    Parameter,
    layer_order,
    layer_prefix,
    loss_dtype,
)
from pipeproof.stages.describe.mtp_streams import embeds_again, mtp_streams_after, mtp_streams_into
from pipeproof.stages.describe.residual_streams import stream_weights


def describe_gpt(plan: PlanSpec, size: MicroBatchSize | None = None) -> tuple[Layer, ...]:
    """The layers of the plan's GPT in execution order (``layer_order``).

    The block is pre-norm: RMSNorm, rotary attention, RMSNorm, SwiGLU MLP, no biases. Column-parallel weights are
    sharded on their output dim, row-parallel weights on their input dim (Megatron-LM, arXiv:1909.08053). With sequence
    parallelism the all-reduces become all-gather / reduce-scatter pairs (arXiv:2205.05198). With context parallelism
    each rank has its part of every sequence and gathers the keys and values of all (arXiv:2407.21783, section 3.3.2).
    The fused ``qkv`` weight is head-major: for each head of keys and values the columns of its group's q, then of its k
    and v. So TP shards have whole groups.

    Latent attention (arXiv:2405.04434) compresses all tokens on every TP rank or, with sequence parallelism, each
    rank's own tokens. The weights that expand the compressed vectors are sharded by heads.

    A block with experts enters and leaves its MLP as a dense block does. In between, every TP rank routes all tokens.
    EP ranks exchange the number of tokens for each expert. Then each token goes to the ranks of its experts and back,
    by one all-to-all in each direction (arXiv:2006.16668). All experts are assumed to get the same number of tokens, so
    each EP rank sends and receives ``top_k`` times its own tokens.

    A tied head (arXiv:1608.05859) multiplies by the transpose of the embedding's weight, which it borrows.

    MTP modules (arXiv:2412.19437, section 2.2) apply a weight [2H, H] to activations between layers: every TP rank has
    the whole weight and, with sequence parallelism, its own tokens. Embedding, norm and head process all MTP streams
    at once (``mtp_streams``).

    Collectives count the elements of a micro-batch of ``size``, by default the plan's full size.
    """
    return _GptDescriber(plan, size or MicroBatchSize(plan.model.seq_length, plan.schedule.micro_batch_size)).layers()


_Collectives = tuple[tuple[Collective, ...], tuple[Collective, ...]]
"""The collectives of forward, and of backward."""


class _GptDescriber:
    def __init__(self, plan: PlanSpec, size: MicroBatchSize) -> None:
        self.loss_dtype = loss_dtype(plan.run.dtype)
        model, topology = plan.model, plan.topology
        self.model = model
        self.hidden, self.vocab = model.hidden_size, model.vocab_size
        self.tp, self.cp, self.ep = topology.tp, topology.cp, topology.ep
        self.sp = topology.sequence_parallel and self.tp > 1
        self.tokens = size.seq_length * size.num_rows // self.cp  # of one context-parallel rank
        self.partial_over = ("cp",) if self.cp > 1 else ()  # every weight sees its rank's tokens only
        self.between_partial_over = (("tp",) if self.sp else ()) + self.partial_over

    def layers(self) -> tuple[Layer, ...]:
        return tuple(map(self._layer, layer_order(self.model)))

    def _layer(self, name: str) -> Layer:
        match layer_prefix(name):
            case "embed":
                return self._embed()
            case "empty":
                return Layer(name, ())
            case "norm":
                return Layer(name, (self._norm("norm.weight"),))
            case "head":
                return self._head()
            case "mtp":
                return self._module(name)
            case _:
                return self._block(name, has_experts=self.model.has_experts(int(name.rpartition(".")[2])))

    def _weight(self, name: str, shape: tuple[int, int], shard_dim: int) -> Parameter:
        return Parameter(name, shape, sharded(shard_dim), self.partial_over, init_std=0.02)

    def _between_weight(self, name: str, shape: tuple[int, int]) -> Parameter:
        """A weight that all TP ranks have whole and use on activations between layers."""
        return Parameter(name, shape, INVARIANT, self.between_partial_over, init_std=0.02)

    def _norm(self, name: str, size: int | None = None) -> Parameter:
        return Parameter(name, (size or self.hidden,), INVARIANT, partial_over=self.between_partial_over)

    def _full(self, kind: CollectiveKind, size: int, label: str) -> Collective:
        """A collective that every rank enters with all tokens."""
        return Collective(kind, "tp", self.tokens * size, label)

    def _shard(self, size: int, label: str) -> Collective:
        """A gather that every rank enters with its own part of the tokens."""
        return Collective(CollectiveKind.ALL_GATHER, "tp", self.tokens * size // self.tp, label)

    def _enter(self, label: str, size: int | None = None, *, feeds_weights: bool = True) -> _Collectives:
        """Collectives from between blocks into a column-parallel weight, with ``size`` elements per token."""
        size = size or self.hidden
        if self.tp == 1:
            return (), ()
        if self.sp:
            gather = replace(self._shard(size, label), feeds_weights=feeds_weights)
            return (gather,), (self._full(CollectiveKind.REDUCE_SCATTER, size, f"{label}.grad"),)
        return (), (self._full(CollectiveKind.ALL_REDUCE, size, f"{label}.grad"),)

    def _leave(self, label: str, size: int | None = None) -> _Collectives:
        """Collectives from a row-parallel product back between blocks, with ``size`` elements per token."""
        size = size or self.hidden
        if self.tp == 1:
            return (), ()
        if self.sp:
            scatter = self._full(CollectiveKind.REDUCE_SCATTER, size, label)
            return (scatter,), (self._shard(size, f"{label}.grad"),)
        return (self._full(CollectiveKind.ALL_REDUCE, size, label),), ()

    def _share_keys(self, label: str, size: int) -> _Collectives:
        """Collectives that give every context-parallel rank all keys and values of the sequence, ``size`` per token."""
        if self.cp == 1:
            return (), ()
        numel = self.tokens * size
        gather = Collective(CollectiveKind.ALL_GATHER, "cp", numel, label)
        return (gather,), (Collective(CollectiveKind.REDUCE_SCATTER, "cp", numel * self.cp, f"{label}.grad"),)

    def _exchange(self, label: str, top_k: int, dtype: str | None = None, *, back: str | None = None) -> _Collectives:
        """Exchange of tokens with other ranks' experts, in ``dtype``, and of their gradients, in ``back``."""
        if self.ep == 1:
            return (), ()
        numel = self.tokens * top_k * self.hidden
        forward = Collective(CollectiveKind.ALL_TO_ALL, "ep", numel, label, dtype=dtype)
        return (forward,), (replace(forward, label=f"{label}.grad", dtype=back),)

    def _exchange_counts(self, label: str, num_experts: int) -> _Collectives:
        """Exchange of the numbers of tokens for each expert. It has no gradient."""
        if self.ep == 1:
            return (), ()
        kind = CollectiveKind.ALL_TO_ALL
        return (Collective(kind, "ep", num_experts, label, dtype=COUNTS_DTYPE, per_token=False),), ()

    def _embed(self) -> Layer:
        forward, backward = self._leave("embed.out", mtp_streams_after(self.model, ["embed"]) * self.hidden)
        return Layer("embed", (self._embed_weight(),), forward, backward)

    def _embed_weight(self) -> Parameter:
        return self._weight("embed.weight", (self.vocab, self.hidden), 0)

    def _module(self, name: str) -> Layer:
        """An MTP module: two norms, a product that joins them, and a block like the last one."""
        block = self._block(name, has_experts=self.model.has_experts(self.model.num_layers - 1))
        own = (
            self._norm(f"{name}.hidden_norm.weight"),
            self._norm(f"{name}.embed_norm.weight"),
            self._between_weight(f"{name}.proj.weight", (2 * self.hidden, self.hidden)),
        )
        block = replace(block, parameters=(*own, *block.parameters))
        if not embeds_again(self.model):
            return block
        steps = [self._leave(f"{name}.embed.out"), (block.forward_collectives, block.backward_collectives)]
        forward, backward = _joined(steps)
        return replace(
            block, forward_collectives=forward, backward_collectives=backward, borrowed=(self._embed_weight(),)
        )

    def _block(self, name: str, *, has_experts: bool) -> Layer:
        attention = self._attention if self.model.mla is None else self._latent_attention
        mlp = self._experts if has_experts else self._mlp
        parameters, steps = list[Parameter](), list[_Collectives]()
        for describe, part in ((attention, "attn"), (mlp, "mlp")):
            weights, collectives = describe(name)
            parameters += stream_weights(self.model, f"{name}.{part}_streams", self.between_partial_over)
            parameters += [self._norm(f"{name}.{part}_norm.weight"), *weights]
            steps += collectives
        return Layer(name, tuple(parameters), *_joined(steps))

    def _attention(self, name: str) -> tuple[list[Parameter], list[_Collectives]]:
        model = self.model
        queries, keys = model.num_heads * model.size_of_head, model.kv_heads * model.size_of_head
        weights = [
            self._weight(f"{name}.attn.qkv.weight", (self.hidden, queries + 2 * keys), 1),
            self._weight(f"{name}.attn.out.weight", (queries, self.hidden), 0),
        ]
        collectives = [
            self._enter(f"{name}.attn.in"),
            self._share_keys(f"{name}.attn.kv", 2 * keys // self.tp),
            self._leave(f"{name}.attn.out"),
        ]
        return weights, collectives

    def _latent_attention(self, name: str) -> tuple[list[Parameter], list[_Collectives]]:
        mla, heads, prefix = self.model.mla, self.model.num_heads, f"{name}.attn"
        assert mla is not None
        queries = heads * (mla.nope_head_size + mla.rope_head_size)
        keys = heads * (mla.nope_head_size + mla.value_head_size)
        weights, collectives = list[Parameter](), list[_Collectives]()
        if mla.q_rank is None:
            weights.append(self._weight(f"{prefix}.q.weight", (self.hidden, queries), 1))
            collectives.append(self._enter(f"{prefix}.in"))
        else:
            weights += [
                self._between_weight(f"{prefix}.q_down.weight", (self.hidden, mla.q_rank)),
                self._norm(f"{prefix}.q_norm.weight", mla.q_rank),
                self._weight(f"{prefix}.q_up.weight", (mla.q_rank, queries), 1),
            ]
            collectives.append(self._enter(f"{prefix}.q.in", mla.q_rank))
        weights += [
            self._between_weight(f"{prefix}.kv_down.weight", (self.hidden, mla.kv_rank + mla.rope_head_size)),
            self._norm(f"{prefix}.kv_norm.weight", mla.kv_rank),
            self._weight(f"{prefix}.kv_up.weight", (mla.kv_rank, keys), 1),
            self._weight(f"{prefix}.out.weight", (heads * mla.value_head_size, self.hidden), 0),
        ]
        collectives += [
            self._enter(f"{prefix}.kv.in", mla.kv_rank),
            self._enter(f"{prefix}.rope.in", mla.rope_head_size, feeds_weights=False),
            self._share_keys(f"{prefix}.kv", keys // self.tp),
            self._share_keys(f"{prefix}.rope", mla.rope_head_size),
            self._leave(f"{prefix}.out"),
        ]
        return weights, collectives

    def _mlp(self, name: str) -> tuple[list[Parameter], list[_Collectives]]:
        weights = self._swiglu(f"{name}.mlp", self.model.ffn_size)
        return weights, [self._enter(f"{name}.mlp.in"), self._leave(f"{name}.mlp.out")]

    def _experts(self, name: str) -> tuple[list[Parameter], list[_Collectives]]:
        moe, prefix = self.model.moe, f"{name}.mlp"
        assert moe is not None
        over_tp = ("tp",) if self.tp > 1 else ()  # each TP rank has an addend of the experts' gradient of the routing
        experts = [
            Parameter(
                f"{prefix}.experts.{part}.weight",
                (moe.num_experts, *shape),
                sharded(dim),
                self.partial_over,
                0.02,
                sharded(0),
            )
            for part, shape, dim in (
                ("gate", (self.hidden, moe.ffn_size), 2),
                ("up", (self.hidden, moe.ffn_size), 2),
                ("down", (moe.ffn_size, self.hidden), 1),
            )
        ]
        router = Parameter(
            f"{prefix}.router.weight",
            (self.hidden, moe.num_experts),
            INVARIANT,
            over_tp + self.partial_over,
            init_std=0.02,
        )
        shared = (
            self._swiglu(f"{prefix}.shared", moe.num_shared_experts * moe.ffn_size) if moe.num_shared_experts else []
        )
        collectives = [
            self._enter(f"{prefix}.in"),
            self._exchange_counts(f"{prefix}.counts", moe.num_experts),
            self._exchange(f"{prefix}.dispatch", moe.top_k, moe.dispatch_dtype),
            self._exchange(f"{prefix}.combine", moe.top_k, back=moe.dispatch_dtype),
            self._leave(f"{prefix}.out"),
        ]
        return [router, *experts, *shared], collectives

    def _swiglu(self, name: str, ffn_size: int) -> list[Parameter]:
        return [
            self._weight(f"{name}.gate.weight", (self.hidden, ffn_size), 1),
            self._weight(f"{name}.up.weight", (self.hidden, ffn_size), 1),
            self._weight(f"{name}.down.weight", (ffn_size, self.hidden), 0),
        ]

    def _head(self) -> Layer:
        num_streams = mtp_streams_into(self.model, "head")
        forward, backward = self._enter("head.in", num_streams * self.hidden)
        if self.tp > 1:  # the vocabulary-parallel cross-entropy: one number per token, three times
            dtype, numel = self.loss_dtype, num_streams * self.tokens
            forward += tuple(
                Collective(CollectiveKind.ALL_REDUCE, "tp", numel, label, reduction, dtype)
                for label, reduction in (
                    ("head.loss.max", "max"),
                    ("head.loss.sum_exp", "sum"),
                    ("head.loss.target", "sum"),
                )
            )
        if self.model.tied_embedding:  # its transpose: the columns of the logits are the rows of the embedding
            return Layer("head", (), forward, backward, borrowed=(self._embed_weight(),))
        weight = self._weight("head.weight", (self.hidden, self.vocab), 1)
        return Layer("head", (weight,), forward, backward)


def _joined(steps: Iterable[_Collectives]) -> _Collectives:
    """Join steps: in their order for forward, in reverse order for backward."""
    ordered = list(steps)
    return tuple(c for step in ordered for c in step[0]), tuple(c for step in reversed(ordered) for c in step[1])
