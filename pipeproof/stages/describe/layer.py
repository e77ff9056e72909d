"""Layers: names and order, parameters with their placement over TP and EP, and collectives.

This file imports no framework. The stages must build and issue exactly these shapes, names and orders, and the rules
check them. ``gpt`` lists the layers of a plan. The order is the same as in PaddleFleet's GPT; ``stages: layer:REGEX``
matches its class names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from pipeproof.specs.axis_layout import INVARIANT, Placement, dtype_bytes
from pipeproof.specs.compressed_attention import AttentionType
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.memory import RecomputeModule
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec

COUNTS_DTYPE = "int64"
"""Type of the numbers of tokens for each expert."""


def loss_dtype(dtype: str) -> str | None:
    """The type of token losses if it differs from the ``dtype`` of activations: float32 for 16-bit types."""
    return "float32" if dtype_bytes(dtype) == 2 else None


class CollectiveKind(StrEnum):
    """A collective over one mesh axis."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a layer issues while it computes.

    ``numel`` counts the elements of each rank's input tensor. ``reduction`` is ``sum`` or ``max`` (``sum`` for a
    gather, which reduces nothing). ``dtype`` is None for the type of activations. ``per_token`` is true if ``numel`` is
    proportional to the tokens of the micro-batch, ``feeds_weights`` if products with weights read the gathered tensor.
    """

    kind: CollectiveKind
    axis: str
    numel: int
    label: str
    reduction: str = "sum"
    dtype: str | None = None
    per_token: bool = True
    feeds_weights: bool = False

    def item_bytes(self, of_activations: int) -> int:
        """Bytes of an element; an element of activations has ``of_activations`` bytes."""
        return of_activations if self.dtype is None else dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight: its global shape, its placement over TP and EP, and its initial value.

    ``partial_over`` has the axes over which each rank has only an addend of the gradient after backward, and a
    reduction before the optimizer is needed: norm weights with sequence parallelism, and all weights with context
    parallelism, see only the tokens of their rank; a router's weights see one part of each expert. Over ``dp`` and
    ``ep`` every gradient is a sum, except for weights sharded over ``ep``: an expert gets the tokens of all EP ranks.
    ``init_std`` is None for weights that start as ``init_value`` everywhere.
    """

    name: str
    shape: tuple[int, ...]
    tp: Placement
    partial_over: tuple[str, ...] = ()
    init_std: float | None = None
    ep: Placement = INVARIANT
    init_value: float = 1.0

    @property
    def sharded_over(self) -> tuple[str, ...]:
        """The axes whose ranks have different elements."""
        return tuple(axis for axis, placement in (("tp", self.tp), ("ep", self.ep)) if placement.dim is not None)

    def local_shape(self, num_ranks: Mapping[str, int]) -> tuple[int, ...]:
        """The shape on one rank; ``num_ranks`` has the sizes of the axes by name.

        Raises:
            ValueError: a sharded dim does not divide by the ranks of its axis.
        """
        return self.ep.local_shape(self.tp.local_shape(self.shape, num_ranks["tp"]), num_ranks["ep"])


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its parameters, and the collectives of its forward and backward, in order.

    ``borrowed`` are weights of an earlier layer that it also uses. A rank without that layer has a copy, and the
    gradients of all copies are added.
    """

    name: str
    parameters: tuple[Parameter, ...]
    forward_collectives: tuple[Collective, ...] = field(default=())
    backward_collectives: tuple[Collective, ...] = field(default=())
    borrowed: tuple[Parameter, ...] = field(default=())


def is_block(name: str) -> bool:
    """True for a transformer block, and for an MTP module, which contains one."""
    return name.startswith(("layer.", "mtp."))


def attention_of(model: ModelSpec, name: str) -> AttentionType | None:
    """The compressed attention of a block or MTP module by its name; None for other attention, and other layers."""
    if not is_block(name):
        return None
    return model.attention_type(int(name.removeprefix("layer.")) if name.startswith("layer.") else -1)


def backward_calls(plan: PlanSpec, layer: Layer) -> tuple[Collective, ...]:
    """Collectives of a layer's backward, including recomputed forwards."""
    prefix = f"{layer.name}."
    return with_recomputed(plan, layer.name, layer.forward_collectives, layer.backward_collectives, prefix)


def with_recomputed(
    plan: PlanSpec, name: str, forward: Sequence[Collective], backward: Sequence[Collective], prefix: str = ""
) -> tuple[Collective, ...]:
    """The collectives of a backward of the layer ``name``, including collectives of recomputed forwards.

    With full recomputation the collectives of a block's forward come first. A module's collectives come right before
    the first collective of its own backward. Labels begin with ``prefix``.
    """
    if plan.memory.recompute == "none" or not is_block(name):
        return tuple(backward)
    if plan.memory.recompute == "full":
        return (*forward, *backward)
    calls = list(backward)
    for module in modules_of_block(plan, name):
        again = [call for call in forward if is_in_modules((module,), call.label.removeprefix(prefix))]
        if again:
            operations = [call.label.removeprefix(prefix).removesuffix(".grad") for call in calls]
            first = next(i for i, operation in enumerate(operations) if is_in_modules((module,), operation))
            calls[first:first] = again
    return tuple(calls)


