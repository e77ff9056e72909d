"""The GPT as a list of layers: parameters, their placement over TP, and their collectives.

They are read from the operations in ``layers``. ``typed_gpt`` derives the same from the types of independently written
operations, and a rule compares the two.
"""

from __future__ import annotations

from dataclasses import replace

from pipeproof.specs.axis_layout import INVARIANT, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layer import (
    COUNTS_DTYPE,
    Collective,
    CollectiveKind,
    Layer,
    Parameter,
    is_block,
    layer_kind,
    layer_order,
    loss_dtype,
)
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import RankSizes


def describe_gpt(plan: PlanSpec, size: MicroBatchSize | None = None) -> tuple[Layer, ...]:
    """The layers of the plan's GPT in execution order (``layer_order``).

    Column-parallel weights are sharded on their output dim, row-parallel weights on their input dim (Megatron-LM,
    arXiv:1909.08053). With sequence parallelism the all-reduces become all-gather / reduce-scatter pairs
    (arXiv:2205.05198).

    Collectives count the elements of a micro-batch of ``size``, by default the plan's full size.
    """
    size = size or MicroBatchSize(plan.gpt.seq_length, plan.schedule.micro_batch_size)
    operations = dict[str, ops.Operations]()
    layers = []
    for name in layer_order(plan.gpt):
        kind = layer_kind(plan.model, name)
        if kind not in operations:
            operations[kind] = layer_operations(plan.gpt, name)
        layers.append(_Describer(plan, name, size).layer(operations[kind]))
    return tuple(layers)


def operation_collectives(
    plan: PlanSpec, name: str, size: MicroBatchSize
) -> tuple[tuple[tuple[Collective, ...], tuple[Collective, ...]], ...]:
    """The collectives of forward and of backward of each operation of a layer, in the order of forward."""
    return _Describer(plan, name, size).collectives(layer_operations(plan.gpt, name))


class _Describer:
    def __init__(self, plan: PlanSpec, name: str, size: MicroBatchSize) -> None:
        self._plan, self._name = plan, name
        self._prefix = f"{name}." if is_block(name) else ""
        self._sizes = RankSizes(plan, name, size)

    def layer(self, operations: ops.Operations) -> Layer:
        seen = [(weight, rows) for weights, rows in map(ops.weights_of, operations) for weight in weights]
        steps = self.collectives(operations)
        return Layer(
            self._name,
            tuple(self._parameter(weight, rows) for weight, rows in seen if not weight.borrowed),
            tuple(c for forward, _ in steps for c in forward),
            tuple(c for _, backward in reversed(steps) for c in backward),
            tuple(self._parameter(weight, rows) for weight, rows in seen if weight.borrowed),
        )

    def collectives(
        self, operations: ops.Operations
    ) -> tuple[tuple[tuple[Collective, ...], tuple[Collective, ...]], ...]:
        """The collectives of forward and of backward, by operation."""
        return tuple(self._collectives(operation) for operation in operations)

    def _parameter(self, weight: ops.Weight, rows: ops.Rows) -> Parameter:
        """The parameter of a weight: each TP rank has an addend of the gradient if it sees other rows or columns."""
        is_whole, sizes = weight.trained and weight.tp_dim is None, self._sizes
        tp_dim, ep_dim = sizes.cut_dims(weight)
        is_partial = is_whole and (sizes.is_sharded_between if rows in (ops.BETWEEN, ops.STREAMS) else sizes.tp > 1)
        return Parameter(
            weight.name if weight.borrowed else f"{self._prefix}{weight.name}",
            weight.shape,
            INVARIANT if tp_dim is None else sharded(tp_dim),
            ("tp",) * is_partial + ("cp",) * (sizes.cp > 1 and weight.trained),
            weight.init_std,
            INVARIANT if ep_dim is None else sharded(ep_dim),
            weight.init_value,
        )

    def _collectives(self, operation: ops.Operation) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        sizes, label = self._sizes, f"{self._prefix}{operation.name}"
        back = f"{label}.grad"
        match operation:
            case ops.Enter() if sizes.tp > 1:
                numel = int(sizes.tokens * operation.size)
                entered = self._gather(numel, label, feeds_weights=operation.feeds_weights)
                return entered, self._sum(numel, back) if operation.trained else ()
            case ops.Leave() if sizes.tp > 1:
                numel = int(sizes.tokens * operation.size)
                return self._sum(numel, label), self._gather(numel, back)
            case ops.GatherKeys() if sizes.cp > 1:
                numel = int(sizes.tokens * sizes.elements(operation))
                gather = Collective(CollectiveKind.ALL_GATHER, "cp", numel, label)
                return (gather,), (Collective(CollectiveKind.REDUCE_SCATTER, "cp", numel * sizes.cp, back),)
            case ops.Exchange() if sizes.ep > 1:
                kind, counts = CollectiveKind.ALL_TO_ALL, operation.counts
                if counts:
                    return (Collective(kind, "ep", counts, label, dtype=COUNTS_DTYPE, per_token=False),), ()
                numel = int(sizes.rows(ops.VISITS) * self._plan.gpt.hidden_size)
                forward = Collective(kind, "ep", numel, label, dtype=operation.dtype)
                return (forward,), (replace(forward, label=back, dtype=operation.grad_dtype),)
            case ops.GatherTokens() if sizes.ep > 1:
                gather = Collective(CollectiveKind.ALL_GATHER, "ep", int(sizes.tokens * operation.size), label)
                return (gather,), (self._results(operation.size, back),)
            case ops.SumResults() if sizes.ep > 1:
                gather = Collective(CollectiveKind.ALL_GATHER, "ep", int(sizes.tokens * operation.size), back)
                return (self._results(operation.size, label),), (gather,)
            case ops.Loss() if sizes.tp > 1:  # one number per token, three times
                kind, numel, dtype = CollectiveKind.ALL_REDUCE, int(sizes.tokens), loss_dtype(self._plan.run.dtype)
                steps = (("max", "max"), ("sum_exp", "sum"), ("target", "sum"))
                return tuple(Collective(kind, "tp", numel, f"{label}.{step}", how, dtype) for step, how in steps), ()
            case _:
                return (), ()

    def _results(self, size: int, label: str) -> Collective:
        """The sum of the EP ranks' addends for all their tokens."""
        numel = int(self._sizes.rows(ops.GATHERED) * size)
        return Collective(CollectiveKind.REDUCE_SCATTER, "ep", numel, label)

    def _gather(self, numel: int, label: str, *, feeds_weights: bool = False) -> tuple[Collective, ...]:
        """With sequence parallelism a gather of all tokens, which every rank enters with its own part of them."""
        kind, numel = CollectiveKind.ALL_GATHER, numel // self._sizes.tp
        gather = Collective(kind, "tp", numel, label, feeds_weights=feeds_weights)
        return (gather,) if self._sizes.is_sharded_between else ()

    def _sum(self, numel: int, label: str) -> tuple[Collective, ...]:
        """The sum of all ranks' addends; with sequence parallelism each rank gets its own tokens."""
        kind = CollectiveKind.REDUCE_SCATTER if self._sizes.is_sharded_between else CollectiveKind.ALL_REDUCE
        return (Collective(kind, "tp", numel, label),)
