"""The plan's GPT as typed programs, one for each kind of layer, from which the list of ``describe_gpt`` is derived.

Dims: ``s`` sequence, ``b`` micro-batch rows of all ``ep`` ranks, ``h`` hidden, ``v`` vocabulary, ``place`` the
positions of a whole sequence, ``c`` = ``a`` heads of keys and values x ``e`` (q, k and v of a head's group), ``d`` q
of a group, ``w`` = k and v of a head, ``head`` the size of a head, ``g`` = ``a`` x ``d``, ``f`` feed-forward, ``t``
the sequence of keys and values. Residual streams: ``p`` the streams, ``p_to`` the written streams, ``p_all`` =
``p_to`` x ``p``, ``p_gates`` the numbers that gate and mix them, ``p_three`` the scales of these numbers. The methods
explain the dims of latent attention and of experts.

Over ``tp`` activations between layers are invariant or, with sequence parallelism, cut along ``s``. Over ``cp`` they
are always cut along ``s``. Over ``ep`` ranks have different micro-batches, which is a cut along ``b``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.plan_sections import TopologySpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.derive_types import TypedLayer, derive_types
from pipeproof.stages.describe.layer import COUNTS_DTYPE, layer_kind, loss_dtype
from pipeproof.stages.describe.layers.layer_operations import BlockStreams, residual_streams_of
from pipeproof.stages.describe.mtp_streams import embeds_again, mtp_streams_after, mtp_streams_into
from pipeproof.stages.describe.typed_ops import ProgramBuilder


def typed_gpt(plan: PlanSpec, size: MicroBatchSize | None = None) -> Mapping[str, TypedLayer]:
    """The derived types of every kind of layer in the plan's model, by ``layer_kind``.

    Names are without the layer's name (``attn.qkv.weight``); names of borrowed weights are whole. Axes: ``tp``, ``cp``
    and ``ep``, but not ``dp``, over which only gradients are exchanged. ``size`` is the size of the micro-batch, by
    default the plan's full size.
    """
    model = plan.gpt
    writer = _GptWriter(plan, size or MicroBatchSize(model.seq_length, plan.schedule.micro_batch_size))
    blocks = {layer_kind(model, name): name for name in (f"layer.{i}" for i in range(model.num_layers))}
    empty = (writer.empty(),) if any(model.num_empty) else ()
    inner = [writer.block(kind, name) for kind, name in blocks.items()]
    modules = (writer.module(),) if model.mtp is not None else ()
    programs = (writer.embed(), *empty, *inner, *modules, writer.norm(), writer.head())
    return {program.name: derive_types(program) for program in (builder.build() for builder in programs)}


class _GptWriter:
    def __init__(self, plan: PlanSpec, size: MicroBatchSize) -> None:
        self._model, topology = plan.gpt, plan.topology
        self._loss_dtype = loss_dtype(plan.run.dtype)
        self._mesh = {"tp": topology.tp, "cp": topology.cp, "ep": topology.ep}
        self._sp = topology.sequence_parallel
        self._expert_axis = "tp" if topology.experts_over_tp else "ep"
        self._sizes = {
            "s": size.seq_length,
            "t": size.seq_length,
            "b": size.num_rows * topology.ep,
            "h": self._model.hidden_size,
            "v": self._model.vocab_size,
            "f": self._model.ffn_size,
            "place": self._model.seq_length,
            **_attention_sizes(self._model, size.seq_length),
            **_expert_sizes(self._model, topology, size.seq_length),
            **stream_sizes(self._model),
            "two": 2,
            "o_module": self._model.hidden_size,
        }
        self._ends_normed = self._model.mtp is not None and self._model.mtp.reads != "before_norm"
        self._between = {"tp": "S(s)" if self._sp else "I", "cp": "S(s)", "ep": "S(b)"}

    def embed(self) -> ProgramBuilder:
        """Vocabulary-parallel embedding."""
        p = self._program("embed", mtp_streams_after(self._model, ["embed"]))
        p.constant("tokens", "s b", cp="S(s)", ep="S(b)")
        p.parameter("weight", "v h", tp="S(v)")
        x = self._leave(p, "out", p.pick("rows", "weight", "tokens", over="v"))
        if self._model.positions == "learned":
            p.parameter("positions.weight", "place h")
            places = p.constant("places", "s b", **self._between)
            x = p.add("placed", x, p.pick("positions", "positions.weight", places, over="place"))
        p.result(x, **self._between)
        return p

    def empty(self) -> ProgramBuilder:
        """A layer that returns its input."""
        p = self._program("empty")
        p.result(p.input("x", "s b h", **self._between), **self._between)
        return p

    def block(self, kind: str, name: str) -> ProgramBuilder:
        """Attention and feed-forward, each with its norm and residual."""
        p, streams = self._program(kind), residual_streams_of(self._model, name)
        is_widened = streams is not None and not streams.expands
        x = p.input("x", "s b p h" if is_widened else "s b h", **self._between)
        sub_layers = self._sub_layers(kind, int(name.removeprefix("layer.")))
        p.result(residual_block(p, streams, sub_layers, x), **self._between)
        return p

    def _sub_layers(self, kind: str, block: int) -> Sequence[tuple[str, str, SubLayer]]:
        attention = self._attention if self._model.mla is None else self._latent_attention
        spec, attends = self._model.compressed_attention, self._model.attention_type(block)
        if spec is not None and attends is not None:
            # Plans without it need not load its types.
            from pipeproof.stages.describe.typed_compressed_attention import typed_compressed_attention

            enter, leave = self._enter, self._leave
            attention = partial(typed_compressed_attention, spec=spec, kind=attends, enter=enter, leave=leave)
        mlp = partial(self._experts, kind=kind) if kind.endswith("moe_block") else self._mlp
        return (
            ("attn", "middle", lambda p, x: attention(p, self._norm(p, "attn_norm", x, "h"))),
            ("mlp", "y", lambda p, x: mlp(p, self._norm(p, "mlp_norm", x, "h"))),
        )

    def module(self) -> ProgramBuilder:
        """An MTP module: an MTP stream and an embedding, normed and joined (dim ``two``), then a block.

        Or each residual stream and the embedding, normed and multiplied, are added.
        """
        p, reads_streams = self._program("mtp"), self._model.modules_read_streams
        p.input("hidden", "s b p h" if reads_streams else "s b h", **self._between)
        if embeds_again(self._model):
            p.constant("tokens", "s b", cp="S(s)", ep="S(b)")
            p.parameter("embed.weight", "v h", tp="S(v)")
            embedding = self._leave(p, "embed.out", p.pick("rows", "embed.weight", "tokens", over="v"))
        else:
            embedding = p.input("embedding", "s b h", **self._between)
        if reads_streams:
            for name, read in (("hidden", "hidden"), ("embed", embedding)):
                normed = self._norm(p, f"{name}_norm", read, "h")
                p.multiply(f"{name}_proj", normed, p.parameter(f"{name}_proj.weight", "h o_module"), over="h")
            p.multiply("embedded", "embed_proj", p.constant("each", "p"))
            x = p.select("x", p.add("joined", "hidden_proj", "embedded"), "o_module", "h")
            p.result(
                p.multiply("main", "hidden", _factors_at_end(p, "hidden", "main_streams"), over="p"), **self._between
            )
        else:
            for name, read in (("hidden_norm", "hidden"), ("embed_norm", embedding)):
                p.multiply(f"{name}.place", self._norm(p, name, read, "h"), p.constant(f"{name}.half", "two"))
            p.parameter("proj.weight", "two h o_module")
            joined = p.add("joined", "hidden_norm.place", "embed_norm.place")
            x = p.select("x", p.multiply("proj", joined, "proj.weight", over="two h"), "o_module", "h")
        last = self._model.num_layers - 1
        kind = "moe_block" if self._model.has_experts(last) else "block"
        y = residual_block(p, residual_streams_of(self._model, "mtp.0"), self._sub_layers(kind, -1), x)
        p.result(self._norm(p, "norm", y, "h") if self._ends_normed else y, **self._between)
        return p

    def norm(self) -> ProgramBuilder:
        """The final norm."""
        p = self._program("norm", 1 if self._ends_normed else mtp_streams_into(self._model, "norm"))
        p.input("x", "s b h", **self._between)
        p.result(p.apply("y", "x", *self._norm_weights(p, "", "h"), along="h"), **self._between)
        return p

    def head(self) -> ProgramBuilder:
        """Logits, and the vocabulary-parallel cross-entropy of each token."""
        p = self._program("head", mtp_streams_into(self._model, "head"))
        p.input("x", "s b h", **self._between)
        p.constant("labels", "s b", cp="S(s)", ep="S(b)")
        weight, dims = ("embed.weight", "v h") if self._model.tied_embedding else ("weight", "h v")
        p.parameter(weight, dims, tp="S(v)")
        p.multiply("logits", self._enter(p, "in", "x"), weight, over="h")
        p.all_reduce(
            "loss.max", p.maximum("highest", "logits", over="v"), "tp", reduction="max", dtype=self._loss_dtype
        )
        p.add("shifted", "logits", "loss.max")
        p.multiply("partial.sum_exp", p.apply("exp", "shifted"), over="v")
        p.all_reduce("loss.sum_exp", "partial.sum_exp", "tp", dtype=self._loss_dtype)
        p.pick("partial.target", "shifted", "labels", over="v")
        p.all_reduce("loss.target", "partial.target", "tp", dtype=self._loss_dtype)
        p.add("token_loss", p.apply("log", "loss.sum_exp"), "loss.target")
        p.result(p.multiply("loss", "token_loss", over="s b"), cp="P", ep="P")
        return p

    def _program(self, name: str, num_streams: int = 1) -> ProgramBuilder:
        """A program with the rows of ``num_streams`` MTP streams."""
        return ProgramBuilder(name, self._mesh, {**self._sizes, "b": num_streams * self._sizes["b"]})

    def _enter(self, p: ProgramBuilder, name: str, x: str) -> str:
        """Enter column-parallel weights: all tokens on every TP rank."""
        return p.all_gather(name, x, "tp") if self._sp else p.relabel(name, x, "tp")

    def _leave(self, p: ProgramBuilder, name: str, x: str) -> str:
        """Reduce addends to the activation between layers."""
        return p.reduce_scatter(name, x, "tp", "s") if self._sp else p.all_reduce(name, x, "tp")

    def _norm_weights(self, p: ProgramBuilder, prefix: str, dim: str) -> list[str]:
        ends = ("weight", "bias") if self._model.norm == "layer" else ("weight",)
        return [p.parameter(f"{prefix}{end}", dim) for end in ends]

    def _norm(self, p: ProgramBuilder, name: str, x: str, dim: str) -> str:
        return p.apply(name, x, *self._norm_weights(p, f"{name}.", dim), along=dim)

    def _attention(self, p: ProgramBuilder, x: str) -> str:
        p.parameter("attn.qkv.weight", "h c", tp="S(c)")
        p.parameter("attn.out.weight", "g h", tp="S(g)")
        fused = p.multiply("fused", self._enter(p, "attn.in", x), "attn.qkv.weight", over="h")
        if self._model.biases != "none":
            fused = p.add("fused.biased", fused, p.parameter("attn.qkv.bias", "c", tp="S(c)"))
        p.split("heads", fused, "c", "a e")
        query = self._placed_head(p, "q", p.select("plain_query", "heads", "e", "d"), "d")
        key_value = self._placed_head(p, "k", p.select("plain_kv", "heads", "e", "w"), "w")
        p.select("kv", p.all_gather("attn.kv", key_value, "cp"), "s", "t")  # a query sees the whole sequence
        p.apply("mixed", query, "kv", along="d", drop="t w")
        p.multiply("attn.addends", p.merge("attention", "mixed", "a d", "g"), "attn.out.weight", over="g")
        return self._leave_biased(p, "attn.out", "attn.addends")

    def _placed_head(self, p: ProgramBuilder, name: str, x: str, dim: str) -> str:
        """The queries of a group, or key and value (which changes neither), with norm and rotation of each head."""
        if self._model.qk_norm:
            norm = f"attn.{name}_head_norm"
            x = p.apply(norm, x, *self._norm_weights(p, f"{norm}.", "head"), along=dim, drop="head")
        if self._model.positions == "rotary":
            x = p.apply(f"{name}.rotated", x, p.constant(f"{name}.positions", "s", cp="S(s)"), along=dim)
        return x

    def _leave_biased(self, p: ProgramBuilder, name: str, x: str) -> str:
        """``_leave``, and then once the bias."""
        x = self._leave(p, name, x)
        return p.add(f"{name}.biased", x, p.parameter(f"{name}.bias", "h")) if self._model.biases == "all" else x

    def _latent_attention(self, p: ProgramBuilder, x: str) -> str:
        """Latent attention. For each of ``a`` heads: ``q`` query, ``z`` value, ``w`` key without positions and value.

        ``r`` is the key with positions, which all heads share. ``lq`` and ``lk`` are the compressed sizes, ``j`` =
        ``lk`` + ``r``.
        """
        p.constant("positions", "s", cp="S(s)")
        self._latent_query(p, x)
        p.parameter("attn.kv_down.weight", "h j")
        p.multiply("kv_down", x, "attn.kv_down.weight", over="h")
        self._norm(p, "attn.kv_norm", p.select("plain_latent", "kv_down", "j", "lk"), "lk")
        p.parameter("attn.kv_up.weight", "lk c", tp="S(c)")
        p.multiply("kv_up", self._enter(p, "attn.kv.in", "attn.kv_norm"), "attn.kv_up.weight", over="lk")
        shared = self._enter(p, "attn.rope.in", p.select("plain_rope", "kv_down", "j", "r"))
        p.apply("own_rope", shared, "positions", along="r")
        p.select("kv", p.all_gather("attn.kv", p.split("own_kv", "kv_up", "c", "a w"), "cp"), "s", "t")
        p.select("rope", p.all_gather("attn.rope", "own_rope", "cp"), "s", "t")
        p.select("mixed", p.apply("mixed_heads", "query", "kv", "rope", along="q", drop="t r w"), "q", "z")
        p.parameter("attn.out.weight", "g h", tp="S(g)")
        p.multiply("attn.addends", p.merge("attention", "mixed", "a z", "g"), "attn.out.weight", over="g")
        return self._leave(p, "attn.out", "attn.addends")

    def _latent_query(self, p: ProgramBuilder, x: str) -> None:
        mla = self._model.mla
        if mla is not None and mla.q_rank is not None:
            p.parameter("attn.q_down.weight", "h lq")
            self._norm(p, "attn.q_norm", p.multiply("q_down", x, "attn.q_down.weight", over="h"), "lq")
            p.parameter("attn.q_up.weight", "lq o", tp="S(o)")
            p.multiply("q_up", self._enter(p, "attn.q.in", "attn.q_norm"), "attn.q_up.weight", over="lq")
        else:
            p.parameter("attn.q.weight", "h o", tp="S(o)")
            p.multiply("q_up", self._enter(p, "attn.in", x), "attn.q.weight", over="h")
        p.apply("query", p.split("plain_query", "q_up", "o", "a q"), "positions", along="q")

    def _mlp(self, p: ProgramBuilder, x: str) -> str:
        entered = self._enter(p, "mlp.in", x)
        addends = self._swiglu if self._model.mlp == "swiglu" else self._gelu
        x = self._leave(p, "mlp.out", addends(p, "mlp", entered, "f"))
        return p.add("mlp.biased", x, p.parameter("mlp.down.bias", "h")) if self._model.biases == "all" else x

    def _widened(self, p: ProgramBuilder, name: str, entered: str, f: str) -> str:
        """The product that makes the inner dim ``f`` of an MLP, with its bias."""
        p.parameter(f"{name}.weight", f"h {f}", tp=f"S({f})")
        x = p.multiply(f"{name}.product", entered, f"{name}.weight", over="h")
        has_bias = self._model.biases == "all"
        return p.add(f"{name}.biased", x, p.parameter(f"{name}.bias", f, tp=f"S({f})")) if has_bias else x

    def _gelu(self, p: ProgramBuilder, name: str, entered: str, f: str) -> str:
        inner = p.apply(f"{name}.inner", self._widened(p, f"{name}.up", entered, f))
        return p.multiply(f"{name}.addends", inner, p.parameter(f"{name}.down.weight", f"{f} h", tp=f"S({f})"), over=f)

    def _swiglu(self, p: ProgramBuilder, name: str, entered: str, f: str) -> str:
        """A SwiGLU MLP with the inner dim ``f``. Each TP rank has an addend of its result."""
        gate = p.apply(f"{name}.gate", self._widened(p, f"{name}.gate", entered, f))
        inner = p.multiply(f"{name}.inner", gate, self._widened(p, f"{name}.up", entered, f))
        return p.multiply(f"{name}.addends", inner, p.parameter(f"{name}.down.weight", f"{f} h", tp=f"S({f})"), over=f)

    def _experts(self, p: ProgramBuilder, x: str, *, kind: str) -> str:
        """``n`` experts = ``x`` EP or TP ranks x ``y`` each, with the inner dim ``m``; ``k`` experts per token.

        ``u`` tokens of a row go to the experts of one rank.
        """
        entered, moe = self._enter(p, "mlp.in", x), self._model.moe
        router, chosen = "mlp.router.weight", ""
        if kind.endswith("hash_moe_block"):  # a table knows the experts of each token id
            router, chosen = "mlp.hash_router.weight", p.constant("top.ids", "s b k", cp="S(s)", ep="S(b)")
        p.parameter(router, "h n")
        logits = p.multiply("logits", entered, router, over="h")
        if self._expert_axis == "tp":  # each rank has all tokens
            routed = self._own_experts(p, *self._slots(p, entered, logits, chosen))
        elif moe is not None and moe.dispatcher == "all_gather":
            routed = self._gathered_experts(p, entered, logits)
        else:
            routed = self._visited_experts(p, entered, logits, chosen)
        if "m_shared" in self._sizes:
            routed = p.add("mlp.addends", routed, self._swiglu(p, "mlp.shared", entered, "m_shared"))
        return self._leave(p, "mlp.out", routed)

    def _visited_experts(self, p: ProgramBuilder, entered: str, logits: str, chosen: str) -> str:
        """Tokens go to the ranks of their experts and back. ``chosen`` are the experts if scores do not choose them.

        The ranks first exchange the numbers of tokens for each expert: each of ``x_from`` x ``c_from`` ranks over
        ``ep`` and ``cp`` has its own counts.
        """
        sent_as = None if self._model.moe is None else self._model.moe.dispatch_dtype
        weights, slots = self._slots(p, entered, logits, chosen)
        counts = p.constant("counts", "x y x_from c_from", cp="S(c_from)", ep="S(x_from)")
        p.all_to_all("mlp.counts", counts, "ep", "x", dtype=COUNTS_DTYPE)
        results = self._expert_mlp(p, p.all_to_all("mlp.dispatch", slots, "ep", "x", dtype=sent_as))
        p.all_to_all("mlp.combine", results, "ep", "b", grad_dtype=sent_as)
        gains = p.multiply("gains", weights, over="k")
        return p.combine("routed", "mlp.combine", "top.ids", gains, slot_dims="x u", dim="s")

    def _gathered_experts(self, p: ProgramBuilder, entered: str, logits: str) -> str:
        """Every rank has the tokens of all, and an addend of the result, from its own experts."""
        p.all_gather("mlp.route", logits, "ep")
        self._own_experts(p, *self._slots(p, p.all_gather("mlp.tokens", entered, "ep"), "mlp.route"))
        return p.reduce_scatter("mlp.sum", "routed", "ep", "b")

    def _own_experts(self, p: ProgramBuilder, weights: str, slots: str) -> str:
        """The results of a rank's own experts for the tokens of all slots: an addend."""
        results = self._expert_mlp(p, p.cut("own.slots", slots, self._expert_axis, "x"))
        gains = p.multiply("gains", weights, over="k")
        return p.combine("routed", results, "top.ids", gains, slot_dims="x u", dim="s")

    def _slots(self, p: ProgramBuilder, tokens: str, logits: str, chosen: str = "") -> tuple[str, str]:
        """The routing weights of tokens, and the tokens in the slots of their experts."""
        p.apply("scores", logits, along="n")
        weights = p.select("top.scores", "scores", "n", "k")
        chosen = chosen or p.detach("top.ids", weights)
        return weights, p.dispatch("slots", tokens, chosen, dim="s", into="x u")

    def _expert_mlp(self, p: ProgramBuilder, slots: str) -> str:
        """Each slot through its expert; a rank has the slots of its own experts."""
        tp, ep = ("S(x)", "I") if self._expert_axis == "tp" else ("S(m)", "S(x)")
        p.constant("slot.expert", "x u b", cp="S(u)", **{self._expert_axis: "S(x)"})
        for name, dims in (("gate", "x y h m"), ("up", "x y h m"), ("down", "x y m h")):
            p.parameter(f"mlp.experts.{name}.weight", dims, tp=tp, ep=ep)
            p.pick(f"slot.{name}", f"mlp.experts.{name}.weight", "slot.expert", over="y")
        p.apply("expert.gate", p.multiply("plain.gate", slots, "slot.gate", over="h"))
        p.multiply("expert.inner", "expert.gate", p.multiply("expert.up", slots, "slot.up", over="h"))
        return p.multiply("expert.addends", "expert.inner", "slot.down", over="m")