def weight_calls(plan: PlanSpec, layer: Layer) -> tuple[Collective, ...]:
    """Gathers in W for a layer's weight gradients, with ``memory.sequence_parallel_activations: regather``."""
    if plan.memory.sequence_parallel_activations != "regather":
        return ()
    read = (c for c in reversed(layer.forward_collectives) if c.feeds_weights)
    return tuple(replace(c, label=f"{c.label}.again", feeds_weights=False) for c in read)


def layer_kind(model: ModelSpec | CustomModelSpec, name: str) -> str:
    """The kind of a layer: ``embed``, ``empty``, ``block``, ``moe_block``, ``mtp``, ``norm`` or ``head``.

    Layers of one kind are equal. A block whose experts a table chooses is a ``hash_moe_block``. With hyper-connections
    the first and the last block have their own kinds (``first_moe_block``, ``last_block``), and so has each type of
    compressed attention (``sliding_attention_block``).
    """
    if isinstance(model, CustomModelSpec):  # each layer is its own kind
        return name
    if not name.startswith("layer."):
        return layer_prefix(name)
    number = int(name.removeprefix("layer."))
    kind = "moe_block" if model.has_experts(number) else "block"
    kind = f"hash_{kind}" if model.routes_by_token(number) else kind
    attention = model.attention_type(number)
    if attention is not None:
        kind = f"{attention}_{kind}"
    if model.hyper_connections is None:
        return kind
    ends = {"first_": number == 0, "last_": number == model.num_layers - 1}
    return "".join(end for end, is_end in ends.items() if is_end) + kind


def users_of_shared(stages: Sequence[Sequence[Layer]]) -> Mapping[str, tuple[int, ...]]:
    """The stages that use each borrowed weight, in order, by weight name; ``stages`` has their layers."""
    borrowed = {weight.name for layers in stages for layer in layers for weight in layer.borrowed}
    users: dict[str, list[int]] = {}
    for stage, layers in enumerate(stages if borrowed else ()):
        used = {weight.name for layer in layers for weight in (*layer.parameters, *layer.borrowed)}
        for name in sorted(used & borrowed):
            users.setdefault(name, []).append(stage)
    return {name: tuple(used) for name, used in users.items()}


CLASS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "GPTEmbedding",
        "empty": "EmptyLayer",
        "layer": "TransformerLayer",
        "mtp": "MultiTokenPredictionLayer",
        "norm": "WrappedPaddleNormPipe",
        "head": "GPTLMHead",
    }
)
"""PaddleFleet's class of a layer, by the prefix of the layer's name."""


def layer_order(model: ModelSpec) -> tuple[str, ...]:
    """The names of all layers: ``embed``, empty layers, ``layer.0`` .., then norm and empty layers, and ``head``.

    Empty layers are numbered over head and tail. ``model.final_norm`` is the position of the norm: before or after the
    empty layers of the tail. MTP modules (``mtp.0`` ..) directly follow the blocks: they read activations before the
    norm, and the norm also applies to their outputs. If they read activations after the norm, they directly follow it.
    """
    num_head, num_tail = model.num_empty
    empties = [f"empty.{i}" for i in range(num_head + num_tail)]
    head, tail = empties[:num_head], empties[num_head:]
    modules = [f"mtp.{i}" for i in range(0 if model.mtp is None else model.mtp.num_modules)]
    first, norm = ([], ["norm", *modules]) if reads_normed(model) else (modules, ["norm"])
    end = [*norm, *tail] if model.final_norm == "before_tail_empty" else [*tail, *norm]
    return ("embed", *head, *(f"layer.{i}" for i in range(model.num_layers)), *first, *end, "head")


def reads_normed(model: ModelSpec) -> bool:
    """True if MTP modules read activations after the final norm."""
    return model.mtp is not None and model.mtp.reads == "after_norm"


def ends_normed(model: ModelSpec) -> bool:
    """True if MTP modules have norms of their own at their ends."""
    return model.mtp is not None and model.mtp.reads != "before_norm"


def layer_prefix(name: str) -> str:
    """The name of a layer without its number: ``layer`` for ``layer.3``."""
    return name.partition(".")[0]


def is_empty(name: str) -> bool:
    """True for a layer that returns its input."""
    return layer_prefix(name) == "empty"


def counts_in_even_cut(name: str) -> bool:
    """True if the even partition counts the layer: blocks, and empty layers, which replace blocks."""
    return layer_prefix(name) in ("layer", "empty")


