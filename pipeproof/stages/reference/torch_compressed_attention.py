"""Attention to near keys, compressed entries and sinks, with whole weights, for the reference on PyTorch.

Shape letters: S sequence, B rows, A heads, D head size, R elements with positions, T entries, m tokens of each, N = S +
T keys. Formulas are in ``describe/layers/attention.py``; the code shares nothing with the stages.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.stages.reference.shared_math import AttentionTables
from pipeproof.stages.reference.torch_reference_weights import WholeWeights, copies

Tensor: TypeAlias = torch.Tensor


class CompressedReference(NamedTuple):
    """The attention of a model's blocks of one type. Activations are [S, B, H] or [B, S, H]; ``size`` is a head's."""

    tables: AttentionTables
    weights: WholeWeights
    size: int
    sequence_first: bool

    is_sparse: bool

    def output(self, x: Tensor, name: str) -> Tensor:
        """The output of the attention ``name``, in the order of activations."""
        weights, rate = self.weights, self.tables.rate
        rows, length = (x.shape[1], x.shape[0]) if self.sequence_first else x.shape[:2]
        for_query, for_keys, *for_entries = copies(x, 2 if rate is None else 4)
        low = self._norm(weights.product(for_query, f"{name}.q_down.weight"), f"{name}.q_norm")
        keys = self._norm(weights.product(for_keys, f"{name}.kv.weight"), f"{name}.kv_norm")
        positions = torch.arange(length, device=x.device)
        keys = self._turned(self._by_rows(keys), positions)
        visible = torch.tensor(self.tables.seen(rows, length), device=x.device)
        if rate is not None:
            parts = zip(for_entries, ("kv", "gate"), strict=True)
            # Side by side, as ranks exchange them: the memory layout of gradients chooses the kernels of products.
            each = [weights.product(own, f"{name}.compressor.{part}.weight") for own, part in parts]
            kv, gate = self._by_rows(torch.cat(each, -1)).chunk(2, -1)
            bias = weights.value(f"{name}.compressor.positions.weight")
            windows = torch.tensor(self.tables.windows(rows, length), device=x.device)
            entries = self._norm(pooled(kv, gate, bias, windows, overlaps=self.is_sparse), f"{name}.compressor.norm")
            keys = torch.cat([keys, self._turned(entries, windows[..., 0])], 1)
            if self.is_sparse:
                with torch.no_grad():
                    visible[..., length:] &= self._chosen(x, low, f"{name}.indexer", visible[..., length:], windows)
        query = weights.product(low, f"{name}.q_up.weight").unflatten(-1, (-1, self.size))
        query = F.rms_norm(query, (self.size,), eps=1e-6)
        query = self._turned(query.permute((1, 2, 0, 3) if self.sequence_first else (0, 2, 1, 3)), positions)
        mixed = self._mixed(query, keys, weights.value(f"{name}.sinks.weight"), visible)
        heads = self._turned(mixed, -positions)  # [B, A, S, D]
        return self._projected(heads, name)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        # Rows: with more dims, the memory layout of the gradient is the order in which the weight adds it.
        rows = F.rms_norm(x.reshape(-1, x.shape[-1]), x.shape[-1:], self.weights.value(f"{name}.weight"), 1e-6)
        return rows.view(x.shape)

    def _by_rows(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.sequence_first else x

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the pairs (0, 1), (2, 3), .. of the last R elements of [.., S, D]; back at negative positions."""
        rope = self.tables.spec.qk_rope_head_dim
        angles = positions[..., None] * torch.tensor(self.tables.radians, device=x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., x.shape[-1] - rope :].unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return torch.cat([x[..., : x.shape[-1] - rope], pairs.flatten(-2)], -1)

    def _chosen(self, x: Tensor, low: Tensor, name: str, earlier: Tensor, windows: Tensor) -> Tensor:
        """True for the entries [B, S, T] with the largest scores; the first of equal ones."""
        spec, value = self.tables.spec, self.weights.value
        kv, gate, of_heads = (self._by_rows(x @ value(f"{name}.{part}.weight")) for part in ("kv", "gate", "heads"))
        bias = value(f"{name}.positions.weight")
        # The kernels and roundings of the stages: other last bits of a score would be other choices.
        entries = F.rms_norm(pooled(kv, gate, bias, windows, overlaps=True), (spec.index_head_dim,), eps=1e-6)
        entries = entries * value(f"{name}.norm.weight")
        positions = torch.arange(x.shape[0 if self.sequence_first else 1], device=x.device)
        entries = self._turned(entries, windows[..., 0])
        query = self._by_rows(low @ value(f"{name}.q.weight")).unflatten(-1, (-1, spec.index_head_dim)).transpose(1, 2)
        query = self._turned(query, positions)
        products = F.relu((query.flatten(1, 2) @ entries.mT).unflatten(1, query.shape[1:3]))
        scores = (products * of_heads.mT.unsqueeze(-1)).sum(1)
        causal = scores.masked_fill(~earlier, -torch.inf)
        best = torch.sort(causal, dim=-1, descending=True, stable=True).indices[..., : spec.index_topk]
        return torch.zeros_like(scores).scatter(-1, best, 1.0) > 0

    def _mixed(self, query: Tensor, keys: Tensor, sinks: Tensor, visible: Tensor) -> Tensor:
        """Attention [B, A, S, D] to [B, N, D]; each head's sink is one more logit, without a value."""
        stacked = query.flatten(1, 2)  # the queries of all heads are rows of one product
        logits = (stacked @ keys.mT * self.size**-0.5).unflatten(1, query.shape[1:3])
        logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
        of_sinks = sinks.view(-1, 1, 1).expand(*query.shape[:3], 1)
        probabilities = torch.cat([logits, of_sinks], -1).softmax(-1)
        return (probabilities[..., :-1].flatten(1, 2) @ keys).unflatten(1, query.shape[1:3])

    def _projected(self, heads: Tensor, name: str) -> Tensor:
        """The product of each group of heads, and the product that mixes the groups."""
        groups = heads.unflatten(1, (self.tables.spec.o_groups, -1))  # [B, groups, heads of each, S, D]
        order = (1, 3, 0, 2, 4) if self.sequence_first else (1, 0, 3, 2, 4)
        each = groups.permute(order).flatten(3)
        rows = each.flatten(0, 2)
        size = len(rows) // self.tables.spec.o_groups
        low = self.weights.expert_products(rows, f"{name}.groups.weight", [size] * self.tables.spec.o_groups)
        joined = low.unflatten(0, each.shape[:3]).permute(1, 2, 0, 3).flatten(2)
        return self.weights.product(joined, f"{name}.out.weight")


