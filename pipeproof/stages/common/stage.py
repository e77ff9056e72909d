"""One pipeline stage on one rank: any run of consecutive layers, with this rank's shards of their weights.

What the layers do, in which order, with which weights and collectives, is
here; how a framework does it is in the stages of ``stages.paddle`` and
``stages.torch``, which fill in the abstract methods, and in their ``Ops``.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size, A heads of this rank in latent attention, Z size of a head's value.
Activations between layers are [S, B, H] or [B, S, H], as the plan says, sharded
along the sequence with sequence parallelism. They are written [S, B, H] below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.collectives import TensorParallelCollectives, TensorParallelRegion
from pipeproof.stages.common.context import ContextCollectives, SharedKeys
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.earlier import EarlierPieces
from pipeproof.stages.common.ends import Ends, Vocabulary
from pipeproof.stages.common.held import HeldWeights, Place, WeightMaker
from pipeproof.stages.common.lanes import join_lanes, split_lanes, whole_loss
from pipeproof.stages.common.latent import latent_heads, with_positions
from pipeproof.stages.common.ops import Ops, Tensor, Weight
from pipeproof.stages.common.streams import around, closed, opened
from pipeproof.stages.common.units import Lane, Unit
from pipeproof.stages.common.weights import SplitWeights, WeightGradients
from pipeproof.stages.describe.boundary import describe_boundary
from pipeproof.stages.describe.lanes import is_mtp, lane_made, lane_read, lanes_after, lanes_into, module_of
from pipeproof.stages.describe.layers import Layer
from pipeproof.stages.describe.order import is_empty
from pipeproof.stages.describe.streams import ENDS, streams_of
from pipeproof.stages.describe.watch import LayerWatch

Words = TypeVar("Words")
"""What a framework's stage is given of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a framework gives a stage to compute with, beside ``Ops``."""

    ops: Ops
    weights: SplitWeights
    vocabulary: Vocabulary
    gated: Callable[[Tensor, Tensor], Tensor]
    """What an MLP makes of its gate and its other factor."""
    tables: tuple[Tensor, Tensor]
    """Cosines and sines of the rotary embedding, [S of the model, D] each, as ``Ops.rotate`` takes them."""
    maker: WeightMaker


