"""Norms: RMSNorm (arXiv:1910.07467), or LayerNorm (arXiv:1607.06450) with a weight and a bias."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import operations as ops


def norm(model: ModelSpec, name: str, size: int | None = None, *, heads: int = 0, is_input: bool = False) -> ops.Norm:
    """A norm of ``size`` elements, by default the hidden size, or of that many for each of a token's ``heads``."""
    shape = (size or model.hidden_size,)
    weight = ops.Weight(f"{name}.weight", shape, init_std=None)
    if model.norm == "rms":
        return ops.Norm(name, *shape, (weight,), (4, 2), (8, 3), (2, 2), factors=1, heads=heads, is_input=is_input)
    weights = weight, ops.bias_of(weight)  # also a mean and a bias, and the gradients of both
    return ops.Norm(name, *shape, weights, (7, 2), (11, 3), (3, 2), factors=2, heads=heads, is_input=is_input)
