"""The model of the ordered reference: a GPT with sums in the order of a parallel run.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size, V
vocabulary, T shards. Activations are written [S, B, H]; with activation order ``bsh`` they are [B, S, H].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import layer_order
from pipeproof.stages.describe.layer_records import LayerWatch, Side
from pipeproof.stages.describe.mtp_streams import embeds_again, num_modules, shifted_batch
from pipeproof.stages.describe.synthetic import Batch
from pipeproof.stages.reference.mtp_streams import copies_for_mtp_streams, stacked_losses
from pipeproof.stages.reference.ordered_layers import OrderedLayers
from pipeproof.stages.reference.reference_state import initial_state
from pipeproof.stages.reference.residual_streams import Residual, contracted, expanded, residual
from pipeproof.stages.reference.sharded_tensors import Shards, products

Tensor: TypeAlias = paddle.Tensor


class OrderedModel(OrderedLayers):
    """The GPT of the plan, with sharded weights and sums in shard order."""

    def __init__(
        self, plan: PlanSpec, watch: LayerWatch | None = None, weights: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> None:
        super().__init__(plan, initial_state(plan).weights if weights is None else weights)
        self.watch = watch

    def losses(self, batches: Sequence[Batch], indices: Sequence[int] = (0,)) -> list[list[Tensor]]:
        """The loss of each sequence split, in order, and each rank's micro-batch, a scalar.

        It is the cross-entropy summed over the counted tokens; with MTP modules, a vector of the main loss and theirs.
        There is one micro-batch for each expert-parallel rank; ``indices`` are their numbers over all data ranks.
        """
        self.earlier.clear()
        self.indices = indices
        model, losses = self.plan.gpt, []
        for split in range(self.num_splits):
            self.split = split
            parts = [
                [self._part(shifted_batch(batch, distance)) for distance in range(1 + num_modules(model))]
                for batch in batches
            ]
            embedded = self.each(self.embedded, parts)
            xs = [of_rank[0] for of_rank in embedded]
            for layer in range(model.num_layers):
                self.each(partial(self.show, f"layer.{layer}", "input"), xs)
                xs = self.block(xs, f"layer.{layer}", layer)
                self.each(partial(self.show, f"layer.{layer}", "output"), xs)
            outputs = [[x] for x in xs]
            for number in range(num_modules(model)):  # a stream has two readers: a watch records both gradients
                name = f"mtp.{number}"
                both = [[[shard.clone() for shard in of_rank[number]] for of_rank in outputs] for _ in range(2)]
                xs, outputs = both[0], [[*of_rank[:number], x] for of_rank, x in zip(outputs, both[1], strict=True)]
                self.each(partial(self.show, name, "input"), xs)
                xs = self.each(partial(self.joined_with, name), xs, [of_rank[number + 1] for of_rank in embedded])
                xs = self.block(xs, name, model.num_layers - 1)
                self.each(partial(self.show, name, "output"), xs)
                outputs = [[*of_rank, x] for of_rank, x in zip(outputs, xs, strict=True)]
            losses.append(self.each(self.loss, outputs, parts))
        return losses

    def _part(self, batch: Batch) -> Batch:
        """The part of a micro-batch in the current split."""
        parts = (np.array_split(ids, self.num_splits, axis=1)[self.split] for ids in (batch.tokens, batch.labels))
        return Batch(*parts)

    def embedded(self, batches: Sequence[Batch]) -> list[Shards]:
        """The input of the blocks, then the embedded tokens of each module.

        Modules that look up tokens themselves have their own leaves for the weight.
        """
        names = ["embed", *(f"mtp.{number}" for number in range(len(batches) - 1))]
        if embeds_again(self.plan.gpt):
            tables = [self.used[f"{name}.weight"] for name in names]
        else:
            of_shards = [copies_for_mtp_streams(shard, len(batches)) for shard in self.used["embed.weight"]]
            tables = [list(of_stream) for of_stream in zip(*of_shards, strict=True)]
        x, *others = [self.embed(batch, table) for batch, table in zip(batches, tables, strict=True)]
        x = self.dropped(self.positioned(x), "embedding", "embed")
        self.show("embed", "output", x)
        num_head, _ = self.plan.gpt.num_empty
        (x,) = self.ends(layer_order(self.plan.gpt)[1 : 1 + num_head], [x])
        return [x, *(self.dropped(y, "embedding", f"{name}.embed") for name, y in zip(names[1:], others, strict=True))]

    def joined_with(self, name: str, hidden: Shards, embedding: Shards) -> Shards:
        """The input of the block of a module."""
        both = self.norm(hidden, f"{name}.hidden_norm"), self.norm(embedding, f"{name}.embed_norm")
        return products(
            [paddle.concat(of_shard, axis=-1) for of_shard in zip(*both, strict=True)], self.used[f"{name}.proj.weight"]
        )

    def ends(self, names: Sequence[str], xs: list[Shards]) -> list[Shards]:
        """The layers before and after the blocks: the final norm, and empty layers."""
        for name in names:
            self.show(name, "input", xs[0])
            if name == "norm":
                of_weights = [
                    zip(*(copies_for_mtp_streams(shard, len(xs)) for shard in self.used[weight]), strict=True)
                    for weight in self.math.norm_names("norm")
                ]
                xs = [self.normed(x, *own) for x, *own in zip(xs, *of_weights, strict=True)]
            self.show(name, "output", xs[0])
        return xs

    def block(self, xs: Sequence[Shards], name: str, number: int) -> list[Shards]:
        """Block ``number`` on all ranks. The ranks exchange tokens at its experts, if it has any."""
        model = self.plan.gpt

        def attended(x: Shards) -> Residual:
            before = residual(expanded(x, model, number), f"{name}.attn", model, self.used)
            y = self.attention(self.norm(before.sub_layer_input, f"{name}.attn_norm"), f"{name}.attn")
            x = before.update(self.dropped(y, "hidden", f"{name}.attn"))
            return residual(x, f"{name}.mlp", model, self.used)

        def ended(before: Residual, y: Shards) -> Shards:
            return contracted(before.update(self.dropped(y, "hidden", f"{name}.mlp")), model, number)

        befores = self.each(attended, xs)
        normed = self.each(lambda before: self.norm(before.sub_layer_input, f"{name}.mlp_norm"), befores)
        if self.plan.gpt.has_experts(number):
            return self.each(ended, befores, self.experts(normed, f"{name}.mlp"))
        return self.each(ended, befores, self.each(lambda x: self.mlp(x, f"{name}.mlp"), normed))

    def loss(self, xs: list[Shards], batches: Sequence[Batch]) -> Tensor:
        """The losses of the current split and rank."""
        _, num_tail = self.plan.gpt.num_empty
        xs = self.ends(layer_order(self.plan.gpt)[-2 - num_tail : -1], xs)
        self.show("head", "input", xs[0])
        of_shards = [copies_for_mtp_streams(shard, len(xs)) for shard in self.used["head.weight"]]
        tied = self.plan.gpt.tied_embedding
        return stacked_losses(
            [
                self.cross_entropy(products(self.enter(x), list(own), transposed=tied), batch)
                for x, own, batch in zip(xs, zip(*of_shards, strict=True), batches, strict=True)
            ]
        )

    def show(self, layer: str, side: Side, x: Shards) -> None:
        """Pass the input or output of a layer to the watch, if there is one."""
        if self.watch is not None:
            self.watch.see(layer, side, self.indices[self.rank], self.split, x)
