"""The plan's GPT as typed programs, one for each kind of layer: what ``describe_gpt`` lists by hand, derived.

Dims: ``s`` sequence, ``b`` micro-batch rows, ``h`` hidden, ``v`` vocabulary,
``c`` = ``a`` heads x ``e`` (q, k and v of a head), ``d`` head size, ``w`` = k
and v of a head, ``g`` = ``a`` x ``d``, ``f`` feed-forward, ``t`` the sequence
as keys and values lie along it.

Over ``tp`` activations between layers are invariant, or with sequence
parallelism cut along ``s``; over ``cp`` they are always cut along ``s``.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.derive_types import TypedLayer, derive_types
from pipeproof.stages.describe.typed_ops import ProgramBuilder


def typed_gpt(plan: PlanSpec, size: MicroBatchSize | None = None) -> Mapping[str, TypedLayer]:
    """The derived types of ``embed``, ``block``, ``norm`` and ``head``; every transformer layer is a ``block``.

    Names inside are without the layer's own (``attn.qkv.weight``). Axes: ``tp``, ``cp``; those over which ranks have
    micro-batches of their own (``dp``, ``ep``) are not in it. ``size`` is that
    of the micro-batch, the plan's full one without it.
    """
    writer = _GptWriter(plan, size or MicroBatchSize(plan.model.seq_length, plan.schedule.micro_batch_size))
    programs = (writer.embed(), writer.block(), writer.norm(), writer.head())
    return {program.name: derive_types(program) for program in (builder.build() for builder in programs)}


def kind_of_layer(name: str) -> str:
    """The typed program of the layer that the description names so."""
    return name if name in ("embed", "norm", "head") else "block"


class _GptWriter:
    def __init__(self, plan: PlanSpec, size: MicroBatchSize) -> None:
        model, topology = plan.model, plan.topology
        self._mesh = {"tp": topology.tp, "cp": topology.cp}
        self._sp = topology.sequence_parallel
        head_size = model.hidden_size // model.num_heads
        self._sizes = {
            "s": size.seq_length,
            "t": size.seq_length,
            "b": size.num_rows,
            "h": model.hidden_size,
            "v": model.vocab_size,
            "f": model.ffn_size,
            "c": 3 * model.hidden_size,
            "a": model.num_heads,
            "e": 3 * head_size,
            "d": head_size,
            "w": 2 * head_size,
            "g": model.hidden_size,
        }
        self._between = {"tp": "S(s)" if self._sp else "I", "cp": "S(s)"}

    def embed(self) -> ProgramBuilder:
        """Vocabulary-parallel embedding."""
        p = self._program("embed")
        p.constant("tokens", "s b", cp="S(s)")
        p.parameter("weight", "v h", tp="S(v)")
        p.pick("rows", "weight", "tokens", over="v")
        p.result(self._leave(p, "out", "rows"), **self._between)
        return p

    def block(self) -> ProgramBuilder:
        """Attention and feed-forward, each with its norm before and its residual around."""
        p = self._program("block")
        p.input("x", "s b h", **self._between)
        self._norm(p, "attn_norm", "x")
        middle = p.add("middle", "x", self._attention(p, "attn_norm"))
        self._norm(p, "mlp_norm", middle)
        p.result(p.add("y", middle, self._mlp(p, "mlp_norm")), **self._between)
        return p

    def norm(self) -> ProgramBuilder:
        """The last norm."""
        p = self._program("norm")
        p.input("x", "s b h", **self._between)
        p.parameter("weight", "h")
        p.result(p.apply("y", "x", "weight", along="h"), **self._between)
        return p

    def head(self) -> ProgramBuilder:
        """Logits, and the vocabulary-parallel cross-entropy of each token."""
        p = self._program("head")
        p.input("x", "s b h", **self._between)
        p.constant("labels", "s b", cp="S(s)")
        p.parameter("weight", "h v", tp="S(v)")
        p.multiply("logits", self._enter(p, "in", "x"), "weight", over="h")
        p.all_reduce("loss.max", p.maximum("highest", "logits", over="v"), "tp", reduction="max")
        p.add("shifted", "logits", "loss.max")
        p.multiply("partial.sum_exp", p.apply("exp", "shifted"), over="v")
        p.all_reduce("loss.sum_exp", "partial.sum_exp", "tp")
        p.pick("partial.target", "shifted", "labels", over="v")
        p.all_reduce("loss.target", "partial.target", "tp")
        p.add("token_loss", p.apply("log", "loss.sum_exp"), "loss.target")
        p.result(p.multiply("loss", "token_loss", over="s b"), cp="P")
        return p

    def _program(self, name: str) -> ProgramBuilder:
        return ProgramBuilder(name, self._mesh, self._sizes)

    def _enter(self, p: ProgramBuilder, name: str, x: str) -> str:
        """Into column-parallel weights: all tokens on every TP rank."""
        return p.all_gather(name, x, "tp") if self._sp else p.relabel(name, x, "tp")

    def _leave(self, p: ProgramBuilder, name: str, x: str) -> str:
        """From addends back to what lies between layers."""
        return p.reduce_scatter(name, x, "tp", "s") if self._sp else p.all_reduce(name, x, "tp")

    def _norm(self, p: ProgramBuilder, name: str, x: str) -> str:
        p.parameter(f"{name}.weight", "h")
        return p.apply(name, x, f"{name}.weight", along="h")

    def _attention(self, p: ProgramBuilder, x: str) -> str:
        p.constant("positions", "s", cp="S(s)")
        p.parameter("attn.qkv.weight", "h c", tp="S(c)")
        p.parameter("attn.out.weight", "g h", tp="S(g)")
        p.multiply("fused", self._enter(p, "attn.in", x), "attn.qkv.weight", over="h")
        p.split("heads", "fused", "c", "a e")
        p.apply("query", p.select("plain_query", "heads", "e", "d"), "positions", along="d")
        p.apply("own_kv", p.select("plain_kv", "heads", "e", "w"), "positions", along="w")
        p.select("kv", p.all_gather("attn.kv", "own_kv", "cp"), "s", "t")  # a query looks at the whole sequence
        p.apply("mixed", "query", "kv", along="d", drop="t w")
        p.multiply("attn.addends", p.merge("attention", "mixed", "a d", "g"), "attn.out.weight", over="g")
        return self._leave(p, "attn.out", "attn.addends")

    def _mlp(self, p: ProgramBuilder, x: str) -> str:
        p.parameter("mlp.gate.weight", "h f", tp="S(f)")
        p.parameter("mlp.up.weight", "h f", tp="S(f)")
        p.parameter("mlp.down.weight", "f h", tp="S(f)")
        entered = self._enter(p, "mlp.in", x)
        p.apply("gate", p.multiply("plain_gate", entered, "mlp.gate.weight", over="h"))
        p.multiply("up", entered, "mlp.up.weight", over="h")
        p.multiply("mlp.addends", p.multiply("inner", "gate", "up"), "mlp.down.weight", over="f")
        return self._leave(p, "mlp.out", "mlp.addends")
