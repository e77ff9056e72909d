"""The GPT as a list of layers: parameters, their placement over TP, and the collectives they issue.

Written by hand, so that it can be read beside the adapters; ``typed_gpt``
derives the same from the types of the operations, and a rule compares them.

No framework: the shapes, names and orders here are what the adapters must
build and issue, and what the rules reason about.

Shape letters: S sequence, B micro-batch rows, H hidden, A heads, D head size,
M feed-forward size, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pipeproof.specs.layout import INVARIANT, Placement, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize


class CollectiveKind(StrEnum):
    """A collective over one mesh axis."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a layer issues while it computes.

    ``numel`` counts the elements of the tensor that each rank puts in;
    ``reduction`` is ``sum`` or ``max`` (``sum`` for a gather, which reduces nothing).
    """

    kind: CollectiveKind
    axis: str
    numel: int
    label: str
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight: its global shape, how it lies over TP, how it starts.

    ``partial_over`` names the axes over which each rank holds only an addend
    of its gradient after backward: a reduction before the optimizer is owed
    (norm weights under sequence parallelism, and every weight under context
    parallelism, see only their rank's tokens).
    ``init_std`` is None for weights that start as ones.
    """

    name: str
    shape: tuple[int, ...]
    tp: Placement
    partial_over: tuple[str, ...] = ()
    init_std: float | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what it holds and which collectives its forward and backward issue, in order."""

    name: str
    parameters: tuple[Parameter, ...]
    forward_collectives: tuple[Collective, ...] = field(default=())
    backward_collectives: tuple[Collective, ...] = field(default=())


def describe_gpt(plan: PlanSpec, size: MicroBatchSize | None = None) -> tuple[Layer, ...]:
    """The layers of the plan's GPT in execution order: ``embed``, ``layer.0`` .., ``norm``, ``head``.

    The block is pre-norm: RMSNorm, rotary attention, RMSNorm, SwiGLU MLP, no
    biases. Column-parallel weights are cut on their output dim and row-parallel
    ones on their input dim (Megatron-LM, arXiv:1909.08053); with sequence
    parallelism the all-reduces become all-gather / reduce-scatter pairs
    (arXiv:2205.05198). With context parallelism each rank has its part of every
    sequence and gathers the keys and values of all (arXiv:2407.21783, section
    3.3.2). The fused ``qkv`` weight is head-major: for each head
    its q, k and v columns, so that a cut over TP takes whole heads.

    Collectives count the elements of a micro-batch of ``size``, of the plan's
    full one without it.
    """
    return _GptDescriber(plan, size or MicroBatchSize(plan.model.seq_length, plan.schedule.micro_batch_size)).layers()


class _GptDescriber:
    def __init__(self, plan: PlanSpec, size: MicroBatchSize) -> None:
        model, topology = plan.model, plan.topology
        self.num_layers = model.num_layers
        self.hidden, self.ffn, self.vocab = model.hidden_size, model.ffn_size, model.vocab_size
        self.tp, self.cp = topology.tp, topology.cp
        self.sp = topology.sequence_parallel and self.tp > 1
        self.tokens = size.seq_length * size.num_rows // self.cp  # of one context-parallel rank
        self.partial_over = ("cp",) if self.cp > 1 else ()  # every weight sees its rank's tokens only
        self.norm_partial_over = (("tp",) if self.sp else ()) + self.partial_over

    def layers(self) -> tuple[Layer, ...]:
        blocks = [self._block(f"layer.{i}") for i in range(self.num_layers)]
        norm = Layer("norm", (self._norm("norm.weight"),))
        return (self._embed(), *blocks, norm, self._head())

    def _weight(self, name: str, shape: tuple[int, int], shard_dim: int) -> Parameter:
        return Parameter(name, shape, sharded(shard_dim), self.partial_over, init_std=0.02)

    def _norm(self, name: str) -> Parameter:
        return Parameter(name, (self.hidden,), INVARIANT, partial_over=self.norm_partial_over)

    def _full(self, kind: CollectiveKind, label: str) -> Collective:
        """A collective that every rank enters with all tokens of the activation."""
        return Collective(kind, "tp", self.tokens * self.hidden, label)

    def _shard(self, label: str) -> Collective:
        """A gather that every rank enters with its own share of the tokens."""
        numel = self.tokens * self.hidden // self.tp
        return Collective(CollectiveKind.ALL_GATHER, "tp", numel, label)

    def _enter(self, label: str) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """(forward, backward) of the way from between-block layout into a column-parallel weight."""
        if self.tp == 1:
            return (), ()
        if self.sp:
            return (self._shard(label),), (self._full(CollectiveKind.REDUCE_SCATTER, f"{label}.grad"),)
        return (), (self._full(CollectiveKind.ALL_REDUCE, f"{label}.grad"),)

    def _leave(self, label: str) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """(forward, backward) of the way from a row-parallel product back between blocks."""
        if self.tp == 1:
            return (), ()
        if self.sp:
            return (self._full(CollectiveKind.REDUCE_SCATTER, label),), (self._shard(f"{label}.grad"),)
        return (self._full(CollectiveKind.ALL_REDUCE, label),), ()

    def _share_keys(self, label: str) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """(forward, backward) of giving every context-parallel rank the keys and values of the whole sequence."""
        if self.cp == 1:
            return (), ()
        numel = 2 * self.tokens * self.hidden // self.tp
        gather = Collective(CollectiveKind.ALL_GATHER, "cp", numel, label)
        return (gather,), (Collective(CollectiveKind.REDUCE_SCATTER, "cp", numel * self.cp, f"{label}.grad"),)

    def _embed(self) -> Layer:
        forward, backward = self._leave("embed.out")
        weight = self._weight("embed.weight", (self.vocab, self.hidden), 0)
        return Layer("embed", (weight,), forward, backward)

    def _block(self, name: str) -> Layer:
        attn_in, attn_out = self._enter(f"{name}.attn.in"), self._leave(f"{name}.attn.out")
        keys = self._share_keys(f"{name}.attn.kv")
        mlp_in, mlp_out = self._enter(f"{name}.mlp.in"), self._leave(f"{name}.mlp.out")
        parameters = (
            self._norm(f"{name}.attn_norm.weight"),
            self._weight(f"{name}.attn.qkv.weight", (self.hidden, 3 * self.hidden), 1),
            self._weight(f"{name}.attn.out.weight", (self.hidden, self.hidden), 0),
            self._norm(f"{name}.mlp_norm.weight"),
            self._weight(f"{name}.mlp.gate.weight", (self.hidden, self.ffn), 1),
            self._weight(f"{name}.mlp.up.weight", (self.hidden, self.ffn), 1),
            self._weight(f"{name}.mlp.down.weight", (self.ffn, self.hidden), 0),
        )
        forward = attn_in[0] + keys[0] + attn_out[0] + mlp_in[0] + mlp_out[0]
        backward = mlp_out[1] + mlp_in[1] + attn_out[1] + keys[1] + attn_in[1]
        return Layer(name, parameters, forward, backward)

    def _head(self) -> Layer:
        forward, backward = self._enter("head.in")
        if self.tp > 1:  # the vocabulary-parallel cross-entropy: one number per token, three times
            forward += tuple(
                Collective(CollectiveKind.ALL_REDUCE, "tp", self.tokens, label, reduction)
                for label, reduction in (
                    ("head.loss.max", "max"),
                    ("head.loss.sum_exp", "sum"),
                    ("head.loss.target", "sum"),
                )
            )
        weight = self._weight("head.weight", (self.hidden, self.vocab), 1)
        return Layer("head", (weight,), forward, backward)
