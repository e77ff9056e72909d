"""One pipeline stage on one rank: any run of consecutive layers, with this rank's shards of their weights.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size.
Activations between layers are [S, B, H] or [B, S, H], as the plan says, sharded
along the sequence with sequence parallelism. They are written [S, B, H] below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import describe_boundary
from pipeproof.stages.describe.lanes import is_mtp, lane_made, lane_read, lanes_after, lanes_into, module_of
from pipeproof.stages.describe.layers import Layer, Parameter
from pipeproof.stages.describe.order import is_empty
from pipeproof.stages.describe.streams import streams_of
from pipeproof.stages.describe.synthetic import Batch, initial_weight, loss_scale
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.paddle.again import computed_again
from pipeproof.stages.paddle.balance import Balance
from pipeproof.stages.paddle.collectives import TensorParallelCollectives, TensorParallelRegion
from pipeproof.stages.paddle.context import ContextCollectives, SharedKeys
from pipeproof.stages.paddle.dropout import Dropouts
from pipeproof.stages.paddle.earlier import EarlierPieces
from pipeproof.stages.paddle.ends import Ends
from pipeproof.stages.paddle.expert_exchange import ExpertCollectives, ExpertRegion
from pipeproof.stages.paddle.experts import Experts
from pipeproof.stages.paddle.functional import causal_attention, gated, rms_norm, rotary_tables, rotate
from pipeproof.stages.paddle.lanes import join_lanes, lane_batches, split_lanes, whole_loss
from pipeproof.stages.paddle.latent import latent_heads, with_positions
from pipeproof.stages.paddle.streams import around, closed, opened
from pipeproof.stages.paddle.weights import BorrowedWeight, SplitWeights, WeightGradients

Tensor: TypeAlias = paddle.Tensor


class PaddleStage:
    """Layers ``layers`` of the plan's GPT on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``ep_rank``.

    ``parameters`` holds this rank's shards by the names of the description, of
    weights that layers borrow, too, unless they are in ``lent``: those of the
    rank's other stages.
    ``balance`` is what the routers of its experts have beside weights.
    ``collectives`` may be None where ``topology.tp`` is 1, ``exchanges`` where
    ``topology.ep`` is, ``context`` where ``topology.cp`` is. The collectives are issued exactly as the layers'
    descriptions list them, forward and backward; with ``memory.recompute: full`` a block's backward issues those of its
    forward once more, before its own.

    Raises:
        ValueError: the layers are empty or repeat, or ``tp_rank`` and ``topology.tp`` do not fit.
    """

    def __init__(
        self,
        plan: PlanSpec,
        layers: Sequence[Layer],
        tp_rank: int = 0,
        collectives: TensorParallelCollectives | None = None,
        ep_rank: int = 0,
        exchanges: ExpertCollectives | None = None,
        lent: Mapping[str, Tensor] | None = None,
        context: ContextCollectives | None = None,
    ) -> None:
        names = [layer.name for layer in layers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a stage needs one or more different layers, got {names}")
        self._plan, self._layers = plan, tuple(layers)
        boundary = describe_boundary(plan)
        self._region = TensorParallelRegion(
            tp_rank, plan.topology.tp, boundary.tp.dim, collectives, gathers_again=plan.memory.gathered == "again"
        )
        self._experts = ExpertRegion(ep_rank, plan.topology.ep, exchanges)
        self._batch_first = boundary.dims == "bsh"
        self._cos, self._sin = rotary_tables(plan.model.seq_length, plan.model.rotary_size, plan.run.dtype)
        num_splits, num_parts = plan.schedule.num_sequence_splits, plan.topology.cp
        self._num_pieces = num_splits * num_parts  # one of the two is 1
        self._recompute = plan.memory.recompute
        self._earlier: EarlierPieces | SharedKeys
        if num_parts > 1:
            if context is None:
                raise ValueError(f"{num_parts} context-parallel ranks need collectives, got None")
            self._earlier = SharedKeys(num_parts, context)
        else:
            self._earlier = EarlierPieces(num_splits, comes_again=self._recompute == "full")
        self._weights = SplitWeights(None if plan.run.weight_dtype == plan.run.dtype else plan.run.dtype)
        self._gated = gated(plan.model.swiglu_limit)
        self.balance = Balance(plan, layers, puts_in_losses=tp_rank == 0)
        self.parameters: dict[str, Tensor] = {
            parameter.name: self._load(parameter) for layer in layers for parameter in layer.parameters
        }
        there = {**(lent or {}), **self.parameters}
        self._lent: dict[tuple[str, str], BorrowedWeight] = {}
        for layer in layers:
            for one in layer.borrowed:
                if one.name in there:
                    self._lent[layer.name, one.name] = BorrowedWeight(there[one.name])
                else:
                    there[one.name] = self.parameters[one.name] = self._load(one)
        self._ends = Ends(plan, self._weights, self._region, self._weight)
        self._rows_dim = boundary.dims.index("b")
        self._num_given = lanes_into(plan.model, names[0])
        self.losses: npt.NDArray[Any] | None = None
        """Of the latest forward through the head: the scaled loss, or where there are modules, main and theirs, [k]."""

    def forward(
        self,
        activation: Tensor | None,
        batch: Batch,
        *,
        step: int,
        index: int,
        piece: int = 0,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Run one micro-batch through the stage's layers; the caller keeps the result for backward.

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
        batches = [self._piece_of(one, piece) for one in lane_batches(self._plan, batch)]
        lanes = [] if activation is None else split_lanes(activation, self._num_given, self._rows_dim)
        dropouts = Dropouts(self._plan, step, index, piece, self._region)
        for layer in self._layers:
            inputs = lanes[lane_read(layer.name) :][:1]
            if watch is not None and is_mtp(layer.name):
                inputs = [watch.apart(lanes, lane_read(layer.name))]
            if watch is not None and inputs:
                watch.see(layer.name, "input", index, piece, inputs)
            if layer.name == "embed":
                lanes = self._ends.embed(batches[: lanes_after(self._plan.model, ["embed"])], dropouts)
            elif is_empty(layer.name):
                pass
            elif layer.name == "norm":
                lanes = self._weights.scaled_each(list(map(rms_norm, lanes)), self.parameters["norm.weight"])
            elif layer.name == "head":
                losses = [loss * loss_scale(self._plan, step, index) for loss in self._ends.losses(lanes, batches)]
                shown = losses[0].detach() if len(losses) == 1 else paddle.stack(losses).detach()
                self.losses = np.array(shown.numpy(), copy=True)
                lanes = [whole_loss(self._plan, losses)]
            else:
                block = partial(self._block, name=layer.name, index=index, piece=piece, dropouts=dropouts)
                if is_mtp(layer.name):
                    made = module_of(layer.name) + 1
                    inputs += lanes[made : made + 1]
                    block = partial(self._module, block=block, name=layer.name, batch=batches[made], dropouts=dropouts)
                output = computed_again(block, *inputs) if self._recompute == "full" else block(*inputs)
                lanes[lane_made(layer.name) : lane_made(layer.name) + 1] = [output]
            if watch is not None and layer.name == "head":
                watch.see_loss(layer.name, index, piece, shown)
            elif watch is not None:
                watch.see(layer.name, "output", index, piece, [lanes[lane_made(layer.name)]])
        output = join_lanes(lanes, self._rows_dim)
        # Of a stage that only hands on a copy: the caller frees what goes out, and may fill what came in anew.
        return paddle.assign(output) if output is activation else output

    def backward_input(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Run one micro-batch back to the activation that ``forward`` was given, whose ``grad`` it sets.

        ``output`` is what ``forward`` returned, ``gradient`` that of it (None
        for the loss). All collectives of the backward are issued here. What is
        returned adds the gradients of the stage's weights when it is told to.
        """
        return self._weights.backward(output, gradient)

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """The whole backward of one micro-batch: ``backward_input``, and the weight gradients right after it."""
        self.backward_input(output, gradient).accumulate()

    def give_back(self) -> None:
        """Add what layers made of weights that were lent to them to those weights' own gradients."""
        for borrowed in self._lent.values():
            borrowed.give_back()

    def _load(self, parameter: Parameter) -> Tensor:
        """This rank's shard of the initial weight, as a leaf of autograd."""
        run = self._plan.run
        weight = initial_weight(parameter, run.seed, run.dtype).astype(run.weight_dtype)
        for placed, region in ((parameter.tp, self._region), (parameter.ep, self._experts)):
            if placed.dim is not None:
                weight = np.split(weight, region.num_ranks, axis=placed.dim)[region.rank]
        return paddle.to_tensor(np.ascontiguousarray(weight), stop_gradient=False)

    def _piece_of(self, batch: Batch, piece: int) -> Batch:
        return Batch(*(np.split(words, self._num_pieces, axis=1)[piece] for words in (batch.tokens, batch.labels)))

    def _module(
        self,
        hidden: Tensor,
        embedding: Tensor | None = None,
        *,
        block: Callable[[Tensor], Tensor],
        name: str,
        batch: Batch,
        dropouts: Dropouts,
    ) -> Tensor:
        """A module of multi-token prediction, which looks the embedding up where none is given."""
        if embedding is None:
            embedding = self._ends.embed_again(name, batch, dropouts)
        normed = self._norm(hidden, f"{name}.hidden_norm"), self._norm(embedding, f"{name}.embed_norm")
        return block(self._product(paddle.concat(normed, axis=-1), f"{name}.proj.weight"))

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._weights.scaled(rms_norm(activation), self.parameters[f"{name}.weight"])

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
            activation = opened(activation, streams.count)
        for part, sub_layer in (("attn", attention), ("mlp", mlp)):
            own = {end: self.parameters[f"{name}.{part}_streams.{end}"] for end in ("weight", "scale", "bias")}
            activation = around(activation, sub_layer, streams, self._weights, own)
        return closed(activation, streams.count) if streams.contracts else activation

    def _attention(self, activation: Tensor, name: str, index: int, piece: int, dropouts: Dropouts) -> Tensor:
        heads = self._grouped_heads if self._plan.model.mla is None else self._latent_heads
        query, key, value = heads(activation, name, piece)
        key, value = self._earlier.join(key, value, micro_batch=index, layer=name, piece=piece)
        inputs = query, key, value
        is_again = self._recompute == "selective"
        mix = partial(causal_attention, factors=dropouts.of_attention(name, query))
        mixed = computed_again(mix, *inputs) if is_again else mix(*inputs)  # [B, K, G, S, Z]
        mixed = mixed.transpose([0, 3, 1, 2, 4] if self._batch_first else [3, 0, 1, 2, 4])
        addend = self._product(mixed.reshape([*mixed.shape[:2], -1]), f"{name}.out.weight")
        return dropouts.between(self._region.leave(addend, f"{name}.out"), "hidden", name)

    def _grouped_heads(self, activation: Tensor, name: str, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, K, G, S, D], key and value [B, K, S, D] of a piece."""
        entered = self._region.enter(activation, f"{name}.in")
        fused = self._product(entered, f"{name}.qkv.weight")  # [S, B, K * (G + 2) * D]
        group = self._plan.model.num_heads // self._plan.model.kv_heads
        heads = fused.reshape([*fused.shape[:2], -1, group + 2, self._plan.model.size_of_head])
        heads = heads.transpose([0, 2, 3, 1, 4] if self._batch_first else [1, 2, 3, 0, 4])  # [B, K, G + 2, S, D]
        query, key, value = paddle.split(heads, [group, 1, 1], axis=2)
        cos, sin = self._tables(piece, query.shape[3])
        return rotate(query, cos, sin), rotate(key.squeeze(2), cos, sin), value.squeeze(2)

    def _latent_heads(self, activation: Tensor, name: str, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, A, 1, S, D], key [B, A, S, D] and value [B, A, S, Z] of a piece."""
        mla = self._plan.model.mla
        assert mla is not None
        query, keys, shared = latent_heads(
            activation,
            mla,
            lambda x, part: self._product(x, f"{name}.{part}.weight"),
            lambda x, part: self._norm(x, f"{name}.{part}"),
            self._region,
            name,
        )
        if self._batch_first:
            query, keys = (heads.transpose([0, 2, 1, 3]) for heads in (query, keys))
        else:
            query, keys, shared = (
                query.transpose([1, 2, 0, 3]),
                keys.transpose([1, 2, 0, 3]),
                shared.transpose([1, 0, 2]),
            )
        query, key, value = with_positions(query, keys, shared, mla, *self._tables(piece, shared.shape[1]))
        return query.unsqueeze(2), key, value

    def _tables(self, piece: int, length: int) -> tuple[Tensor, Tensor]:
        """The rotary tables of a piece of a sequence that may be shorter than the model's."""
        positions = slice(piece * length, (piece + 1) * length)
        return self._cos[positions], self._sin[positions]

    def _mlp(self, activation: Tensor, name: str, unit: tuple[int, int], dropouts: Dropouts) -> Tensor:
        entered = self._region.enter(activation, f"{name}.in")
        if f"{name}.router.weight" in self.parameters:
            assert self._plan.model.moe is not None
            weight_of = self.parameters.__getitem__
            experts = Experts(self._plan.model.moe, name, self._weights, weight_of, self._experts, self._gated)
            addend = experts.forward(entered, self.balance.of(name, *unit))
        else:
            gate = self._product(entered, f"{name}.gate.weight")
            up = self._product(entered, f"{name}.up.weight")
            addend = self._product(self._gated(gate, up), f"{name}.down.weight")
        return dropouts.between(self._region.leave(addend, f"{name}.out"), "hidden", name)

    def _weight(self, layer: str, name: str) -> Tensor:
        """A weight as ``layer`` uses it, which may be another layer's."""
        return self._lent[layer, name].used if (layer, name) in self._lent else self.parameters[name]

    def _product(self, activation: Tensor, name: str) -> Tensor:
        return self._weights.product(activation, self.parameters[name])
