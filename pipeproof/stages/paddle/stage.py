"""One pipeline stage on one rank: any run of consecutive layers, with this rank's shards of their weights.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size.
Activations between layers are [S, B, H] or [B, S, H], as the plan says, sharded
along the sequence with sequence parallelism. They are written [S, B, H] below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import describe_boundary
from pipeproof.stages.describe.layers import Layer, Parameter
from pipeproof.stages.describe.synthetic import Batch, initial_weight, loss_scale
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.paddle.again import computed_again
from pipeproof.stages.paddle.collectives import TensorParallelCollectives, TensorParallelRegion
from pipeproof.stages.paddle.earlier import EarlierPieces
from pipeproof.stages.paddle.expert_exchange import ExpertCollectives, ExpertRegion
from pipeproof.stages.paddle.experts import Experts
from pipeproof.stages.paddle.functional import causal_attention, rms_norm, rotary_tables, rotate, swiglu
from pipeproof.stages.paddle.latent import latent_heads, with_positions
from pipeproof.stages.paddle.vocabulary import embed_tokens, summed_cross_entropy
from pipeproof.stages.paddle.weights import BorrowedWeight, SplitWeights, WeightGradients

Tensor: TypeAlias = paddle.Tensor


class PaddleStage:
    """Layers ``layers`` of the plan's GPT on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``ep_rank``.

    ``parameters`` holds this rank's shards by the names of the description, of
    weights that layers borrow, too, unless they are in ``lent``: those of the
    rank's other stages.
    ``collectives`` may be None where ``topology.tp`` is 1, ``exchanges`` where
    ``topology.ep`` is. The collectives are issued exactly as the layers' descriptions list them, forward and backward;
    with ``memory.recompute: full`` a block's backward issues those of its forward once more, before its own.

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
    ) -> None:
        names = [layer.name for layer in layers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a stage needs one or more different layers, got {names}")
        self._plan, self._layers = plan, tuple(layers)
        boundary = describe_boundary(plan)
        self._region = TensorParallelRegion(tp_rank, plan.topology.tp, boundary.tp.dim, collectives)
        self._experts = ExpertRegion(ep_rank, plan.topology.ep, exchanges)
        self._batch_first = boundary.dims == "bsh"
        self._cos, self._sin = rotary_tables(plan.model.seq_length, plan.model.rotary_size, plan.run.dtype)
        self._num_pieces = plan.schedule.num_sequence_splits
        self._recompute = plan.memory.recompute
        self._earlier = EarlierPieces(self._num_pieces, comes_again=self._recompute == "full")
        self._weights = SplitWeights()
        self.parameters: dict[str, Tensor] = {
            parameter.name: self._load(parameter) for layer in layers for parameter in layer.parameters
        }
        there = {**(lent or {}), **self.parameters}
        borrowed = [parameter for layer in layers for parameter in layer.borrowed]
        self.parameters |= {p.name: self._load(p) for p in borrowed if p.name not in there}
        self._lent = {p.name: BorrowedWeight(there[p.name]) for p in borrowed if p.name in there}

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
        ranks) say which micro-batch it is; where sequences are cut, ``piece``
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
        batch = Batch(*(np.split(words, self._num_pieces, axis=1)[piece] for words in (batch.tokens, batch.labels)))
        for layer in self._layers:
            if watch is not None and activation is not None:
                watch.see(layer.name, "input", index, piece, [activation])
            if layer.name == "embed":
                activation = self._embed(layer.name, batch)
            elif layer.name == "norm":
                activation = self._norm(activation, "norm")
            elif layer.name == "head":
                activation = self._head(activation, batch) * loss_scale(self._plan, step, index)
            else:
                block = partial(self._block, name=layer.name, index=index, piece=piece)
                activation = computed_again(block, activation) if self._recompute == "full" else block(activation)
            if watch is not None and layer.name == "head":
                watch.see_loss(layer.name, index, piece, activation)
            elif watch is not None:
                watch.see(layer.name, "output", index, piece, [activation])
        return activation

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
        weight = initial_weight(parameter, self._plan.run.seed, self._plan.run.dtype)
        for placed, region in ((parameter.tp, self._region), (parameter.ep, self._experts)):
            if placed.dim is not None:
                weight = np.split(weight, region.num_ranks, axis=placed.dim)[region.rank]
        return paddle.to_tensor(np.ascontiguousarray(weight), stop_gradient=False)

    def _embed(self, name: str, batch: Batch) -> Tensor:
        rows = embed_tokens(
            self._in_order(batch.tokens), self.parameters[f"{name}.weight"], self._weights, self._region
        )
        return self._region.leave(rows, f"{name}.out")

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._weights.scaled(rms_norm(activation), self.parameters[f"{name}.weight"])

    def _block(self, activation: Tensor, name: str, index: int, piece: int) -> Tensor:
        normed = self._norm(activation, f"{name}.attn_norm")
        activation = activation + self._attention(normed, f"{name}.attn", index, piece)
        return activation + self._mlp(self._norm(activation, f"{name}.mlp_norm"), f"{name}.mlp")

    def _attention(self, activation: Tensor, name: str, index: int, piece: int) -> Tensor:
        heads = self._grouped_heads if self._plan.model.mla is None else self._latent_heads
        query, key, value = heads(activation, name, piece)
        key, value = self._earlier.join(key, value, micro_batch=index, layer=name, piece=piece)
        inputs = query, key, value
        is_again = self._recompute == "selective"
        mixed = computed_again(causal_attention, *inputs) if is_again else causal_attention(*inputs)  # [B, K, G, S, Z]
        mixed = mixed.transpose([0, 3, 1, 2, 4] if self._batch_first else [3, 0, 1, 2, 4])
        partial = self._product(mixed.reshape([*mixed.shape[:2], -1]), f"{name}.out.weight")
        return self._region.leave(partial, f"{name}.out")

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

    def _mlp(self, activation: Tensor, name: str) -> Tensor:
        entered = self._region.enter(activation, f"{name}.in")
        if f"{name}.router.weight" in self.parameters:
            assert self._plan.model.moe is not None
            experts = Experts(self._plan.model.moe, name, self._weights, self.parameters.__getitem__, self._experts)
            partial = experts.forward(entered)
        else:
            gate = self._product(entered, f"{name}.gate.weight")
            up = self._product(entered, f"{name}.up.weight")
            partial = self._product(swiglu(gate, up), f"{name}.down.weight")
        return self._region.leave(partial, f"{name}.out")

    def _head(self, activation: Tensor, batch: Batch) -> Tensor:
        entered = self._region.enter(activation, "head.in")
        if self._plan.model.tied_embedding:
            name = "embed.weight"
            weight = self._lent[name].used if name in self._lent else self.parameters[name]
            logits = self._weights.product(entered, weight, transposed=True)
        else:
            logits = self._product(entered, "head.weight")
        return summed_cross_entropy(logits, self._in_order(batch.labels), self._region)

    def _product(self, activation: Tensor, name: str) -> Tensor:
        return self._weights.product(activation, self.parameters[name])

    def _in_order(self, words: np.ndarray) -> Tensor:
        """Tokens or labels [B, S] in the order of the plan's activations."""
        return paddle.to_tensor(np.ascontiguousarray(words if self._batch_first else words.T))
