"""What a layer is: its parameters, their placement over TP and EP, and the collectives that it issues.

No framework: the shapes, names and orders here are what the adapters must
build and issue, and what the rules reason about. ``gpt`` lists the layers of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.layout import INVARIANT, Placement
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.own_layers import LayersSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.order import first_word

COUNTS_DTYPE = "int64"
"""Of how many tokens go to each expert."""


def loss_dtype(dtype: str) -> str | None:
    """The type in which token losses are computed, where that is not ``dtype`` of activations: 16 bits are widened."""
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

    ``numel`` counts the elements of the tensor that each rank puts in;
    ``reduction`` is ``sum`` or ``max`` (``sum`` for a gather, which reduces nothing).
    ``dtype`` is None for that of activations. ``per_token`` says that ``numel``
    goes with the tokens of the micro-batch, ``feeds_weights`` that products
    with weights read what is gathered.
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
        """Bytes of an element, where one of activations has ``of_activations``."""
        return of_activations if self.dtype is None else dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight: its global shape, how it lies over TP and EP, how it starts.

    ``partial_over`` names the axes over which each rank holds only an addend
    of its gradient after backward: a reduction before the optimizer is owed
    (norm weights under sequence parallelism, and every weight under context
    parallelism, see only their rank's tokens; a router's see one part of each
    expert). Over ``dp`` and ``ep`` every gradient is a sum, but for that of a
    weight which is cut over ``ep``: an expert gets the tokens of all EP ranks.
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
        """The axes whose ranks hold different elements."""
        return tuple(axis for axis, placed in (("tp", self.tp), ("ep", self.ep)) if placed.dim is not None)

    def local_shape(self, num_ranks: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that one rank holds, with the sizes of the axes by name.

        Raises:
            ValueError: a cut dim does not divide by the ranks of its axis.
        """
        return self.ep.local_shape(self.tp.local_shape(self.shape, num_ranks["tp"]), num_ranks["ep"])


@dataclass(frozen=True, slots=True)
class Buffer:
    """What training changes in a layer beside its weights: each data-parallel replica for itself, and none sums it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what it holds and which collectives its forward and backward issue, in order.

    ``borrowed`` are weights of an earlier layer that it computes with, too: a
    rank that does not hold that layer has a copy, and the gradients of all
    copies are one sum.
    """

    name: str
    parameters: tuple[Parameter, ...]
    forward_collectives: tuple[Collective, ...] = field(default=())
    backward_collectives: tuple[Collective, ...] = field(default=())
    borrowed: tuple[Parameter, ...] = field(default=())
    buffers: tuple[Buffer, ...] = field(default=())


def is_block(name: str) -> bool:
    """Whether a layer is a transformer block, or a module of multi-token prediction, which has one inside."""
    return name.startswith(("layer.", "mtp."))


def backward_calls(plan: PlanSpec, layer: Layer) -> tuple[Collective, ...]:
    """What a layer's backward issues: where all of a block is computed again, first what its forward issued."""
    again = layer.forward_collectives if plan.memory.recompute == "full" and is_block(layer.name) else ()
    return again + layer.backward_collectives


def weight_calls(plan: PlanSpec, layer: Layer) -> tuple[Collective, ...]:
    """What the gradients of a layer's weights need: with ``gathered: again`` their inputs, gathered once more."""
    if plan.memory.gathered != "again":
        return ()
    read = (c for c in reversed(layer.forward_collectives) if c.feeds_weights)
    return tuple(replace(c, label=f"{c.label}.again", feeds_weights=False) for c in read)


def layer_kind(model: ModelSpec | LayersSpec, name: str) -> str:
    """Layers of one kind are alike: ``embed``, ``empty``, ``block``, ``moe_block`` (with experts), ``norm``, ``head``.

    Modules of multi-token prediction are ``mtp``.
    With hyper-connections the first and the last block are of kinds of their own: ``first_moe_block``, ``last_block``.
    """
    if isinstance(model, LayersSpec):  # of which no two are known to be alike
        return name
    if not name.startswith("layer."):
        return first_word(name)
    number = int(name.removeprefix("layer."))
    kind = "moe_block" if model.has_experts(number) else "block"
    if model.hyper_connections is None:
        return kind
    ends = {"first_": number == 0, "last_": number == model.num_layers - 1}
    return "".join(end for end, is_there in ends.items() if is_there) + kind


def users_of_shared(stages: Sequence[Sequence[Layer]]) -> Mapping[str, tuple[int, ...]]:
    """By the name of each borrowed weight the stages that compute with it, in order; ``stages`` has their layers."""
    borrowed = {weight.name for layers in stages for layer in layers for weight in layer.borrowed}
    users: dict[str, list[int]] = {}
    for stage, layers in enumerate(stages if borrowed else ()):
        used = {weight.name for layer in layers for weight in (*layer.parameters, *layer.borrowed)}
        for name in sorted(used & borrowed):
            users.setdefault(name, []).append(stage)
    return {name: tuple(used) for name, used in users.items()}