def _attention_sizes(model: ModelSpec, seq_length: int) -> Mapping[str, int]:
    if model.compressed_attention is not None:
        from pipeproof.stages.describe.typed_compressed_attention import compressed_sizes

        return compressed_sizes(model, model.compressed_attention, seq_length)
    return _head_sizes(model) if model.mla is None else _latent_sizes(model)


def _head_sizes(model: ModelSpec) -> Mapping[str, int]:
    head, group = model.size_of_head, model.num_heads // model.kv_heads
    per_group = (group + 2) * head
    return {
        "a": model.kv_heads,
        "c": model.kv_heads * per_group,
        "e": per_group,
        "d": group * head,
        "head": head,
        "w": 2 * head,
        "g": model.num_heads * head,
    }


def _latent_sizes(model: ModelSpec) -> Mapping[str, int]:
    mla, heads = model.mla, model.num_heads
    assert mla is not None
    query, keys = mla.nope_head_size + mla.rope_head_size, mla.nope_head_size + mla.value_head_size
    return {
        "a": heads,
        "q": query,
        "r": mla.rope_head_size,
        "z": mla.value_head_size,
        "w": keys,
        "o": heads * query,
        "c": heads * keys,
        "g": heads * mla.value_head_size,
        "lk": mla.kv_rank,
        "j": mla.kv_rank + mla.rope_head_size,
        "lq": mla.q_rank or 0,
    }


