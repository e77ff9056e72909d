"""Lowering: from per-rank programs of a pipeline to the op graph of every global rank.

Three things are added to the programs: the peer and channel of each transfer,
the slices and gathers of the ``partial`` transport, and below each compute
operation the tensor-parallel collectives that it will really issue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeproof.comm.mesh import Mesh
from pipeproof.comm.transport import Transport, effective_transport, slice_range
from pipeproof.schedule import GENERATORS
from pipeproof.schedule.build import build_graph
from pipeproof.schedule.ops import (
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
    child_of,
)
from pipeproof.schedule.optable import NONE, Group, OpGraph, Row, TensorSpec
from pipeproof.schedule.programs import Programs, add_transfers, add_update
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, describe_boundary
from pipeproof.stages.describe.layers import Collective, CollectiveKind, Layer, describe_gpt
from pipeproof.stages.describe.partition import stage_layers

_CHILD_KIND = {
    CollectiveKind.ALL_REDUCE: OpKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER: OpKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER: OpKind.REDUCE_SCATTER,
}


MAX_OPERATIONS = 5_000_000
"""Most operations of a step, over all ranks: about a kilobyte of memory each."""

_MOST_OPS_PER_STAGE = 15
"""Operations of one micro-batch on one stage without its collectives: two computes, two of each kind of transfer
with its wait, slice and gather, and one to spare for the step's end."""

TOO_LARGE = RuleDoc(
    code="PP116",
    title="the plan has more operations than this release holds in memory",
    severity="error",
    explanation=(
        "Every operation of every rank is a row of the op table. Replicas along dp and tp run the same programs, so "
        "a plan with fewer of them has the same verdict."
    ),
    wrong="topology: {pp: 16, tp: 8, dp: 1024}",
    right="topology: {pp: 16, tp: 8, dp: 2}",
)


@dataclass(frozen=True)
class LoweredPlan:
    """A plan with everything that is derived from it: one object for rules, simulator and executor."""

    spec: PlanSpec
    mesh: Mesh
    layers: tuple[Layer, ...]
    stages: tuple[tuple[str, ...], ...]
    boundary: Boundary
    programs: Programs
    graph: OpGraph

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        """The described layers by name."""
        return {layer.name: layer for layer in self.layers}

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        """The described layers of one stage, in execution order."""
        return tuple(self.layer_by_name[name] for name in self.stages[stage])


def mesh_of(plan: PlanSpec) -> Mesh:
    """The device mesh that ``topology`` describes."""
    topology = plan.topology
    return Mesh(topology.order, tuple(getattr(topology, axis) for axis in topology.order))


def lower(plan: PlanSpec, *, boundary: Boundary | None = None) -> LoweredPlan:
    """Derive layers, stages, programs and the op graph of a plan. Linear in operations.

    ``boundary`` puts another tensor in place of the model's own between the
    stages, to check and simulate what a model of one's own would send.

    Raises:
        BadPlanAtError: the layers cannot be cut onto the stages, or there are
            more than ``MAX_OPERATIONS``.
    """
    mesh = mesh_of(plan)
    layers = describe_gpt(plan)
    _require_moderate_size(plan, mesh, layers)
    stages = stage_layers(plan)
    boundary = boundary or describe_boundary(plan)
    programs = plan_programs(plan, layers)
    by_name = {layer.name: layer for layer in layers}
    lowering = _Lowering(plan, mesh, boundary, [tuple(by_name[n] for n in names) for names in stages])
    rows = [list(lowering.rank_rows(rank, programs)) for rank in range(mesh.num_ranks)]
    graph = build_graph(rows, lowering.tensors, lowering.groups)
    return LoweredPlan(plan, mesh, layers, stages, boundary, programs, graph)


def _require_moderate_size(plan: PlanSpec, mesh: Mesh, layers: Sequence[Layer]) -> None:
    """Refuse before the work begins what memory could not hold at its end."""
    per_micro_batch = _MOST_OPS_PER_STAGE * plan.topology.pp
    per_micro_batch += sum(len(layer.forward_collectives) + len(layer.backward_collectives) for layer in layers)
    num_replicas = mesh.num_ranks // plan.topology.pp
    most = num_replicas * plan.schedule.num_micro_batches * per_micro_batch
    if most > MAX_OPERATIONS:
        raise BadPlanAtError(
            Finding(
                TOO_LARGE.code,
                Severity.ERROR,
                f"{mesh.num_ranks} ranks and {plan.schedule.num_micro_batches} micro-batches make up to {most:,} "
                f"operations in a step, more than the {MAX_OPERATIONS:,} that this release holds",
                help="check the plan with fewer data-parallel ranks or micro-batches: replicas are alike",
            ),
            ("schedule", "num_micro_batches"),
        )


def plan_programs(plan: PlanSpec, layers: Sequence[Layer]) -> Programs:
    """The plan's programs, one per pipeline rank, with transfers, gradient reductions and optimizer."""
    compute = GENERATORS[plan.schedule.kind](plan.topology.pp, plan.schedule.num_micro_batches)
    partial_axes = {axis for layer in layers for p in layer.parameters for axis in p.partial_over}
    reduce_axes: list[str] = [axis for axis in ("tp", "cp") if axis in partial_axes]
    if plan.topology.dp > 1:
        reduce_axes.append("dp")
    return add_update(add_transfers(compute), reduce_axes)


