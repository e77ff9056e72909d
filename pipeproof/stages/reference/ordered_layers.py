"""The layers of the ordered reference's model, whose sums are written in a parallel run's order.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query
heads of each, D head size, V vocabulary, T pieces. Activations are written
[S, B, H]; with activation order ``bsh`` they are [B, S, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.dropout import DropoutPlace
from pipeproof.stages.describe.synthetic import Batch
from pipeproof.stages.reference.balance import Routers
from pipeproof.stages.reference.chance import Chance
from pipeproof.stages.reference.gated import gated
from pipeproof.stages.reference.mixture import Routing, mixture
from pipeproof.stages.reference.ordered_weights import OrderedWeights
from pipeproof.stages.reference.pieces import Copies, Pieces, add, products
from pipeproof.stages.reference.rounded import RoundedPieces

Tensor: TypeAlias = paddle.Tensor
_Result = TypeVar("_Result")


class OrderedLayers(OrderedWeights):
    """What layers compute with weights in pieces, for one split of the sequences and one rank after the other.

    Between blocks an activation is cut along the sequence with sequence
    parallelism, else one whole tensor.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        super().__init__(plan, weights)
        self.routers = Routers(plan, weights)
        self.indices: Sequence[int] = (0,)
        self.sequence_first = plan.model.activation_order == "sbh"
        self.sequence_dim = 0 if self.sequence_first else 1
        self.step, self.split, self.rank = 0, 0, 0
        self.used: Mapping[str, Pieces] = RoundedPieces(self.weights, plan.run)
        self.chance = Chance(plan)
        self.earlier: dict[str, list[tuple[Tensor, ...]]] = {}
        head_size = plan.model.rotary_size
        frequencies = 10000.0 ** -(np.arange(head_size // 2, dtype=np.float64) * 2 / head_size)
        angles = np.arange(plan.model.seq_length)[:, None] * frequencies  # [S, D / 2]
        self.cos = paddle.to_tensor(np.cos(angles), dtype=plan.run.dtype)
        self.sin = paddle.to_tensor(np.sin(angles), dtype=plan.run.dtype)

    def each(self, work: Callable[..., _Result], *of_ranks: Sequence[Any]) -> list[_Result]:
        """What ``work`` makes of each rank's values, with the rank's own weights."""
        results = []
        for self.rank, values in enumerate(zip(*of_ranks, strict=True)):
            self.used = RoundedPieces(self.of_units[self.split][self.rank], self.plan.run)
            self.chance.turn_to(self.step, self.indices[self.rank])
            results.append(work(*values))
        return results

    def embed(self, batch: Batch, tables: Pieces) -> Pieces:
        """Embedded tokens: pieces of the vocabulary contribute zeros for each other's tokens."""
        tokens = self._ordered(batch.tokens)
        if len(tables) == 1:
            return [F.embedding(tokens, tables[0])]
        partials = []
        for table, (row, is_here) in zip(tables, self._places(tokens), strict=True):
            partials.append(F.embedding(row, table) * is_here.astype(table.dtype).unsqueeze(-1))
        return self.leave(partials)

    def enter(self, x: Pieces) -> Pieces:
        """All tokens, once for each piece of the weights that read them."""
        whole = x[0] if len(x) == 1 else paddle.concat(x, axis=self.sequence_dim)
        return [whole] if self.num_pieces == 1 else list(Copies.apply(whole, self.num_pieces))

    def leave(self, partials: Pieces) -> Pieces:
        """The sum of the pieces' products in piece order, as activations are between blocks."""
        whole = add(partials)
        if self.sequence_pieces == 1:
            return [whole]
        return list(paddle.split(whole, self.sequence_pieces, axis=self.sequence_dim))

    def dropped(self, x: Pieces, place: DropoutPlace, layer: str) -> Pieces:
        """What dropout leaves of what lies between blocks, or is to be added to it."""
        length = x[0].shape[self.sequence_dim]
        begin = self.split * length * len(x)
        return [self.chance.tokens(piece, place, layer, begin + k * length) for k, piece in enumerate(x)]

    def add(self, x: Pieces, y: Pieces) -> Pieces:
        """The sum of two, piece by piece."""
        return [a + b for a, b in zip(x, y, strict=True)]

    def norm(self, x: Pieces, name: str) -> Pieces:
        """RMSNorm over the last dim, with the weight of that name."""
        return self.normed(x, self.used[name])

    def normed(self, x: Pieces, weights: Sequence[Tensor]) -> Pieces:
        """RMSNorm over the last dim; each piece of the sequence has its copy of the weight."""
        normed = []
        for piece, weight in zip(x, weights, strict=True):
            # A copy, so that no tensor feeds three operations, whose gradients
            # autograd would add in an order that is nobody's promise.
            a = paddle.assign(piece)
            inverse = paddle.rsqrt(paddle.square(a).mean(axis=-1, keepdim=True) + 1e-6)
            normed.append(a * inverse * weight)
        return normed

    def attention(self, x: Pieces, name: str) -> Pieces:
        """Causal rotary attention, heads in pieces."""
        heads = self.grouped_heads if self.plan.model.mla is None else self.latent_heads
        mixed = [self.mix(*of_piece, name, piece) for piece, of_piece in enumerate(heads(x, name))]
        return self.leave(products(mixed, self.used[f"{name}.out.weight"]))

    def grouped_heads(self, x: Pieces, name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each piece: queries [B, K / T, G, S, D], keys and values [B, K / T, S, D]."""
        num_kv_heads, size = self.plan.model.kv_heads // self.num_pieces, self.plan.model.size_of_head
        width = self.plan.model.num_heads // self.plan.model.kv_heads * size  # of a group's queries
        found = []
        for qkv in products(self.enter(x), self.used[f"{name}.qkv.weight"]):
            heads = qkv.reshape([*qkv.shape[:2], num_kv_heads, width + 2 * size])
            heads = heads.transpose([1, 2, 0, 3] if self.sequence_first else [0, 2, 1, 3])
            q, k, v = heads.split([width, size, size], axis=-1)
            groups = q.reshape([*k.shape[:3], -1, size]).transpose([0, 1, 3, 2, 4])
            found.append((self.rotary(groups), self.rotary(k), v))
        return found

    def latent_heads(self, x: Pieces, name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each piece: queries [B, A / T, 1, S, D], keys [B, A / T, S, D] and values [B, A / T, S, Z].

        All heads share the positions' part of the key; its gradient adds their parts in turn.
        """
        mla = self.plan.model.mla
        assert mla is not None
        nope, rope, value_size = mla.nope_head_size, mla.rope_head_size, mla.value_head_size
        to_heads = [1, 2, 0, 3] if self.sequence_first else [0, 2, 1, 3]
        if mla.q_rank is None:
            queries = products(self.enter(x), self.used[f"{name}.q.weight"])
        else:
            low = self.norm(products(x, self.used[f"{name}.q_down.weight"]), f"{name}.q_norm.weight")
            queries = products(self.enter(low), self.used[f"{name}.q_up.weight"])
        compressed = [y.split([mla.kv_rank, rope], axis=-1) for y in products(x, self.used[f"{name}.kv_down.weight"])]
        latents = self.norm([latent for latent, _ in compressed], f"{name}.kv_norm.weight")
        expanded = products(self.enter(latents), self.used[f"{name}.kv_up.weight"])
        found = []
        for q, kv, shared in zip(queries, expanded, self.enter([shared for _, shared in compressed]), strict=True):
            q_nope, q_rope = q.reshape([*q.shape[:2], -1, nope + rope]).transpose(to_heads).split([nope, rope], axis=-1)
            kv = kv.reshape([*kv.shape[:2], -1, nope + value_size]).transpose(to_heads)
            k_nope, v = kv.split([nope, value_size], axis=-1)
            turned = self.rotary(shared.transpose([1, 0, 2]) if self.sequence_first else shared)
            k_rope = paddle.stack(list(Copies.apply(turned, v.shape[1])), axis=1)
            query = paddle.concat([q_nope, self.rotary(q_rope)], axis=-1)
            found.append((query.unsqueeze(2), paddle.concat([k_nope, k_rope], axis=-1), v))
        return found

    def mix(self, groups: Tensor, k: Tensor, v: Tensor, name: str, piece: int) -> Tensor:
        """Attention of one piece's heads: [B, K / T, G, S, D] to [S, B, K / T * G * Z].

        All queries of a head of keys and values are rows of one product with it, query head by query head.
        """
        where = f"{name} of piece {piece} of rank {self.rank}"
        rows, num_kv_heads, group, own, size = groups.shape
        k, v = self.up_to_here(k, f"keys of {where}"), self.up_to_here(v, f"values of {where}")
        seen = k.shape[2]
        scores = paddle.matmul(groups.reshape([rows, num_kv_heads, -1, size]), k, transpose_y=True) * size**-0.5
        mask = paddle.to_tensor(np.where(~np.tri(own, seen, seen - own, dtype=bool), -np.inf, 0.0), dtype=scores.dtype)
        weights = F.softmax(scores.reshape([rows, num_kv_heads, -1, own, seen]) + mask, axis=-1)
        weights = self.chance.probabilities(weights, name, piece * num_kv_heads * group, seen - own)
        mixed = paddle.matmul(weights.reshape([rows, num_kv_heads, -1, seen]), v)
        mixed = mixed.reshape([rows, num_kv_heads, -1, own, v.shape[-1]])
        mixed = mixed.transpose([3, 0, 1, 2, 4] if self.sequence_first else [0, 3, 1, 2, 4])
        return mixed.reshape([*mixed.shape[:2], -1])

    def up_to_here(self, own: Tensor, what: str) -> Tensor:
        """Keys or values of the splits up to this one, joined.

        Each later split reads a copy; gradients are added from the last split's back to the split's own. Splits on
        context-parallel ranks each have a copy; gradients are added in their order, zeros of ranks that see nothing
        of the split included.
        """
        if self.plan.topology.cp > 1:
            self.earlier.setdefault(what, []).append(Copies.apply(own, self.num_splits))
            return paddle.concat([copies[self.split] for copies in self.earlier[what]], axis=2)
        num_readers = self.num_splits - self.split
        self.earlier.setdefault(what, []).append(Copies.apply(own, num_readers) if num_readers > 1 else (own,))
        read = [copies[num_readers - 1] for copies in self.earlier[what]]
        return read[0] if len(read) == 1 else paddle.concat(read, axis=2)

    def rotary(self, heads: Tensor) -> Tensor:
        """Turn each pair (i, i + D/2) of a head by its position's angle."""
        a, b = heads.split(2, axis=-1)
        begin, length = self.split * heads.shape[-2], heads.shape[-2]
        cos, sin = (table[begin : begin + length] for table in (self.cos, self.sin))
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def mlp(self, x: Pieces, name: str) -> Pieces:
        """SwiGLU, the feed-forward width in pieces."""
        return self.leave(self.swiglu(self.enter(x), name))

    def swiglu(self, entered: Pieces, name: str) -> Pieces:
        """The addends of an MLP."""
        gates = products(entered, self.used[f"{name}.gate.weight"])
        ups = products(entered, self.used[f"{name}.up.weight"])
        limit = self.plan.model.swiglu_limit
        inner = [gated(gate, up, limit) for gate, up in zip(gates, ups, strict=True)]
        return products(inner, self.used[f"{name}.down.weight"])

    def experts(self, xs: Sequence[Pieces], name: str) -> list[Pieces]:
        """Routed experts, their width in pieces, of the tokens of all ranks; shared ones beside, where there are."""
        moe = self.plan.model.moe
        assert moe is not None
        readers = 3 if moe.num_shared_experts else 2

        def ways(x: Pieces) -> list[Pieces]:
            """For the router, the routed and the shared experts: all tokens, once for each piece."""
            of_pieces = [Copies.apply(entered, readers) for entered in self.enter(x)]
            return [list(way) for way in zip(*of_pieces, strict=True)]

        def routings(way: list[Pieces]) -> list[Routing]:
            self.routers.turn_to(self.indices[self.rank], self.split)
            of_pieces = products(way[0], self.used[f"{name}.router.weight"])
            return [self.routers.route(logits, name, counts=piece == 0) for piece, logits in enumerate(of_pieces)]

        of_ranks = self.each(ways, xs)
        routed = self.each(routings, of_ranks)
        made = [
            mixture(
                [ways[1][piece] for ways in of_ranks],
                [routing[piece] for routing in routed],
                [self.used[f"{name}.experts.{part}.weight"][piece] for part in ("gate", "up", "down")],
                self.plan.model.swiglu_limit,
            )
            for piece in range(self.num_pieces)
        ]

        def left(way: list[Pieces], *addends: Tensor) -> Pieces:
            shared = self.swiglu(way[2], f"{name}.shared") if moe.num_shared_experts else None
            return self.leave(list(addends) if shared is None else self.add(list(addends), shared))

        return self.each(left, of_ranks, *made)

    def cross_entropy(self, logits: Pieces, batch: Batch) -> Tensor:
        """The summed cross-entropy; logits are [S, B, V / T] each."""
        labels = self._ordered(batch.labels)
        if len(logits) == 1:
            flat = logits[0].reshape([-1, logits[0].shape[-1]])
            return F.cross_entropy(flat, labels.reshape([-1]), ignore_index=-100, reduction="none").sum()
        highest = logits[0].detach().max(axis=-1)
        for piece in logits[1:]:
            highest = paddle.maximum(highest, piece.detach().max(axis=-1))
        shifted = [piece - highest.unsqueeze(-1) for piece in logits]
        sum_exp = add([paddle.exp(piece).sum(axis=-1) for piece in shifted])
        targets = []
        for piece, (column, is_here) in zip(shifted, self._places(labels), strict=True):
            logit = paddle.take_along_axis(piece, column.unsqueeze(-1), axis=-1).squeeze(-1)
            targets.append(logit * is_here.astype(piece.dtype))
        losses = paddle.log(sum_exp) - add(targets)
        return (losses * (labels != -100).astype(losses.dtype)).sum()

    def _ordered(self, words: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] in the order of the activations."""
        return paddle.to_tensor(np.ascontiguousarray(words.T if self.sequence_first else words))

    def _places(self, words: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each piece of the vocabulary: where in it each word is (0 if elsewhere), and whether it is there."""
        size = self.plan.model.vocab_size // self.num_pieces
        for piece in range(self.num_pieces):
            is_here = paddle.floor_divide(words, paddle.full_like(words, size)) == piece
            yield paddle.where(is_here, words - piece * size, paddle.zeros_like(words)), is_here
