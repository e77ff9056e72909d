"""The vocabulary-parallel ends of the model: embedding, and head with its loss.

A tied head (arXiv:1608.05859) multiplies by the transpose of the embedding's weight, which it borrows. Both process all
MTP streams at once.
"""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import operations as ops


def embedding(model: ModelSpec, *, borrowed: bool = False) -> ops.Operations:
    """Embedded tokens; an MTP module borrows the weight."""
    hidden, lookup = model.hidden_size, ops.Lookup("embed", _embedding_weight(model, borrowed=borrowed))
    weights = (ops.Weight("embed.positions.weight", (model.seq_length, hidden)),)  # added to the sum over TP
    positions = ops.Elementwise(
        "embed.positions", (1, 3), None, (1, 3), whole=hidden, rows=ops.BETWEEN, weights=weights
    )
    learned = (positions,) if model.positions == "learned" else ()
    return lookup, ops.Leave("embed.out", hidden), *learned, ops.Dropout("embed.dropout", "embedding")


def head(model: ModelSpec) -> ops.Operations:
    """Logits and their cross-entropy."""
    hidden, tied = model.hidden_size, model.tied_embedding
    weight = ops.Weight("head.weight", (hidden, model.vocab_size), 1)
    weight = _embedding_weight(model, borrowed=True) if tied else weight
    logits = ops.Product("head", (weight,), entered=True, narrow=False, transposed=tied)
    return ops.Enter("head.in", hidden), logits, ops.Loss("head.loss", model.vocab_size)


def _embedding_weight(model: ModelSpec, *, borrowed: bool) -> ops.Weight:
    return ops.Weight("embed.weight", (model.vocab_size, model.hidden_size), 0, borrowed=borrowed)