def pooled(kv: Tensor, gate: Tensor, bias: Tensor, windows: Tensor, *, overlaps: bool) -> Tensor:
    """Entries [B, T, D] from two products [B, S, D]; of [B, S, 2 D] each has slots of the window before, too.

    For ``windows`` [B, T, 2] see ``AttentionTables``.
    """

    def windows_of(x: Tensor) -> Tensor:
        tokens = windows[..., :1] + torch.arange(len(bias), device=x.device)
        return torch.stack([own[index] for own, index in zip(x, tokens, strict=True)])

    kv, gate = windows_of(kv), windows_of(gate)
    gate = gate + bias
    if overlaps:
        size = kv.shape[-1] // 2
        kv, gate = (
            torch.cat([_before(x[..., :size], windows, missing), x[..., size:]], 2)
            for x, missing in ((kv, 0.0), (gate, -torch.inf))
        )
    shares = gate.float().softmax(2).to(gate.dtype) if gate.element_size() == 2 else gate.softmax(2)
    return (kv * shares).sum(2)


def _before(x: Tensor, windows: Tensor, missing: float) -> Tensor:
    """The window before each one [B, T, m, D], or ``missing``."""
    previous = torch.cat([x[:, :1], x[:, :-1]], 1)
    return torch.where(windows[..., 1, None, None] > 0, missing, previous)
