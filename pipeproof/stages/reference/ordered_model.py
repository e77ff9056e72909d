"""The model of the ordered reference: a GPT whose sums are written in a parallel run's order.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query
heads of each, D head size, V vocabulary, T pieces. Activations are written
[S, B, H]; with activation order ``bsh`` they are [B, S, H].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.ahead import ahead
from pipeproof.stages.describe.lanes import embeds_again, num_modules
from pipeproof.stages.describe.order import layer_order
from pipeproof.stages.describe.synthetic import Batch
from pipeproof.stages.describe.watch import LayerWatch, Side
from pipeproof.stages.reference.lanes import for_lanes, together
from pipeproof.stages.reference.ordered_layers import OrderedLayers
from pipeproof.stages.reference.pieces import Pieces, products
from pipeproof.stages.reference.residual import Residual, closed, opened, residual
from pipeproof.stages.reference.start import beginning

Tensor: TypeAlias = paddle.Tensor


class OrderedModel(OrderedLayers):
    """The GPT of the plan, its weights in pieces, its sums in piece order."""

    def __init__(
        self, plan: PlanSpec, watch: LayerWatch | None = None, weights: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> None:
        super().__init__(plan, beginning(plan).weights if weights is None else weights)
        self.watch = watch

    def losses(self, batches: Sequence[Batch], indices: Sequence[int] = (0,)) -> list[list[Tensor]]:
        """Of each split of the sequences, in order, and each rank's micro-batch: its loss, a scalar.

        That is the cross-entropy summed over the counted tokens; with modules of
        multi-token prediction, a vector of the main one and of theirs. There is
        one micro-batch for each expert-parallel rank; ``indices`` are theirs over
        all data ranks.
        """
        self.earlier.clear()
        self.indices = indices
        model, losses = self.plan.model, []
        for split in range(self.num_splits):
            self.split = split
            parts = [
                [self._part(ahead(batch, distance)) for distance in range(1 + num_modules(model))] for batch in batches
            ]
            lanes = self.each(self.embedded, parts)
            xs = [of_rank[0] for of_rank in lanes]
            for layer in range(model.num_layers):
                self.each(partial(self.show, f"layer.{layer}", "input"), xs)
                xs = self.block(xs, f"layer.{layer}", layer)
                self.each(partial(self.show, f"layer.{layer}", "output"), xs)
            made = [[x] for x in xs]
            for number in range(num_modules(model)):  # a lane has two readers: a watch sees what each gives back
                name = f"mtp.{number}"
                both = [[[piece.clone() for piece in of_rank[number]] for of_rank in made] for _ in range(2)]
                xs, made = both[0], [[*of_rank[:number], x] for of_rank, x in zip(made, both[1], strict=True)]
                self.each(partial(self.show, name, "input"), xs)
                xs = self.each(partial(self.joined_with, name), xs, [of_rank[number + 1] for of_rank in lanes])
                xs = self.block(xs, name, model.num_layers - 1)
                self.each(partial(self.show, name, "output"), xs)
                made = [[*of_rank, x] for of_rank, x in zip(made, xs, strict=True)]
            losses.append(self.each(self.loss, made, parts))
        return losses

    def _part(self, batch: Batch) -> Batch:
        """That of the split whose turn it is."""
        words = (np.array_split(own, self.num_splits, axis=1)[self.split] for own in (batch.tokens, batch.labels))
        return Batch(*words)

    def embedded(self, batches: Sequence[Batch]) -> list[Pieces]:
        """What the blocks take, and then what each module will read beside it.

        Modules that look tokens up themselves do so in weights of their own.
        """
        names = ["embed", *(f"mtp.{number}" for number in range(len(batches) - 1))]
        if embeds_again(self.plan.model):
            tables = [self.used[f"{name}.weight"] for name in names]
        else:
            of_pieces = [for_lanes(piece, len(batches)) for piece in self.used["embed.weight"]]
            tables = [list(of_lane) for of_lane in zip(*of_pieces, strict=True)]
        x, *others = [self.embed(batch, own) for batch, own in zip(batches, tables, strict=True)]
        x = self.dropped(x, "embedding", "embed")
        self.show("embed", "output", x)
        num_head, _ = self.plan.model.num_empty
        (x,) = self.ends(layer_order(self.plan.model)[1 : 1 + num_head], [x])
        return [x, *(self.dropped(y, "embedding", f"{name}.embed") for name, y in zip(names[1:], others, strict=True))]

    def joined_with(self, name: str, hidden: Pieces, embedding: Pieces) -> Pieces:
        """What the block of a module takes."""
        both = self.norm(hidden, f"{name}.hidden_norm.weight"), self.norm(embedding, f"{name}.embed_norm.weight")
        return products(
            [paddle.concat(of_piece, axis=-1) for of_piece in zip(*both, strict=True)], self.used[f"{name}.proj.weight"]
        )

    def ends(self, names: Sequence[str], xs: list[Pieces]) -> list[Pieces]:
        """What stands around the blocks: the last norm, and layers that do nothing."""
        for name in names:
            self.show(name, "input", xs[0])
            if name == "norm":
                of_pieces = [for_lanes(piece, len(xs)) for piece in self.used["norm.weight"]]
                xs = [self.normed(x, own) for x, own in zip(xs, zip(*of_pieces, strict=True), strict=True)]
            self.show(name, "output", xs[0])
        return xs

    def block(self, xs: Sequence[Pieces], name: str, number: int) -> list[Pieces]:
        """One block of all ranks; they meet at its experts, if it has any, as block ``number``."""
        model = self.plan.model

        def attended(x: Pieces) -> Residual:
            before = residual(opened(x, model, number), f"{name}.attn", model, self.used)
            y = self.attention(self.norm(before.taken, f"{name}.attn_norm.weight"), f"{name}.attn")
            x = before.behind(self.dropped(y, "hidden", f"{name}.attn"))
            return residual(x, f"{name}.mlp", model, self.used)

        def ended(before: Residual, y: Pieces) -> Pieces:
            return closed(before.behind(self.dropped(y, "hidden", f"{name}.mlp")), model, number)

        befores = self.each(attended, xs)
        normed = self.each(lambda before: self.norm(before.taken, f"{name}.mlp_norm.weight"), befores)
        if self.plan.model.has_experts(number):
            return self.each(ended, befores, self.experts(normed, f"{name}.mlp"))
        return self.each(ended, befores, self.each(lambda x: self.mlp(x, f"{name}.mlp"), normed))

    def loss(self, xs: list[Pieces], batches: Sequence[Batch]) -> Tensor:
        """Those of the split, and the rank, whose turn it is."""
        _, num_tail = self.plan.model.num_empty
        xs = self.ends(layer_order(self.plan.model)[-2 - num_tail : -1], xs)
        self.show("head", "input", xs[0])
        of_pieces = [for_lanes(piece, len(xs)) for piece in self.used["head.weight"]]
        tied = self.plan.model.tied_embedding
        return together(
            [
                self.cross_entropy(products(self.enter(x), list(own), transposed=tied), batch)
                for x, own, batch in zip(xs, zip(*of_pieces, strict=True), batches, strict=True)
            ]
        )

    def show(self, layer: str, side: Side, x: Pieces) -> None:
        """Let the watch, where there is one, look at what a layer takes or gives."""
        if self.watch is not None:
            self.watch.see(layer, side, self.indices[self.rank], self.split, x)
