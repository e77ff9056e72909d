"""Arithmetic of attention to near keys, compressed entries and sinks, for both references on Paddle.

Tensors and weights are whole, or of one tensor-parallel shard, as in ``layer_math``. The indexer's arithmetic is
numpy's.

Shape letters: S sequence, B rows, A heads, D head size, R elements with positions, T entries of m tokens each,
N = S + T keys; [..] is [S, B] or [B, S], as in the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.compressed_attention import AttentionType
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.reference.shared_math import AttentionTables, Choice

Tensor: TypeAlias = paddle.Tensor
WeightOf: TypeAlias = Callable[[str], Tensor]
"""The weight of a name, without the name of the attention."""


class CompressedMath:
    """The attention of one type, of the plan's GPT."""

    def __init__(self, plan: PlanSpec, kind: AttentionType) -> None:
        spec = plan.gpt.compressed_attention
        assert spec is not None
        self.tables = AttentionTables(spec, kind)
        self.spec, self.rate, self.size = spec, self.tables.rate, plan.gpt.size_of_head
        self.is_sparse = kind == "compressed_sparse_attention"
        self.num_readers = 2 if self.rate is None else 4
        """Products that read the attention's input, without the indexer's."""
        self._to_rows = [1, 0, 2] if plan.gpt.activation_order == "sbh" else [0, 1, 2]
        self._sequence_first = plan.gpt.activation_order == "sbh"

    def chosen(self, x: Tensor, low: Tensor, weight_of: WeightOf) -> Choice | None:
        """The entries that the indexer chooses, [B, S, T], from activations [.., H] and compressed queries."""
        if not self.is_sparse or self.rate is None:
            return None
        spec, rate = self.spec, self.rate

        def product(y: Tensor, part: str) -> npt.NDArray[np.float64]:
            made: npt.NDArray[np.float64] = (
                np.transpose(y.numpy(), self._to_rows) @ weight_of(f"indexer.{part}.weight").numpy()
            )
            return made

        size = spec.index_head_dim
        values, gates = (product(x, part) for part in ("kv", "gate"))
        bias = weight_of("indexer.positions.weight").numpy()
        rows, length = values.shape[:2]
        windows = self.tables.windows(rows, length)
        entries = np.empty((rows, len(windows[0]), size), dtype=values.dtype)
        for row, number in np.ndindex(entries.shape[:2]):
            first, is_first = windows[row][number]
            slots = [
                (values[row, first : first + rate, size:], gates[row, first : first + rate, size:] + bias[:, size:])
            ]
            if not is_first:
                last = slice(first - rate, first)
                slots.insert(0, (values[row, last, :size], gates[row, last, :size] + bias[:, :size]))
            of_slots, logits = (np.concatenate(each) for each in zip(*slots, strict=True))
            shares = np.exp(logits - logits.max(0))
            entries[row, number] = (of_slots * shares).sum(0) / shares.sum(0)
        entries /= np.sqrt(np.square(entries).mean(-1, keepdims=True) + 1e-6)
        entries *= weight_of("indexer.norm.weight").numpy()
        entries = self._turned(entries, np.array([[first for first, _ in row] for row in windows]))
        queries = product(low, "q")
        queries = queries.reshape(len(queries), length, -1, size).swapaxes(1, 2)
        products = np.maximum(self._turned(queries, np.arange(length)) @ entries.swapaxes(1, 2)[:, None], 0.0)
        scores = np.einsum("bhst,bsh->bst", products, product(x, "heads"))
        scores[~self.tables.seen(rows, length)[..., length:]] = -np.inf
        best = np.argsort(-scores, axis=-1, kind="stable")[..., : spec.index_topk]
        chosen = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(chosen, best, values=True, axis=-1)
        return chosen

    def compressed(
        self, query: Tensor, own: Tensor, products: Tensor | None, weight_of: WeightOf, chosen: Choice | None
    ) -> Tensor:
        """The compressed outputs of groups [.., groups * rank].

        From queries [.., A D], normed keys [.., D] and both products of the compressor next to each other.
        """
        heads = query.reshape([*query.shape[:2], -1, self.size])
        heads = paddle.assign(heads)
        heads = heads * paddle.rsqrt(paddle.square(heads).mean(axis=-1, keepdim=True) + 1e-6)
        heads = heads.transpose([1, 2, 0, 3] if self._sequence_first else [0, 2, 1, 3])
        keys = own.transpose(self._to_rows)
        length = keys.shape[1]
        positions, seen = np.arange(length), self.tables.seen(keys.shape[0], length)
        keys = self.turned(keys, positions)
        if products is not None:
            entries = self._entries(products.transpose(self._to_rows), weight_of)
            firsts = [[first for first, _ in row] for row in self.tables.windows(keys.shape[0], length)]
            keys = paddle.concat([keys, self.turned(entries, np.array(firsts))], axis=1)
            if chosen is not None:
                seen[..., length:] &= chosen
        mixed = self._mixed(self.turned(heads, positions), keys, weight_of("sinks.weight"), seen)
        return self._of_groups(self.turned(mixed, -positions), weight_of("groups.weight"))

    def turned(self, x: Tensor, positions: npt.NDArray[np.int64]) -> Tensor:
        """Rotate the last R elements of [.., S, D], in pairs of neighbours; back at negative positions."""
        rope = self.spec.qk_rope_head_dim
        angles = self._angles(positions)
        cos, sin = (paddle.to_tensor(table(angles), dtype=x.dtype) for table in (np.cos, np.sin))
        *plain, last = [x] if x.shape[-1] == rope else x.split([x.shape[-1] - rope, rope], axis=-1)
        even, odd = paddle.unbind(last.reshape([*last.shape[:-1], -1, 2]), axis=-1)
        pairs = paddle.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
        return paddle.concat([*plain, pairs.flatten(-2)], axis=-1)

    def _turned(self, x: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """``turned`` of an array, by complex numbers."""
        rope = self.spec.qk_rope_head_dim
        pairs = x[..., x.shape[-1] - rope :: 2] + 1j * x[..., x.shape[-1] - rope + 1 :: 2]
        pairs = pairs * np.exp(1j * self._angles(positions))
        turned = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], rope)
        return np.concatenate([x[..., : x.shape[-1] - rope], turned.astype(x.dtype)], -1)

    def _angles(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return positions[..., None] * self.tables.radians

    def _entries(self, products: Tensor, weight_of: WeightOf) -> Tensor:
        """Normed entries [B, T, D] from both products of all tokens [B, S, ..]."""
        assert self.rate is not None
        rows, length = products.shape[:2]
        windows = self.tables.windows(rows, length)
        tokens = [np.concatenate([np.arange(first, first + self.rate) for first, _ in row]) for row in windows]
        of_rows = [paddle.index_select(own, paddle.to_tensor(i)) for own, i in zip(products, tokens, strict=True)]
        used = paddle.stack(of_rows).reshape([rows, -1, self.rate, products.shape[-1]])
        kv, gate = used.split(2, axis=-1)
        gate = gate + weight_of("compressor.positions.weight")
        if self.is_sparse:
            has_none = paddle.to_tensor([[is_first for _, is_first in row] for row in windows])
            kv, gate = (self._with_windows_before(*each, has_none) for each in ((kv, 0.0), (gate, -np.inf)))
        entries = paddle.assign((kv * F.softmax(gate, axis=2)).sum(axis=2))
        scale = paddle.rsqrt(paddle.square(entries).mean(axis=-1, keepdim=True) + 1e-6)
        return entries * scale * weight_of("compressor.norm.weight")

    def _with_windows_before(self, windows: Tensor, missing: float, has_none: Tensor) -> Tensor:
        first, second = windows.split(2, axis=-1)
        before = paddle.concat([first[:, :1], first[:, :-1]], axis=1)
        before = paddle.where(has_none.unsqueeze([-1, -2]), paddle.full_like(before, missing), before)
        return paddle.concat([before, second], axis=2)

    def _mixed(self, query: Tensor, keys: Tensor, sinks: Tensor, seen: Choice) -> Tensor:
        """Attention [B, A, S, D] to [B, N, D]: all queries are rows of one product, and a sink has no value."""
        rows, heads, length, size = query.shape
        logits = paddle.matmul(query.reshape([rows, -1, size]), keys.transpose([0, 2, 1])) * size**-0.5
        mask = paddle.to_tensor(np.where(seen, 0.0, -np.inf), dtype=logits.dtype).unsqueeze(1)
        logits = logits.reshape([rows, heads, length, -1]) + mask
        of_sinks = paddle.zeros([rows, heads, length, 1], dtype=logits.dtype) + sinks.reshape([-1, 1, 1])
        shares = F.softmax(paddle.concat([logits, of_sinks], axis=-1), axis=-1)
        shares, _ = shares.split([logits.shape[-1], 1], axis=-1)
        return paddle.matmul(shares.reshape([rows, heads * length, -1]), keys).reshape(query.shape)

    def _of_groups(self, mixed: Tensor, weight: Tensor) -> Tensor:
        """The product of each group of heads [B, A, S, D]: [.., groups * rank]."""
        rows, heads, length, size = mixed.shape
        num = weight.shape[0]
        outputs = []
        for group, own in zip(mixed.split(num, axis=1), paddle.unbind(weight), strict=True):
            order = [2, 0, 1, 3] if self._sequence_first else [0, 2, 1, 3]
            tokens = group.transpose(order)
            outputs.append(paddle.matmul(tokens.reshape([rows * length, heads // num * size]), own))
        joined = paddle.stack(outputs, axis=1)
        return joined.reshape([*(tokens.shape[:2]), -1])
