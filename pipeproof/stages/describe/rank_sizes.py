"""Sizes of a layer's operations on one rank."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.mtp_streams import mtp_streams_at


class RankSizes:
    """Rows and local sizes for one work item of ``size`` in the layer ``layer``; MTP streams are more rows.

    Each rank has an even part of the visits to experts: as many as its own tokens make.
    """

    def __init__(self, plan: PlanSpec, layer: str, size: MicroBatchSize) -> None:
        topology = plan.topology
        self.size = size.with_mtp_streams(mtp_streams_at(plan.gpt, layer))
        self.tp, self.cp, self.ep = topology.tp, topology.cp, topology.ep
        self.is_sharded_between = topology.sequence_parallel and topology.tp > 1
        self.tokens = Fraction(self.size.num_tokens, topology.cp)
        self.between = self.tokens / self.tp if self.is_sharded_between else self.tokens
        visits = self.tokens * (0 if plan.model.moe is None else plan.model.moe.top_k)
        self._rows = {
            ops.INSIDE: self.tokens, ops.BETWEEN: self.between, ops.VISITS: visits, ops.GATHERED: self.tokens * self.ep,
        }  # fmt: skip

    def rows(self, rows: ops.Rows) -> Fraction:
        """The number of rows."""
        return self._rows[rows]

    def elements(self, operation: ops.Elementwise | ops.GatherKeys | ops.Loss) -> int:
        """Elements of a row."""
        return operation.sharded // self.tp + operation.whole

    def vectors(self, norm: ops.Norm) -> Fraction:
        """The number of vectors of a norm."""
        return self.rows(norm.rows) * (norm.heads // self.tp if norm.heads else 1)

    def product(self, product: ops.Product) -> tuple[int, int, int]:
        """The inner size and the columns of a product, and the number of weights that share its rows."""
        shapes = [self._local_shape(weight) for weight in product.weights]
        inner, columns = shapes[0][-2], sum(shape[-1] for shape in shapes)
        return (columns, inner, 1) if product.transposed else (inner, columns, prod(shapes[0][:-2]))

    def _local_shape(self, weight: ops.Weight) -> tuple[int, ...]:
        ranks = {weight.tp_dim: self.tp, weight.ep_dim: self.ep}
        return tuple(n // ranks.get(dim, 1) for dim, n in enumerate(weight.shape))
