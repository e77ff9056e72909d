"""Rows of one rank around each forward and backward of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from pipeproof.comm.plan_context import PACKED, BoundaryTensors, PlanContext, is_packed
from pipeproof.comm.step_end_rows import ADDS, StepEnd
from pipeproof.schedule.columns import ANY, NONE, Row, work_item_of
from pipeproof.schedule.ops import (
    COMPUTE_KINDS,
    FORWARD_KINDS,
    META_KINDS,
    META_OF,
    RECV_KINDS,
    SEND_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
    child_of,
    free_of,
    part_of,
    wait_for,
)
from pipeproof.schedule.programs import Program
from pipeproof.specs.schedule import Half
from pipeproof.stages.describe.boundary import Boundary, Transport, effective_transport, slice_range
from pipeproof.stages.describe.layer import Collective, backward_calls, exchanges, weight_calls
from pipeproof.stages.describe.stage_memory import shards_gradients, shards_weights

if TYPE_CHECKING:
    from pipeproof.schedule.alternation import SegmentRows

EXPERTS_QUEUE = "ep"
"""The queue of the collectives over ``ep`` of alternating computations."""


@dataclass(frozen=True, slots=True)
class _Message:
    """Content of one send or receive of an operation: a range of a tensor, to or from a TP rank at the other end."""

    tensor: int
    start: int
    stop: int
    peer_tp: int
    transport: Transport


_INPUT_BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT})


def _communicator(op: Op) -> str:
    """The communicator of a direct edge's transfer: one for each pair of stages and direction."""
    if op.index is None:
        return ""
    return f"{op.stage}>{op.index}" if op.kind in SEND_KINDS else f"{op.index}>{op.stage}"


class Work(NamedTuple):
    """Everything that the rows around a computation depend on.

    Its kind and stage, the size of its work item, and the pipeline ranks that
    have this work item on the stages before and after (``NONE`` at the ends).
    ``turn`` is a work item on the same ranks: those at the other ends of direct edges may depend on it.
    """

    kind: OpKind
    stage: int
    variant: int
    before: int
    after: int
    turn: int = 0