# Exchanges: the collectives between the parts of a computation, and the overlap points among them. A computation that
# alternates with another one is cut at each of its collectives. Collectives that it issues together are one exchange:
# the gathers of the router's outputs and of the tokens, and the sums of their gradients. An exchange of tokens over
# ``ep`` is an *overlap point*: while it is under way, the other computation runs. The exchange of counts is not an
# overlap point. The host reads its result before it can send tokens, so the overlap point behind it is *late*: it is
# issued after the other computation has launched its next part.


class Exchange(NamedTuple):
    """Number of collectives that are issued together, whether this is an overlap point, and how late."""

    num_collectives: int
    is_overlap_point: bool
    is_late: bool = False


def exchanges(collectives: Sequence[Collective]) -> tuple[Exchange, ...]:
    """The exchanges of a computation with these collectives, in order."""
    result: list[Exchange] = []
    for position, collective in enumerate(collectives):
        if position and _goes_with(collectives[position - 1], collective):
            result[-1] = result[-1]._replace(num_collectives=result[-1].num_collectives + 1)
        else:
            is_overlap_point = collective.axis == "ep" and collective.per_token
            is_late = is_overlap_point and position > 0 and _announces(collectives[position - 1])
            result.append(Exchange(1, is_overlap_point, is_late))
    return tuple(result)


def _announces(collective: Collective) -> bool:
    return collective.kind is CollectiveKind.ALL_TO_ALL and not collective.per_token


def _goes_with(first: Collective, second: Collective) -> bool:
    """True for two of the all-gather dispatcher; a combine is of the other kind than the dispatch before and after."""
    together = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return first.axis == second.axis == "ep" and first.kind == second.kind and first.kind in together


# Modules of a block that ``memory.recompute: selective`` computes again, by the names of their operations.
#
# They are Megatron-LM's (``recompute_modules`` of its ``TransformerConfig``, commit d98e8a6). ``core_attn``, ``mlp``,
# ``moe`` and ``shared_experts`` store their inputs and nothing inside. ``moe_act``, ``layernorm`` and ``mla_up_proj``
# store their inputs and not their outputs, which are computed again before the operations that read them.


WHOLE_MLP: tuple[RecomputeModule, ...] = ("mlp", "moe")
"""Modules that exclude each other in a block: an MLP, or a router with its experts."""

_MLP, _BEHIND_MLP = "mlp.", ("mlp.add", "mlp.dropout")
_SHARED = ("mlp.shared.gate_up", "mlp.shared.swiglu", "mlp.shared.down")

_OPERATIONS: Mapping[RecomputeModule, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("attn.core",),
        "moe_act": ("mlp.experts.swiglu",),
        "layernorm": ("attn_norm", "mlp_norm"),
        "mla_up_proj": ("attn.in", "attn.q", "attn.q.in", "attn.q_up", "attn.kv.in", "attn.kv_up", "attn.rotary"),
        "shared_experts": _SHARED,
    }
)
"""Operations of a module, with the collectives into them."""

_NOT_STORED: Mapping[RecomputeModule, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("attn.core", "attn.core_out"),
        "moe_act": ("mlp.experts.down",),
        "layernorm": (
            "attn_norm.factor", "attn.qkv", "attn.q", "attn.q_down", "attn.kv_down",
            "mlp_norm.factor", "mlp.gate_up", "mlp.up", "mlp.router", "mlp.hash_router",
            "mlp.shared.gate_up",
        ),
        "mla_up_proj": ("attn.qkv_out",),
        "shared_experts": _SHARED,
    }
)  # fmt: skip
"""Activations by the operation that stores them: of an output, the product that reads it."""


def modules_of_block(plan: PlanSpec, name: str) -> tuple[RecomputeModule, ...]:
    """The modules of ``memory.recompute_modules`` that the block or MTP module ``name`` has."""
    model = plan.gpt
    number = int(name.removeprefix("layer.")) if name.startswith("layer.") else model.num_layers - 1
    other = "mlp" if model.moe is not None and model.has_experts(number) else "moe"
    return tuple(module for module in plan.memory.recompute_modules if module != other)


def is_in_modules(modules: Iterable[RecomputeModule], operation: str) -> bool:
    """True if an operation, or the collective of that name, is part of one of these modules."""
    return any(
        operation.startswith(_MLP) and operation not in _BEHIND_MLP
        if module in WHOLE_MLP
        else operation in _OPERATIONS[module]
        for module in modules
    )


def is_not_stored(modules: Iterable[RecomputeModule], activation: str) -> bool:
    """True if these modules leave an activation of the forward to the backward."""
    return any(
        is_in_modules((module,), activation) if module in WHOLE_MLP else activation in _NOT_STORED[module]
        for module in modules
    )
