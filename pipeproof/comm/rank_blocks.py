"""The blocks of one rank: what it does around each forward and backward of a stage, and at the end of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from pipeproof.comm.transport import Transport, effective_transport, slice_range
from pipeproof.schedule.blocks import ANY, Blocks
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.ops import Op, OpKind, child_of, wait_for
from pipeproof.schedule.optable import TensorSpec
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layers import Collective, CollectiveKind, Layer

if TYPE_CHECKING:
    from pipeproof.comm.lower import LoweredPlan

DATA_AXES = ("ep", "dp")
"""Axes whose ranks see other micro-batches: over these every gradient of a dense layer is reduced."""

_CHILD_KIND = {
    CollectiveKind.ALL_REDUCE: OpKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER: OpKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER: OpKind.REDUCE_SCATTER,
}


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors at the stages' ends, and where each stands among them by (``input_grad``, stage)."""

    specs: tuple[TensorSpec, ...]
    index: Mapping[tuple[str, int], int]


def tensors_of(boundary: Boundary, num_stages: int) -> BoundaryTensors:
    """Input and output of each stage that has one, with their gradients."""
    placements = {
        "input": boundary.tp,
        "output": boundary.tp,
        "input_grad": boundary.grad_placement(),
        "output_grad": boundary.grad_placement(),
    }
    specs: list[TensorSpec] = []
    index: dict[tuple[str, int], int] = {}
    for stage in range(num_stages):
        has_side = {"input": stage > 0, "output": stage + 1 < num_stages}
        for name, placement in placements.items():
            if has_side[name.removesuffix("_grad")]:
                index[name, stage] = len(specs)
                label = f"{name.replace('_', ' ')} of stage {stage}"
                specs.append(TensorSpec(label, boundary.local_shape, boundary.dtype, str(placement), boundary.dims))
    return BoundaryTensors(tuple(specs), index)


