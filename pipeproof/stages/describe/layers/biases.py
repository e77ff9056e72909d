"""Biases of the products of attention and MLPs."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import operations as ops


def with_biases(model: ModelSpec, operations: ops.Operations) -> ops.Operations:
    """The operations of a sub-layer with the biases that the model has.

    A column-parallel product adds its biases to its own columns. That of a row-parallel product is added once, after
    the sum over TP.
    """
    biased, row_parallel = list[ops.Operation](), ""
    for operation in operations:
        if isinstance(operation, ops.Product) and _has_bias(model, operation):
            if operation.entered:
                biased.append(operation._replace(biased=True))
                continue
            row_parallel = operation.name
        biased.append(operation)
        if isinstance(operation, ops.Leave) and row_parallel:
            bias = ops.Weight(f"{row_parallel}.bias", (operation.size,), init_std=None, init_value=0.0)
            costs, rows = ((1, 2), None, (1, 1)), ops.BETWEEN
            biased.append(ops.Elementwise(bias.name, *costs, whole=operation.size, rows=rows, weights=(bias,)))
    return tuple(biased)


def _has_bias(model: ModelSpec, product: ops.Product) -> bool:
    return model.biases == "all" or (model.biases == "qkv" and product.name == "attn.qkv")