def _expert_sizes(model: ModelSpec, topology: TopologySpec, seq_length: int) -> Mapping[str, int]:
    moe, ep = model.moe, topology.ep
    over = topology.tp if topology.experts_over_tp else ep
    if moe is None:
        return {}
    shared = {"m_shared": moe.num_shared_experts * moe.ffn_size} if moe.num_shared_experts else {}
    return {
        "n": moe.num_experts,
        "x": over,
        "x_from": ep,
        "c_from": topology.cp,
        "y": moe.num_experts // over,
        "k": moe.top_k,
        "u": seq_length * moe.top_k // over,
        "m": moe.ffn_size,
        **shared,
    }


SubLayer = Callable[[ProgramBuilder, str], str]
"""Add a sub-layer to a program after its input, and return the name of its output."""


def stream_sizes(model: ModelSpec) -> Mapping[str, int]:
    """The sizes of the dims of residual streams; none for a single residual."""
    spec, count = model.hyper_connections, model.num_streams
    if spec is None:
        return {}
    return {"p": count, "p_to": count, "p_all": count * count, "p_gates": spec.num_gates, "p_three": 3, "p_one": 1}


def residual_block(
    p: ProgramBuilder, streams: BlockStreams | None, sub_layers: Sequence[tuple[str, str, SubLayer]], x: str
) -> str:
    """A block of sub-layers on the value ``x``, each with its residual: (name, name of the result, sub-layer)."""
    if streams is None:
        for _, made, write in sub_layers:
            x = p.add(made, x, write(p, x))
        return x
    if streams.expands:
        x = p.multiply("streams", x, p.constant("each", "p"))
    for name, made, write in sub_layers:
        x = _around(p, name, x, write, f"{made}.streams" if streams.contracts else made, streams)
    if streams.contracts:
        factors = [_factors_at_end(p, x, "out_streams")] if streams.has_gate_at_end else []
        x = p.multiply(sub_layers[-1][1], x, *factors, over="p")
    return x


