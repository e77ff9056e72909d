"""Attention to near keys, compressed entries and sinks on one rank (``describe/layers/attention.py``).

Shape letters: S sequence, B rows, A query heads of this rank, D head size, R elements with positions, T entries of m
slots of a window, N = S + T keys, G output groups of this rank; [..] is [S, B] or [B, S], as in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from pipeproof.specs.compressed_attention import SPARSE, AttentionType, CompressedAttentionSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight, rotary_angles
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.common.weights import SplitWeights

Apply = Callable[[Tensor, str], Tensor]
"""The product, or the norm, with the weights of a name."""


class _Tables(NamedTuple):
    """Constants of a sequence of one length: positions of tokens and entries, and the keys that queries do not see.

    ``cos`` and ``sin`` are [S, R / 2]; ``entry_cos`` and ``entry_sin`` [T, R / 2]. ``unseen`` [S, N] is added to
    scores: 0, or minus infinity for keys that are later or left the window, and for entries with later tokens.

    With packed documents entries differ by row: values of entries, and ``unseen``, begin with a dim of rows. Then
    ``tokens`` [B, T x m] are the tokens of the windows, counted over all rows, and ``begins`` [B, T, 1, 1] is minus
    infinity at the first window of a document, else 0. Positions count through the sequence: only distances matter.
    """

    cos: Tensor
    sin: Tensor
    entry_cos: Tensor
    entry_sin: Tensor
    unseen: Tensor
    tokens: Tensor | None = None
    begins: Tensor | None = None

    def of_rows(self, num: int) -> _Tables:
        """The tables of the first rows."""
        if self.tokens is None or num == self.tokens.shape[0]:
            return self
        return _Tables(self.cos, self.sin, *(table[:num] for table in self[2:] if table is not None))


class CompressedAttention:
    """The compressed attention of a stage's blocks, up to the compressed outputs of this rank's groups.

    ``product`` and ``norm`` apply the weights of a name. ``like`` has the type and the device of activations. With
    ``recomputes`` backward computes the core again.
    """

    def __init__(
        self,
        ops: BackendOps,
        plan: PlanSpec,
        weights: SplitWeights,
        region: TensorParallelRegion,
        product: Apply,
        norm: Apply,
        weight_of: Callable[[str], Weight],
        like: Tensor,
        *,
        recomputes: bool,
    ) -> None:
        spec = plan.gpt.compressed_attention
        assert spec is not None
        self._ops, self._spec, self._weights, self._region = ops, spec, weights, region
        self._product, self._norm, self._weight_of, self._recomputes = product, norm, weight_of, recomputes
        self._size, self._batch_first = plan.gpt.size_of_head, plan.gpt.activation_order == "bsh"
        lengths = {*plan.sequence_lengths.values()}
        self._tables: Mapping[tuple[AttentionType, int], _Tables] = {
            (kind, length): _tables(ops, spec, kind, (plan.schedule.micro_batch_size, length), like)
            for kind in {*spec.layer_types}
            for length in lengths
        }

    def forward(self, x: Tensor, name: str, kind: AttentionType) -> Tensor:
        """The compressed outputs of this rank's groups [.., G * rank], from activations [.., H] between layers."""
        ops, rate = self._ops, self._spec.rate_of(kind)
        for_query, for_keys, *for_entries = ops.fork(x, 2 if rate is None else 4)
        low = self._norm(self._product(for_query, f"{name}.q_down"), f"{name}.q_norm")
        own = self._norm(self._product(for_keys, f"{name}.kv"), f"{name}.kv_norm")
        entering, labels = [low, own], [f"{name}.q.in", f"{name}.kv.in"]
        if for_entries:
            products = zip(for_entries, ("kv", "gate"), strict=True)
            both = [self._product(each, f"{name}.compressor.{part}") for each, part in products]
            entering.append(ops.concat(both, -1))
            labels.append(f"{name}.compressor.in")
        low, own, *both = self._region.enter_each(entering, labels)
        keys, length = self._rows_first(own), own.shape[1 if self._batch_first else 0]
        tables = self._tables[kind, length].of_rows(keys.shape[0])
        keys, unseen = self._rotated(keys, tables.cos, tables.sin), tables.unseen
        if rate is not None:
            kv, gate = ops.chunk(self._rows_first(both[0]), 2, -1)
            entries = self._entries(kv, gate, f"{name}.compressor", rate, tables, overlaps=kind == SPARSE)
            normed = self._norm(entries, f"{name}.compressor.norm")
            keys = ops.concat([keys, self._rotated(normed, tables.entry_cos, tables.entry_sin)], 1)
        if kind == SPARSE:
            unseen = self._unseen(x.detach(), low.detach(), name, tables)
        mix = partial(self._mixed, sinks=self._weight_of(f"{name}.sinks.weight"), unseen=unseen.unsqueeze(-3))
        inputs = self._query(low, name, tables), keys
        mixed = ops.recompute_in_backward(mix, *inputs) if self._recomputes else mix(*inputs)
        return self._compressed(self._rotated(mixed, tables.cos, -tables.sin), f"{name}.groups")

    def _query(self, low: Tensor, name: str, tables: _Tables) -> Tensor:
        """Normed and rotated queries [B, A, S, D]."""
        heads = self._product(low, f"{name}.q_up")
        heads = self._ops.rms_norm(heads.reshape([*heads.shape[:2], -1, self._size]))
        heads = self._ops.permute(heads, [0, 2, 1, 3] if self._batch_first else [1, 2, 0, 3])
        return self._rotated(heads, tables.cos, tables.sin)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the last R elements of [.., S, D] in pairs of neighbours."""
        ops, rope, size = self._ops, 2 * cos.shape[-1], heads.shape[-1]
        if rope < size:
            plain, pairs = ops.split(heads, [size - rope, rope], -1)
            return ops.concat([plain, self._rotated(pairs, cos, sin)], -1)
        pairs = heads.reshape([*heads.shape[:-1], rope // 2, 2])
        a, b = (part.squeeze(-1) for part in ops.chunk(pairs, 2, -1))
        return ops.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    def _entries(
        self, kv: Tensor, gate: Tensor, name: str, rate: int, tables: _Tables, *, overlaps: bool, fixed: bool = False
    ) -> Tensor:
        """Entries [B, T, D] before their norm, from the products of all tokens [B, S, D], or of twice that width."""
        ops, num = self._ops, tables.entry_cos.shape[-2]
        positions = self._weight_of(f"{name}.positions.weight")
        bias = self._weights.fixed(positions) if fixed else self._weights.deferred(positions)
        if tables.tokens is None:
            kv, gate = kv[:, : num * rate], gate[:, : num * rate]
        else:
            kv, gate = (ops.take_rows(part.flatten(0, 1), tables.tokens.flatten()) for part in (kv, gate))
        kv, gate = (part.reshape([-1, num, rate, part.shape[-1]]) for part in (kv, gate))
        gate = gate + bias
        if overlaps:
            kv, gate = self._overlapped(kv, 0.0), self._overlapped(gate, -np.inf, tables.begins)
        shares = ops.as_type_of(ops.softmax(ops.widened(gate), 2), kv)
        return (kv * shares).sum(2)

    def _overlapped(self, windows: Tensor, missing: float, begins: Tensor | None = None) -> Tensor:
        """The first half of each window before, then the second half of its own: [B, T, m, 2 D] to [B, T, 2 m, D]."""
        ops = self._ops
        first, second = ops.chunk(windows, 2, -1)
        before = ops.concat([ops.zeros_like(first[:, :1]) + missing, first[:, :-1]], 1)
        return ops.concat([before if begins is None else before + begins, second], 2)

    def _unseen(self, x: Tensor, low: Tensor, name: str, tables: _Tables) -> Tensor:
        """``unseen`` of the tables, with the entries that the indexer does not choose: [B, S, N].

        Factors that all scores share are left out, because they do not change the choice.
        """
        ops, spec, rate = self._ops, self._spec, self._spec.rate_of(SPARSE)
        assert rate is not None

        def product(x: Tensor, part: str) -> Tensor:
            return x @ self._weights.fixed(self._weight_of(f"{name}.indexer.{part}.weight"))

        own = ops.concat([product(x, part) for part in ("kv", "gate", "heads")], -1)
        gathered = self._rows_first(self._region.spread(own, f"{name}.indexer.in"))
        width = 2 * spec.index_head_dim
        kv, gate, heads = ops.split(gathered, [width, width, spec.index_n_heads], -1)
        entries = ops.rms_norm(self._entries(kv, gate, f"{name}.indexer", rate, tables, overlaps=True, fixed=True))
        entries = entries * self._weights.fixed(self._weight_of(f"{name}.indexer.norm.weight"))
        entries = self._rotated(entries, tables.entry_cos, tables.entry_sin)
        query = self._rows_first(product(low, "q"))  # [B, S, heads * size]
        query = ops.permute(query.reshape([*query.shape[:2], -1, spec.index_head_dim]), [0, 2, 1, 3])
        query = self._rotated(query, tables.cos, tables.sin)
        products = query.flatten(1, 2) @ ops.permute(entries, [0, 2, 1])
        products = ops.relu(products.reshape([*query.shape[:3], -1]))  # [B, heads, S, T]
        scores = (products * ops.permute(heads, [0, 2, 1]).unsqueeze(-1)).sum(1)
        near, far = ops.split(tables.unseen, [scores.shape[1], scores.shape[2]], -1)
        far = far + ops.unchosen(scores + far, spec.index_topk)
        return ops.concat([near + ops.zeros_like(far[:, :, :1]), far], -1)

    def _mixed(self, query: Tensor, keys: Tensor, *, sinks: Weight, unseen: Tensor) -> Tensor:
        """Softmax attention [B, A, S, D] of queries [B, A, S, D] to keys [B, N, D], which are also the values.

        The queries of all heads are rows of one product with the head that they share. A sink takes a part of each
        query's probability and has no value.
        """
        ops = self._ops
        rows, heads, length, size = query.shape
        scores = query.reshape([rows, heads * length, size]) @ ops.permute(keys, [0, 2, 1]) * size**-0.5
        scores = scores.reshape([rows, heads, length, -1]) + unseen
        sink = ops.zeros_like(scores[..., :1].detach()) + self._weights.deferred(sinks).reshape([-1, 1, 1])
        shares, _ = ops.split(ops.softmax(ops.concat([scores, sink], -1), -1), [scores.shape[-1], 1], -1)
        return (shares.reshape([rows, heads * length, -1]) @ keys).reshape(query.shape)

    def _compressed(self, mixed: Tensor, name: str) -> Tensor:
        """The product of each group of heads: [B, A, S, D] to [.., G * rank]."""
        ops, weight = self._ops, self._weight_of(f"{name}.weight")
        rows, _, length, _ = mixed.shape
        num_groups = self._spec.o_groups // self._region.num_ranks
        groups = mixed.reshape([rows, num_groups, -1, length, self._size])
        groups = ops.permute(groups, [1, 0, 3, 2, 4] if self._batch_first else [1, 3, 0, 2, 4])
        leading = groups.shape[:3]
        compressed = self._weights.grouped_evenly(groups.flatten(3).flatten(0, 2), weight)
        return ops.permute(compressed.reshape([*leading, -1]), [1, 2, 0, 3]).flatten(2)

    def _rows_first(self, x: Tensor) -> Tensor:
        """[B, S, ..] of [..]."""
        return x if self._batch_first else self._ops.permute(x, [1, 0, 2])


def _tables(
    ops: BackendOps, spec: CompressedAttentionSpec, kind: AttentionType, sizes: tuple[int, int], like: Tensor
) -> _Tables:
    """The tables of micro-batches of ``sizes``: rows, and the tokens of each."""
    rate, length = spec.rate_of(kind), sizes[1]
    base, scaling = (spec.rope_theta, None) if rate is None else (spec.compress_rope_theta, spec.rope_scaling)
    angles = rotary_angles(length, spec.qk_rope_head_dim, base, scaling)
    packed = [spec.documents_of(row, length) for row in range(sizes[0] if spec.documents else 1)]
    document = np.stack([np.repeat(np.arange(len(row)), row) for row in packed])  # of each token
    position = np.concatenate([np.arange(size) for row in packed for size in row]).reshape(document.shape)
    query, key = np.arange(length)[:, None], np.arange(length)
    is_seen = (key <= query) & (query - key < spec.sliding_window) & (document[:, :, None] == document[:, None])
    num = 0 if rate is None else spec.num_entries(kind, length)
    is_first = np.zeros((len(packed), 0), dtype=bool)
    first = np.zeros((len(packed), 0), dtype=np.int64)
    if rate is not None:
        left = np.stack([np.repeat(row, row) for row in packed]) - position
        first = np.nonzero((position % rate == 0) & (left >= rate))[1].reshape(len(packed), num)
        is_first = np.take_along_axis(position, first, 1) == 0
        is_own = np.take_along_axis(document, first, 1)[:, None] == document[:, :, None]
        is_seen = np.concatenate([is_seen, is_own & (first[:, None] + rate <= query + 1)], axis=-1)
    of_entries, unseen = angles[first], np.where(is_seen, 0.0, -np.inf)
    if spec.documents is None:
        of_entries, unseen = of_entries[0], unseen[0]
    tables = [np.cos(angles), np.sin(angles), np.cos(of_entries), np.sin(of_entries), unseen]
    if spec.documents is not None:
        tokens = first[:, :, None] + np.arange(rate or 1) + length * np.arange(len(packed))[:, None, None]
        tables += [tokens.reshape(len(packed), -1), np.where(is_first, -np.inf, 0.0)[:, :, None, None]]
    return _Tables(*(ops.constant(value, like) for value in tables))