class RankBlocks:
    """Writes the program of the rank at ``coords``; ``graph_rank`` finds peers.

    ``groups`` are the rank's own by axis, ``copies`` the groups with other holders
    of its stages or weights, by their pipeline ranks. With ``fold_tp`` the rank
    represents all its TP ranks, and ranges move by their ``shift`` from one to the next.
    """

    def __init__(
        self,
        plan: PlanContext,
        coords: Mapping[str, int],
        tensors: BoundaryTensors,
        groups: Mapping[str, int],
        copies: Mapping[tuple[int, ...], int],
        graph_rank: Mapping[int, int],
        *,
        fold_tp: bool,
    ) -> None:
        self._plan, self._coords, self._tensors = plan, coords, tensors
        self._groups, self._copies = groups, copies
        self._graph_rank, self._fold_tp = graph_rank, fold_tp
        self._num_tp = plan.mesh.size("tp")
        self._declared = {True: plan.spec.transport.forward, False: plan.spec.transport.backward}
        self._program = plan.programs[coords["pp"]]
        self._first_trained, self._num_turns = plan.spec.first_trained, lcm(*plan.spec.num_replicas)
        self.step_end = StepEnd(plan, coords, groups, copies, self._issued)

    @cached_property
    def _forward_only(self) -> bool:
        return all(op.kind is OpKind.FORWARD for op in self._program)

    @property
    def program(self) -> Program:
        """The computations of the rank."""
        return self._program

    def given(self, rows: Iterable[Row], reduce_axes: Sequence[str]) -> Iterator[Row]:
        """The rows of a program with its own communication; fields that it leaves open are filled in.

        These are the tensors and ranges of its transfers, slices and gathers
        if the transport has them, the collectives below computations, and
        reductions and the optimizer if the program has no STEP.
        """
        has_step = False
        with_tensors = {row.op for row in rows if row.tensor != NONE}  # they have a row and a wait for each tensor
        for row in rows:
            op, has_step = row.op, has_step or row.op.kind is OpKind.STEP
            about = op.target if op.kind is OpKind.WAIT and op.target is not None else op
            is_open = row.tensor == NONE and not (op.kind is OpKind.WAIT and about in with_tensors)
            if is_open and about.kind in TRANSFER_KINDS - META_KINDS:
                yield from self._given_transfer(row, about)
            elif op.kind is OpKind.REDUCE_GRAD and op.axis is None and reduce_axes:
                yield from self.step_end.reduce(op.stage, reduce_axes)
            else:
                yield self._to_graph(row)
                if op.kind in COMPUTE_KINDS:
                    yield from self._children(op, self.variant(self.work_item(op)))
        if not has_step:
            reduced = {row.op.stage for row in rows if row.op.kind is OpKind.REDUCE_GRAD}
            yield from self.step_end.given(reduced, reduce_axes)

    def _to_graph(self, row: Row) -> Row:
        """A row whose peer is a pipeline rank, with the graph's rank in its place."""
        return row if row.peer == NONE else replace(row, peer=self._peer(row.peer, self._coords["tp"]))

    def _given_transfer(self, row: Row, transfer: Op) -> Iterator[Row]:
        variant = self.variant(self.work_item(transfer))
        messages = self._messages(transfer, variant)
        if row.op.kind is OpKind.WAIT:
            yield from [row] * len(messages)
            yield from self._gather(transfer, variant)
            return
        yield from self._slice(transfer, variant)
        for message in messages:
            filled = self._row(transfer, message, row.peer)
            yield replace(row, peer=filled.peer, tensor=filled.tensor, start=filled.start, stop=filled.stop,
                          shift=filled.shift, communicator=row.communicator or filled.communicator)  # fmt: skip

    def before(self, work: Work, batch: int) -> Iterator[Row]:
        """The receives of a computation's inputs, just in time."""
        yield from self.receive(work, batch)
        yield from self.ready(work, batch)

    def receive(self, work: Work, batch: int) -> Iterator[Row]:
        """The posted receives of a computation's inputs from other ranks."""
        for receive, source in self._receives_of(work, batch):
            messages = self._messages(receive, work.variant)
            for shape in (shapes := [*self._shapes(receive, messages, source)]):
                yield shape
            for shape in shapes:  # a receive needs a buffer, and the buffer its size
                yield Row(wait_for(shape.op))
            for message in messages:
                yield self._row(receive, message, source)

    def ready(self, work: Work, batch: int) -> Iterator[Row]:
        """The waits of a computation: for its input, and for the send that reads the tensor that it will free."""
        for receive, _ in self._receives_of(work, batch):
            for _ in self._messages(receive, work.variant):
                yield Row(wait_for(receive))
            yield from self._gather(receive, work.variant)
        if work.kind in _INPUT_BACKWARDS:
            for send, _ in self.sends_of(work._replace(kind=OpKind.FORWARD), batch):
                yield from self.wait(send, work.variant)

    def _receives_of(self, work: Work, batch: int) -> list[tuple[Op, int]]:
        """The receives of a computation's inputs, with the pipeline rank that sends each; none for inputs on the rank.

        A W reads the activations that F and I kept.
        """
        if work.kind is OpKind.FORWARD:
            return self._transfers(OpKind.RECV_FORWARD, work, batch, work.before)
        if work.kind is OpKind.BACKWARD_WEIGHT:
            return []
        return self._transfers(OpKind.RECV_BACKWARD, work, batch, work.after)

    def compute(self, work: Work, batch: int) -> Iterator[Row]:
        """A computation with the collectives inside it; the use of the block defines its pair."""
        op = Op(work.kind, work.stage, batch)
        yield Row(op, batch=ANY)
        yield from self._children(op, work.variant)

    def alternate(self, works: Sequence[Work], batches: Sequence[int], order: Sequence[Half]) -> Iterator[Row]:
        """A forward and a backward that alternate at the overlap points of each, in the cycle ``order``.

        The two computations come first, as containers of their parts and collectives, and take no time themselves.
        """
        from pipeproof.schedule.alternation import alternating_rows  # few plans have pairs that alternate

        for work, batch in zip(works, batches, strict=True):
            yield Row(Op(work.kind, work.stage, batch), batch=ANY)
        halves: list[tuple[Op, list[SegmentRows[Row]]]] = []
        for work, batch in sorted(zip(works, batches, strict=True), key=lambda use: use[0].kind is not OpKind.FORWARD):
            op = Op(work.kind, work.stage, batch)
            halves.append((op, self._segments(op, work.variant)))
        (_, forward), (backward_op, backward) = halves

        def weights(number: int) -> Row:
            return Row(part_of(backward_op, number, OpKind.WEIGHTS))

        defers = backward_op.kind is OpKind.BACKWARD
        yield from alternating_rows(
            forward, backward, order, weights if defers else None, lambda row: row.queue == EXPERTS_QUEUE
        )

    def _segments(self, op: Op, variant: int) -> list[SegmentRows[Row]]:
        """The parts and collectives of a computation by segment: a part between each two exchanges."""
        from pipeproof.schedule.alternation import Cut, segments_of_half

        collectives = self._collectives(op, variant)
        calls = iter(self._issued(op, collectives))
        cuts = []
        for exchange in exchanges(collectives):
            issued = islice(calls, exchange.num_collectives)
            rows = [replace(call, queue=EXPERTS_QUEUE) if call.op.axis == "ep" else call for call in issued]
            cuts.append(Cut(rows, exchange.is_overlap_point, exchange.is_late))
        return segments_of_half([Row(part_of(op, index, OpKind.PART)) for index in range(len(cuts) + 1)], cuts)

    def after(self, work: Work, batch: int) -> Iterator[Row]:
        """The sends of a computation's output."""
        for send, receiver in self.sends_of(work, batch):
            messages = self._messages(send, work.variant)
            yield from self._shapes(send, messages, receiver)
            yield from self._slice(send, work.variant)
            for message in messages:
                yield self._row(send, message, receiver)
            yield from self._release(send, work.variant, "after_send_posted")

    def gather_weights(self, works: Iterable[Work]) -> Iterator[Row]:
        """Gathers of the sharded weights of computations."""
        for stage in self._released_stages(works):
            yield from self.step_end.gather(stage)

    def release_weights(self, works: Iterable[Work]) -> Iterator[Row]:
        """Releases of the weights from ``gather_weights``."""
        for stage in self._released_stages(works):
            yield Row(Op(OpKind.RESHARD, stage))

    def _released_stages(self, works: Iterable[Work]) -> Iterable[int]:
        return dict.fromkeys(work.stage for work in works) if shards_weights(self._plan.spec) else ()

    def reduce_added(self, work: Work, batch: int, reduce_axes: Sequence[str]) -> Iterator[Row]:
        """Sums of a computation's contribution to sharded gradients."""
        if work.kind in ADDS and shards_gradients(self._plan.spec):
            yield from self.step_end.reduce(work.stage, reduce_axes, batch)

    def wait(self, send: Op, variant: int) -> Iterator[Row]:
        """The waits for a send, and for the messages with its shapes."""
        messages = self._messages(send, variant)
        for shape in self._shapes(send, messages, NONE):
            yield Row(wait_for(shape.op))
        for _ in messages:
            yield Row(wait_for(send))
        yield from self._release(send, variant, "after_send_done")

    def sends_of(self, work: Work, batch: int) -> list[tuple[Op, int]]:
        """The sends of a computation's output, with the pipeline rank that receives it."""
        if work.kind is OpKind.FORWARD:
            return self._transfers(OpKind.SEND_FORWARD, work, batch, work.after)
        if work.kind is OpKind.BACKWARD_WEIGHT:
            return []
        return self._transfers(OpKind.SEND_BACKWARD, work, batch, work.before)

    def _transfers(self, kind: OpKind, work: Work, batch: int, neighbour: int) -> list[tuple[Op, int]]:
        """The transfers of a kind around a computation: to or from the next stage, then past it by direct edges.

        Gradients arrive in the order in which they are added: from the last consumer to the first.
        """
        stage, owner = work.stage, self._plan.owner
        neighbours = [(Op(kind, stage, batch), neighbour)] if self._is_elsewhere(neighbour) else []
        others = {other for _, other in self._direct(kind, stage)} if self._plan.direct else ()
        return neighbours + [
            (Op(kind, stage, batch, index=other), int(owner[other, work.turn]))
            for other in sorted(others, reverse=kind is OpKind.RECV_BACKWARD)
        ]

    def _direct(self, kind: OpKind, stage: int) -> Iterator[tuple[int, int]]:
        """The direct edges that a kind of transfer of a stage moves, each with the stage at the other end."""
        forward, makes = kind in FORWARD_KINDS, (kind in SEND_KINDS) == (kind in FORWARD_KINDS)
        for number, edge in enumerate(self._plan.direct):
            if not forward and not edge.has_gradient:
                continue
            users = self._plan.receivers(edge) if forward else edge.consumers
            ends = [(edge.producer, user) if makes else (user, edge.producer) for user in users]
            yield from (
                (number, other)
                for own, other in ends
                if own == stage and self._coords["pp"] not in self._plan.holders[other]
            )

    def waits_late(self, send: Op) -> bool:
        """Return True if a send is waited for at the end of the step, because no backward waits for it."""
        return self._forward_only or not send.is_forward or send.stage < self._first_trained

    def work_item(self, op: Op) -> int:
        """The work item of a computation or transfer."""
        return work_item_of(op, self._plan.num_splits)

    def variant(self, work_item: int) -> int:
        """The index of a work item's size."""
        by_work_item = self._plan.size_of_work_item
        return by_work_item[work_item] if by_work_item and work_item != NONE else 0

    @cached_property
    def work_items_differ(self) -> bool:
        """True if work items differ in size, or in the ranks that they pass."""
        return bool(self._plan.size_of_work_item) or self._plan.has_copies

    def work(self, op: Op, work_item: int) -> Work:
        """The key of the rows around a computation."""
        owner, stage = self._plan.owner, op.stage
        before = int(owner[stage - 1, work_item]) if stage else NONE
        after = int(owner[stage + 1, work_item]) if stage + 1 < len(owner) else NONE
        turn = work_item % self._num_turns if self._plan.direct else 0
        return Work(op.kind, stage, self.variant(work_item), before, after, turn)

    def _release(self, send: Op, variant: int, when: str) -> Iterator[Row]:
        """Free the output that a forward send or its slices read, if ``buffers.free_output`` is ``when``."""
        if send.is_forward and self._plan.spec.buffers.free_output == when:
            sliced = any(message.transport is Transport.PARTIAL for message in self._messages(send, variant))
            yield Row(free_of(Op(OpKind.SLICE_FORWARD, send.stage, send.micro_batch) if sliced else send))

    def _is_elsewhere(self, pp: int) -> bool:
        """Return True if a neighbouring stage exists and is on another pipeline rank."""
        return pp not in (NONE, self._coords["pp"])

    def _messages(self, op: Op, variant: int) -> list[_Message]:
        """The messages of a transfer of this rank: each tensor of the boundary, in order, or all in one."""
        incoming = op.kind in RECV_KINDS
        side = "input" if incoming == op.is_forward else "output"
        name = side if op.is_forward else f"{side}_grad"
        if op.index is not None:
            return self._direct_messages(op, name, variant)
        edge = op.stage - 1 if side == "input" else op.stage
        if not 0 <= edge < len(self._plan.edges):
            return []  # a program that is wrong: the first stage receives, the last sends on
        messages: list[_Message] = []
        members = self._plan.edges[edge].variants[variant]
        if is_packed(members, self._plan.spec.transport, gradient=not op.is_forward):
            tensor = self._tensors.index[name, op.stage, variant, PACKED]
            return [_Message(tensor, 0, self._tensors.specs[tensor].numel, self._coords["tp"], Transport.FULL)]
        for position, boundary in enumerate(members):
            if not op.is_forward and not boundary.has_gradient:
                continue
            tensor = self._tensors.index[name, op.stage, variant, position]
            if boundary.changes_layout:
                messages += self._reshard(tensor, boundary, op, incoming)
            else:
                messages.append(self._whole_or_slice(tensor, op))
        return messages

    def _direct_messages(self, op: Op, name: str, variant: int) -> list[_Message]:
        """The messages of a transfer past the next stage: the direct edges between the two stages, in order."""
        assert op.index is not None
        user = NONE if name == "output" else op.index if name == "output_grad" else op.stage
        tensors = [
            self._tensors.direct[name, number, user, variant]
            for number, other in self._direct(op.kind, op.stage)
            if other == op.index
        ]
        specs, tp = self._tensors.specs, self._coords["tp"]
        return [_Message(tensor, 0, specs[tensor].numel, tp, Transport.FULL) for tensor in tensors]

    def _whole_or_slice(self, tensor: int, op: Op) -> _Message:
        numel, tp = self._tensors.specs[tensor].numel, self._coords["tp"]
        transport = effective_transport(self._declared[op.is_forward], numel, self._num_tp)
        start, stop = slice_range(numel, self._num_tp, tp) if transport is Transport.PARTIAL else (0, numel)
        return _Message(tensor, start, stop, tp, transport)

    def _reshard(self, tensor: int, boundary: Boundary, op: Op, incoming: bool) -> Iterator[_Message]:
        tp = self._coords["tp"]
        for sender, receiver, send_start, recv_start, length in boundary.reshard(gradient=not op.is_forward):
            if (receiver if incoming else sender) == tp:
                start = recv_start if incoming else send_start
                yield _Message(tensor, start, start + length, sender if incoming else receiver, Transport.FULL)

    def _row(self, op: Op, message: _Message, pp: int) -> Row:
        peer, communicator = self._peer(pp, message.peer_tp), _communicator(op)
        return Row(
            op, peer, message.tensor, message.start, message.stop, shift=self._shift(message), communicator=communicator
        )

    def _shapes(self, transfer: Op, messages: Iterable[_Message], pp: int) -> Iterator[Row]:
        """The messages with the shapes of a transfer, if the plan exchanges shapes; without ``pp`` to nobody."""
        if self._plan.spec.transport.shape_exchange == "per_message":
            op = transfer._replace(kind=META_OF[transfer.kind])
            for message in messages:
                peer = NONE if pp == NONE else self._peer(pp, message.peer_tp)
                yield Row(op, peer, message.tensor, communicator=_communicator(op))

    def _peer(self, pp: int, tp: int) -> int:
        return self._graph_rank[self._plan.mesh.rank({**self._coords, "pp": pp, "tp": tp})]

    def _shift(self, message: _Message) -> int:
        slices = self._fold_tp and message.transport is Transport.PARTIAL
        return message.stop - message.start if slices else 0

    def _slice(self, op: Op, variant: int) -> Iterator[Row]:
        if op.kind in SEND_KINDS:
            kind = OpKind.SLICE_FORWARD if op.is_forward else OpKind.SLICE_BACKWARD
            yield from self._transport_rows(kind, op, variant, NONE)

    def _gather(self, op: Op, variant: int) -> Iterator[Row]:
        if op.kind in RECV_KINDS:
            kind = OpKind.GATHER_FORWARD if op.is_forward else OpKind.GATHER_BACKWARD
            yield from self._transport_rows(kind, op, variant, self._groups.get("tp", NONE))

    def _transport_rows(self, kind: OpKind, transfer: Op, variant: int, group: int) -> Iterator[Row]:
        """A slice or gather for each tensor that the transfer carries in slices."""
        for m in self._messages(transfer, variant):
            if m.transport is Transport.PARTIAL:
                op = Op(kind, transfer.stage, transfer.micro_batch)
                yield Row(op, NONE, m.tensor, m.start, m.stop, group, shift=self._shift(m))

    def _children(self, op: Op, variant: int) -> Iterator[Row]:
        return self._issued(op, self._collectives(op, variant))

    def _collectives(self, op: Op, variant: int) -> list[Collective]:
        """The collectives inside a computation; their sizes are proportional to the tokens of the micro-batch."""
        spec = self._plan.spec
        length = spec.model.seq_length
        full = length * spec.schedule.micro_batch_size  # the size for which layers are described
        num_tokens = self._plan.sizes[variant].num_tokens
        layers = self._plan.layers_of(op.stage)
        if op.kind is OpKind.FORWARD:
            collectives = [c for layer in layers for c in layer.forward_collectives]
        else:
            parts = {OpKind.BACKWARD_INPUT: [backward_calls], OpKind.BACKWARD_WEIGHT: [weight_calls]}
            calls = parts.get(op.kind, [backward_calls, weight_calls])
            collectives = [c for part in calls for layer in reversed(layers) for c in part(spec, layer)]
        return [
            replace(c, numel=c.numel * num_tokens // full) if num_tokens != full and c.per_token else c
            for c in collectives
        ]

    def _issued(self, parent: Op, collectives: Iterable[Collective]) -> Iterator[Row]:
        for index, collective in enumerate(collectives):
            child = child_of(parent, index, OpKind[collective.kind.name], collective.axis)
            if collective.axis == "pp":  # over the holders of the weight that the label names
                group = self._copies[self._plan.shared_weights.places(parent.stage, collective.label)]
            else:
                group = self._groups[collective.axis]
            tensor = NONE if collective.dtype is None else self._tensors.inside[collective.dtype]
            yield Row(child, tensor=tensor, stop=collective.numel, group=group, reduction=collective.reduction)