class RankBlocks:
    """Writes the program of the rank at ``coords`` as blocks; ``groups`` are its own by axis."""

    def __init__(
        self,
        plan: LoweredPlan,
        coords: Mapping[str, int],
        tensors: BoundaryTensors,
        groups: Mapping[str, int],
        *,
        folded: bool,
    ) -> None:
        self._plan, self._coords, self._tensors, self._groups = plan, coords, tensors, groups
        self._folded = folded
        self._num_tp = plan.mesh.size("tp")
        self._declared = {True: plan.spec.transport.forward, False: plan.spec.transport.backward}
        self._program = plan.programs[coords["pp"]]
        self._forward_only = all(op.kind is OpKind.FORWARD for op in self._program)

    def write(self, blocks: Blocks, reduce_axes: Sequence[str]) -> None:
        """Append the rank's whole program."""
        block_of: dict[tuple[OpKind, int], int] = {}
        wait_of: dict[tuple[OpKind, int], int] = {}
        late = OpKind.FORWARD if self._forward_only else OpKind.BACKWARD
        waits: list[tuple[int, int]] = []
        for op in self._program:
            key = op.kind, op.stage
            assert op.micro_batch is not None
            if key not in block_of:
                block_of[key] = blocks.add(list(self._compute(*key)))
                late_send = self._send_of(*key)
                if late_send is not None and (late_send.kind is OpKind.SEND_FORWARD) == (late is OpKind.FORWARD):
                    wait_of[key] = blocks.add([Row(wait_for(late_send))])
            blocks.use(block_of[key], op.micro_batch)
            if key in wait_of:
                waits.append((wait_of[key], op.micro_batch))
        for block, micro_batch in waits:
            blocks.use(block, micro_batch)
        if not self._forward_only:
            for stage in sorted({op.stage for op in self._program}):
                blocks.use(blocks.add(list(self._update(stage, reduce_axes))))
        blocks.end_rank()

    def _compute(self, kind: OpKind, stage: int) -> Iterator[Row]:
        op = Op(kind, stage, ANY)
        forward = kind is OpKind.FORWARD
        if kind is not OpKind.BACKWARD_WEIGHT:  # which reads what F and I kept, and hands nothing on
            source = stage - 1 if forward else stage + 1
            if self._crosses(stage, source):
                receive = Op(OpKind.RECV_FORWARD if forward else OpKind.RECV_BACKWARD, stage, ANY)
                yield self._transfer(receive, source)
                yield Row(wait_for(receive))
                yield from self._gather(receive)
                if not forward:
                    yield Row(wait_for(Op(OpKind.SEND_FORWARD, stage, ANY)))
        yield Row(op)
        yield from self._children(op, self._collectives(kind, stage))
        send = self._send_of(kind, stage)
        if send is not None:
            yield from self._slice(send)
            yield self._transfer(send, stage + 1 if forward else stage - 1)

    def _send_of(self, kind: OpKind, stage: int) -> Op | None:
        """The send that hands on what a computation makes; None where nothing leaves the rank."""
        if kind is OpKind.FORWARD:
            return Op(OpKind.SEND_FORWARD, stage, ANY) if self._crosses(stage, stage + 1) else None
        if kind is OpKind.BACKWARD_WEIGHT or not self._crosses(stage, stage - 1):
            return None
        return Op(OpKind.SEND_BACKWARD, stage, ANY)

    def _crosses(self, stage: int, neighbour: int) -> bool:
        rank_of_stage = self._plan.rank_of_stage
        return neighbour in rank_of_stage and rank_of_stage[neighbour] != rank_of_stage[stage]

    def _message(self, op: Op) -> tuple[int, int, Transport]:
        """(tensor index, its local element count, effective transport) of a transfer."""
        incoming = op.kind in (OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD)
        side = "input" if incoming == op.is_forward else "output"
        tensor = self._tensors.index[side if op.is_forward else f"{side}_grad", op.stage]
        numel = self._tensors.specs[tensor].numel
        return tensor, numel, effective_transport(self._declared[op.is_forward], numel, self._num_tp)

    def _share(self, op: Op) -> tuple[int, int, int, int]:
        """(tensor, start, stop, shift) of what a transfer carries."""
        tensor, numel, transport = self._message(op)
        if transport is Transport.FULL:
            return tensor, 0, numel, 0
        start, stop = slice_range(numel, self._num_tp, self._coords["tp"])
        return tensor, start, stop, stop - start if self._folded else 0

    def _transfer(self, op: Op, neighbour: int) -> Row:
        tensor, start, stop, shift = self._share(op)
        pp = self._plan.rank_of_stage[neighbour]
        peer = pp if self._folded else self._plan.mesh.rank({**self._coords, "pp": pp})
        return Row(op, peer, tensor, start, stop, shift=shift)

    def _slice(self, send: Op) -> Iterator[Row]:
        if self._message(send)[2] is Transport.PARTIAL:
            tensor, start, stop, shift = self._share(send)
            kind = OpKind.SLICE_FORWARD if send.is_forward else OpKind.SLICE_BACKWARD
            yield Row(Op(kind, send.stage, ANY), NONE, tensor, start, stop, shift=shift)

    def _gather(self, receive: Op) -> Iterator[Row]:
        if self._message(receive)[2] is Transport.PARTIAL:
            tensor, start, stop, shift = self._share(receive)
            kind = OpKind.GATHER_FORWARD if receive.is_forward else OpKind.GATHER_BACKWARD
            yield Row(Op(kind, receive.stage, ANY), NONE, tensor, start, stop, self._groups["tp"], shift=shift)

    def _children(self, parent: Op, collectives: Iterator[Collective]) -> Iterator[Row]:
        for index, collective in enumerate(collectives):
            child = child_of(parent, index, _CHILD_KIND[collective.kind], collective.axis)
            group = self._groups[collective.axis]
            yield Row(child, stop=collective.numel, group=group, reduction=collective.reduction)

    def _collectives(self, kind: OpKind, stage: int) -> Iterator[Collective]:
        layers = self._plan.layers_of(stage)
        if kind is OpKind.FORWARD:
            for layer in layers:
                yield from layer.forward_collectives
        elif kind is not OpKind.BACKWARD_WEIGHT:
            for layer in reversed(layers):
                yield from layer.backward_collectives

    def _update(self, stage: int, reduce_axes: Sequence[str]) -> Iterator[Row]:
        layers = self._plan.layers_of(stage)
        for axis in reduce_axes:
            reduce = Op(OpKind.REDUCE_GRAD, stage, axis=axis)
            yield Row(reduce)
            yield from self._children(reduce, self._reductions(layers, axis))
        yield Row(Op(OpKind.STEP, stage))

    def _reductions(self, layers: Sequence[Layer], axis: str) -> Iterator[Collective]:
        """One all-reduce per parameter: over a data axis all of them, else those whose gradient is partial there."""
        for layer in layers:
            for parameter in layer.parameters:
                if axis in DATA_AXES or axis in parameter.partial_over:
                    numel = prod(parameter.tp.local_shape(parameter.shape, self._num_tp))
                    yield Collective(CollectiveKind.ALL_REDUCE, axis, numel, parameter.name)