class Stage(ABC, Generic[Words]):
    """Layers ``layers`` of the plan's GPT on tensor-parallel rank ``tp_rank``, and where ``experts`` says over ``ep``.

    ``parameters`` holds this rank's shards by the names of the description, of
    weights that layers borrow, too, unless they are in ``lent``: those of the
    rank's other stages.
    ``collectives`` may be None where ``topology.tp`` is 1, ``context`` where
    ``topology.cp`` is. The collectives are issued exactly as the layers'
    descriptions list them, forward and backward; with ``memory.recompute: full`` a block's backward issues those of its
    forward once more, before its own.

    Raises:
        ValueError: the layers are empty or repeat, or ``tp_rank`` and ``topology.tp`` do not fit.
    """

    def __init__(
        self,
        means: Means,
        plan: PlanSpec,
        layers: Sequence[Layer],
        tp_rank: int,
        collectives: TensorParallelCollectives | None,
        experts: Place,
        lent: Mapping[str, Weight] | None,
        context: ContextCollectives | None,
    ) -> None:
        names = [layer.name for layer in layers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a stage needs one or more different layers, got {names}")
        self._plan, self._layers = plan, tuple(layers)
        self._ops, self._weights, self._gated = means.ops, means.weights, means.gated
        self._cos, self._sin = means.tables
        boundary = describe_boundary(plan)
        dim, again = boundary.tp.dim, plan.memory.gathered == "again"
        self._region = TensorParallelRegion(self._ops, tp_rank, plan.topology.tp, dim, collectives, gathers_again=again)
        self._batch_first = boundary.dims == "bsh"
        self._rows_dim = boundary.dims.index("b")
        self._num_given = lanes_into(plan.model, names[0])
        self._recompute = plan.memory.recompute
        self._earlier = self._other_pieces(context)
        self._held = HeldWeights(layers, means.maker, plan.run.seed, lent or {}, self._region, experts)
        self.parameters = self._held.parameters
        self._ends = Ends(self._ops, plan, self._region, self._held.used_by, means.vocabulary)
        self.losses: Any = None
        """Of the latest forward through the head: the scaled loss, or where there are modules, main and theirs, [k]."""

    def forward(
        self,
        activation: Tensor | None,
        words: Words,
        *,
        step: int,
        index: int,
        piece: int = 0,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Run one unit of work through the stage's layers; the caller keeps the result for backward.

        ``activation`` is what the stage before made, None for a stage that
        begins with ``embed``. ``step`` and ``index`` (over all data-parallel
        ranks) say which micro-batch it is; where sequences are cut, also over
        context-parallel ranks, ``piece``
        says which piece, and pieces come in order (backward in reverse). The
        result is the activation for the next stage, or, from a stage that ends
        with ``head``, the scaled loss as a scalar. ``watch`` is shown what
        crosses the borders between layers.
        """
        if (activation is None) != (self._layers[0].name == "embed"):
            raise ValueError(
                f"stage of {[layer.name for layer in self._layers]}: an activation is taken "
                f"exactly where the first layer is not 'embed', got {type(activation).__name__}"
            )
        unit = self._unit(words, step, index, piece)
        lanes = [] if activation is None else split_lanes(self._ops, activation, self._num_given, self._rows_dim)
        dropouts = Dropouts(self._ops, self._plan, step, index, piece, self._region)
        for layer in self._layers:
            inputs = lanes[lane_read(layer.name) :][:1]
            if watch is not None and is_mtp(layer.name):
                inputs = [watch.apart(lanes, lane_read(layer.name))]
            if watch is not None and inputs:
                watch.see(layer.name, "input", index, piece, inputs)
            if layer.name == "embed":
                lanes = self._ends.embed(unit.lanes[: lanes_after(self._plan.model, ["embed"])], dropouts)
            elif is_empty(layer.name):
                pass
            elif layer.name == "norm":
                lanes = self._normed(lanes)
            elif layer.name == "head":
                losses = [loss * unit.scale for loss in self._ends.losses(lanes, unit.lanes)]
                made = losses[0].detach() if len(losses) == 1 else self._ops.stack(losses, 0).detach()
                self.losses = self._shown(made)
                lanes = [whole_loss(self._plan, losses)]
                if watch is not None:
                    watch.see_loss(layer.name, index, piece, made)
            else:
                block = partial(self._block, name=layer.name, index=index, piece=piece, dropouts=dropouts)
                if is_mtp(layer.name):
                    number = module_of(layer.name) + 1
                    inputs += lanes[number : number + 1]
                    lane = unit.lanes[number]
                    block = partial(self._module, block=block, name=layer.name, lane=lane, dropouts=dropouts)
                output = self._ops.computed_again(block, *inputs) if self._recompute == "full" else block(*inputs)
                lanes[lane_made(layer.name) : lane_made(layer.name) + 1] = [output]
            if watch is not None and layer.name != "head":
                watch.see(layer.name, "output", index, piece, [lanes[lane_made(layer.name)]])
        output = join_lanes(self._ops, lanes, self._rows_dim)
        # Of a stage that only hands on a copy: the caller frees what goes out, and may fill what came in anew.
        is_handed_on = output is activation
        return output.clone() if is_handed_on else output

    def backward_input(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Run one unit of work back to the activation that ``forward`` was given, whose ``grad`` it sets.

        ``output`` is what ``forward`` returned, ``gradient`` that of it (None
        for the loss). All collectives of the backward are issued here. What is
        returned adds the gradients of the stage's weights when it is told to.
        """
        return self._weights.backward(output, gradient)

    def give_back(self) -> None:
        """Add what layers made of weights that were lent to them to those weights' own gradients."""
        self._held.give_back()

    def _other_pieces(self, context: ContextCollectives | None) -> EarlierPieces | SharedKeys:
        """What attention of a part of a sequence sees of the other parts."""
        num_parts, num_splits = self._plan.topology.cp, self._plan.schedule.num_sequence_splits
        if num_parts == 1:
            return EarlierPieces(self._ops, num_splits, comes_again=self._recompute == "full")
        if context is None:
            raise ValueError(f"{num_parts} context-parallel ranks need collectives, got None")
        return SharedKeys(self._ops, num_parts, context)

    def _module(
        self,
        hidden: Tensor,
        embedding: Tensor | None = None,
        *,
        block: Callable[[Tensor], Tensor],
        name: str,
        lane: Lane,
        dropouts: Dropouts,
    ) -> Tensor:
        """A module of multi-token prediction, which looks the embedding up where none is given."""
        if embedding is None:
            embedding = self._ends.embed_again(name, lane, dropouts)
        normed = self._norm(hidden, f"{name}.hidden_norm"), self._norm(embedding, f"{name}.embed_norm")
        return block(self._product(self._ops.concat(normed, -1), f"{name}.proj.weight"))

    def _block(self, activation: Tensor, name: str, index: int, piece: int, dropouts: Dropouts) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            return self._attention(self._norm(x, f"{name}.attn_norm"), f"{name}.attn", index, piece, dropouts)

        def mlp(x: Tensor) -> Tensor:
            return self._mlp(self._norm(x, f"{name}.mlp_norm"), f"{name}.mlp", (index, piece), dropouts)

        streams = streams_of(self._plan.model, name)
        if streams is None:
            activation = activation + attention(activation)
            return activation + mlp(activation)
        if streams.expands:
            activation = opened(self._ops, activation, streams.count)
        for part, sub_layer in (("attn", attention), ("mlp", mlp)):
            own = {end: self.parameters[f"{name}.{part}_streams.{end}"] for end in ENDS}
            activation = around(self._ops, activation, sub_layer, streams, self._weights, own)
        return closed(self._ops, activation, streams.count) if streams.contracts else activation

    def _attention(self, activation: Tensor, name: str, index: int, piece: int, dropouts: Dropouts) -> Tensor:
        heads = self._grouped_heads if self._plan.model.mla is None else self._latent_heads
        query, key, value = heads(activation, name, piece)
        key, value = self._earlier.join(key, value, micro_batch=index, layer=name, piece=piece)
        inputs = query, key, value
        mix = partial(self._ops.causal_attention, factors=dropouts.of_attention(name, query))
        is_again = self._recompute == "selective"
        mixed = self._ops.computed_again(mix, *inputs) if is_again else mix(*inputs)  # [B, K, G, S, Z]
        mixed = self._ops.permuted(mixed, [0, 3, 1, 2, 4] if self._batch_first else [3, 0, 1, 2, 4])
        addend = self._product(mixed.flatten(2), f"{name}.out.weight")
        return dropouts.between(self._region.leave(addend, f"{name}.out"), "hidden", name)

    def _latent_heads(self, activation: Tensor, name: str, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, A, 1, S, D], key [B, A, S, D] and value [B, A, S, Z] of a piece."""
        mla = self._plan.model.mla
        assert mla is not None
        query, keys, shared = latent_heads(
            self._ops,
            activation,
            mla,
            lambda x, part: self._product(x, f"{name}.{part}.weight"),
            lambda x, part: self._norm(x, f"{name}.{part}"),
            self._region,
            name,
        )
        order = [0, 2, 1, 3] if self._batch_first else [1, 2, 0, 3]
        query, keys = (self._ops.permuted(heads, order) for heads in (query, keys))
        if not self._batch_first:
            shared = self._ops.permuted(shared, [1, 0, 2])
        tables = self._tables(piece, shared.shape[1])
        query, key, value = with_positions(self._ops, query, keys, shared, mla, *tables)
        return query.unsqueeze(2), key, value

    def _tables(self, piece: int, length: int) -> tuple[Tensor, Tensor]:
        """The rotary tables of a piece of a sequence that may be shorter than the model's."""
        positions = slice(piece * length, (piece + 1) * length)
        return self._cos[positions], self._sin[positions]

    def _mlp(self, activation: Tensor, name: str, unit: tuple[int, int], dropouts: Dropouts) -> Tensor:
        entered = self._region.enter(activation, f"{name}.in")
        if f"{name}.router.weight" in self.parameters:
            addend = self._routed(entered, name, unit)
        else:
            gate = self._product(entered, f"{name}.gate.weight")
            up = self._product(entered, f"{name}.up.weight")
            addend = self._product(self._gated(gate, up), f"{name}.down.weight")
        return dropouts.between(self._region.leave(addend, f"{name}.out"), "hidden", name)

    def _product(self, activation: Tensor, name: str) -> Tensor:
        return self._weights.product(activation, self.parameters[name])

    # What a framework fills in.

    @abstractmethod
    def _unit(self, words: Words, step: int, index: int, piece: int) -> Unit:
        """The unit of work that ``forward`` was given."""

    @abstractmethod
    def _norm(self, activation: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dim, times the weight of that name."""

    @abstractmethod
    def _normed(self, lanes: Sequence[Tensor]) -> list[Tensor]:
        """The last norm, of all lanes."""

    @abstractmethod
    def _grouped_heads(self, activation: Tensor, name: str, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, K, G, S, D], key and value [B, K, S, D] of a piece."""

    @abstractmethod
    def _routed(self, entered: Tensor, name: str, unit: tuple[int, int]) -> Tensor:
        """This rank's addend of what the experts of a block make; ``unit`` is micro-batch and piece."""

    @abstractmethod
    def _shown(self, losses: Tensor) -> Any:
        """What ``losses`` is to show of the scaled losses."""