def _factors_at_end(p: ProgramBuilder, x: str, at: str) -> str:
    """The learned factors with which streams are added, from the weights below ``at``."""
    p.parameter(f"{at}.weight", "p h p_to")
    p.parameter(f"{at}.scale", "p_one")
    p.parameter(f"{at}.bias", "p_to")
    p.multiply(f"{at}.plain", p.apply(f"{at}.normed", x, along="p h"), f"{at}.weight", over="p h")
    gates = p.apply(f"{at}.gates", f"{at}.plain", f"{at}.scale", f"{at}.bias", along="p_to", drop="p_one")
    return p.select(f"{at}.factors", gates, "p_to", "p")


def _around(p: ProgramBuilder, name: str, x: str, write: SubLayer, made: str, streams: BlockStreams) -> str:
    """The streams ``x`` after one sub-layer, under the name ``made``."""
    at, matrix = f"{name}_streams", "p p_to" if streams.spec.transposed else "p_to p"
    p.parameter(f"{at}.weight", "p h p_gates")
    p.parameter(f"{at}.scale", "p_three")
    p.parameter(f"{at}.bias", "p_gates")
    p.multiply(f"{at}.plain", p.apply(f"{at}.normed", x, along="p h"), f"{at}.weight", over="p h")
    gates = p.apply(f"{at}.gates", f"{at}.plain", f"{at}.scale", f"{at}.bias", along="p_gates", drop="p_three")
    p.select(f"{at}.pre", gates, "p_gates", "p")
    p.select(f"{at}.post", gates, "p_gates", "p_to")
    p.split(f"{at}.matrix", p.select(f"{at}.plain_res", gates, "p_gates", "p_all"), "p_all", matrix)
    p.apply(f"{at}.res", f"{at}.matrix", along="p_to p")
    read = p.multiply(f"{at}.read", f"{at}.pre", x, over="p")
    p.multiply(f"{at}.mixed", f"{at}.res", x, over="p")
    p.multiply(f"{at}.written", f"{at}.post", write(p, read))
    return p.select(made, p.add(f"{at}.sum", f"{at}.mixed", f"{at}.written"), "p_to", "p")