class _Lowering:
    """The plan's tensors and groups, and the rows of one rank after another."""

    def __init__(self, plan: PlanSpec, mesh: Mesh, boundary: Boundary, stages: Sequence[tuple[Layer, ...]]) -> None:
        self._mesh, self._stages = mesh, stages
        self._num_tp = plan.topology.tp
        self._declared = {True: plan.transport.forward, False: plan.transport.backward}
        self.tensors: list[TensorSpec] = []
        self._tensor_index: dict[tuple[str, int], int] = {}
        for stage in range(len(stages)):
            self._add_tensors(stage, boundary)
        self.groups: list[Group] = [
            group for axis in ("tp", "cp", "ep", "dp") if mesh.size(axis) > 1 for group in mesh.groups(axis)
        ]
        self._group_of = {(g.axis, rank): i for i, g in enumerate(self.groups) for rank in g.ranks}

    def _add_tensors(self, stage: int, boundary: Boundary) -> None:
        placements = {
            "input": boundary.tp,
            "output": boundary.tp,
            "input_grad": boundary.grad_placement(),
            "output_grad": boundary.grad_placement(),
        }
        has_side = {"input": stage > 0, "output": stage + 1 < len(self._stages)}
        for name, placement in placements.items():
            if has_side[name.removesuffix("_grad")]:
                self._tensor_index[name, stage] = len(self.tensors)
                label = f"{name.replace('_', ' ')} of stage {stage}"
                self.tensors.append(
                    TensorSpec(label, boundary.local_shape, boundary.dtype, str(placement), boundary.dims)
                )

    def rank_rows(self, rank: int, programs: Programs) -> Iterator[Row]:
        coords = self._mesh.coords(rank)
        for op in programs[coords["pp"]]:
            if op.kind in TRANSFER_KINDS:
                yield from self._transfer(op, coords)
            elif op.kind is OpKind.WAIT and op.target is not None and op.target.kind in RECV_KINDS:
                yield Row(op)
                yield from self._gather(op.target, rank)
            else:
                yield Row(op)
                yield from self._children(op, rank)

    def _message(self, op: Op) -> tuple[int, int, Transport]:
        """(tensor index, its local element count, effective transport) of a transfer."""
        incoming = op.kind in RECV_KINDS
        side = ("input" if incoming else "output") if op.is_forward else ("output" if incoming else "input")
        tensor = self._tensor_index[side if op.is_forward else f"{side}_grad", op.stage]
        numel = self.tensors[tensor].numel
        return tensor, numel, effective_transport(self._declared[op.is_forward], numel, self._num_tp)

    def _transfer(self, op: Op, coords: Mapping[str, int]) -> Iterator[Row]:
        tensor, numel, transport = self._message(op)
        step = 1 if (op.kind in SEND_KINDS) == op.is_forward else -1
        peer = self._mesh.rank({**coords, "pp": coords["pp"] + step})
        start, stop = 0, numel
        if transport is Transport.PARTIAL:
            start, stop = slice_range(numel, self._num_tp, coords["tp"])
            if op.kind in SEND_KINDS:
                kind = OpKind.SLICE_FORWARD if op.is_forward else OpKind.SLICE_BACKWARD
                yield Row(Op(kind, op.stage, op.micro_batch), NONE, tensor, start, stop)
        yield Row(op, peer, tensor, start, stop)

    def _gather(self, receive: Op, rank: int) -> Iterator[Row]:
        tensor, numel, transport = self._message(receive)
        if transport is Transport.PARTIAL:
            start, stop = slice_range(numel, self._num_tp, self._mesh.coords(rank)["tp"])
            kind = OpKind.GATHER_FORWARD if receive.is_forward else OpKind.GATHER_BACKWARD
            op = Op(kind, receive.stage, receive.micro_batch)
            yield Row(op, NONE, tensor, start, stop, self._group_of["tp", rank])

    def _children(self, op: Op, rank: int) -> Iterator[Row]:
        for index, collective in enumerate(self._collectives(op)):
            group = self._group_of[collective.axis, rank]
            child = child_of(op, index, _CHILD_KIND[collective.kind], collective.axis)
            yield Row(child, stop=collective.numel, group=group, reduction=collective.reduction)

    def _collectives(self, op: Op) -> Iterator[Collective]:
        layers = self._stages[op.stage]
        if op.kind is OpKind.FORWARD:
            for layer in layers:
                yield from layer.forward_collectives
        elif op.kind in COMPUTE_KINDS and op.kind is not OpKind.BACKWARD_WEIGHT:
            for layer in reversed(layers):
                yield from layer.backward_collectives
        elif op.kind is OpKind.REDUCE_GRAD:
            assert op.axis is not None
            yield from self._reductions(layers, op.axis)

    def _reductions(self, layers: Sequence[Layer], axis: str) -> Iterator[Collective]:
        """One all-reduce per parameter: over dp all of them, else those whose gradient is partial there."""
        for layer in layers:
            for parameter in layer.parameters:
                if axis == "dp" or axis in parameter.partial_over:
                    numel = 1
                    for size in parameter.tp.local_shape(parameter.shape, self._num_tp):
                        numel *= size
                    yield Collective(CollectiveKind.ALL_REDUCE, axis, numel, parameter.name)
