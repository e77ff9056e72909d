"""Checks of arrived messages: each element's origin, and together the layout that the receiving stage needs.

The k-th transfer of a channel in a step is the k-th of the graph. A stage does not pass received tensors on: each
sender makes its boundary tensor anew, so a wrong message is only found at its receiver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeproof.comm.plan_context import tensors_of
from pipeproof.diagnostics.finding import ElementRange, Finding, OpsWitness, RangesWitness, WitnessOp
from pipeproof.exec.rank.op_log import ChannelTransfers
from pipeproof.exec.rehearse.element_identity import (
    Bytes,
    FoundRange,
    RehearsalArrays,
    RehearsalTensor,
    Source,
    found_ranges,
)
from pipeproof.exec.store.run_codes import NOT_AS_PROMISED, NOT_AS_SENT
from pipeproof.schedule.op_table import NONE, TensorSpec
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.verify.boundary_transport import Layouts, places_of
from pipeproof.verify.provenance import DATA_SENDS, Delivery, Segment, events
from pipeproof.verify.subject import Subject

MOST_KEPT = 200
"""Most faults that a rank describes; it only counts the others."""


@dataclass(frozen=True, slots=True)
class ArrivalFault:
    """One fault on one rank in one step: elements that did not arrive, or that the layout places elsewhere.

    ``where`` is the channel or the group; for a layout, the boundary and direction. Only for a layout there is a
    ``work_item``, which lacks the elements ``lost`` and has ``foreign`` elements, of ``num_elements`` in all.
    """

    rank: int
    step: int
    op: str
    op_id: int
    where: str
    fact: str
    work_item: int = -1
    num_elements: int = 0
    lost: tuple[ElementRange, ...] = ()
    foreign: tuple[ElementRange, ...] = ()


@dataclass(slots=True)
class ArrivalChecks:
    """Numbers of checked messages, collectives and elements of one rank, and its faults."""

    messages: int = 0
    collectives: int = 0
    elements: int = 0
    num_faults: int = 0
    faults: list[ArrivalFault] = field(default_factory=list)

    def add_fault(self, fault: ArrivalFault) -> None:
        """Count a fault, and store it while there are few."""
        self.num_faults += 1
        if len(self.faults) < MOST_KEPT:
            self.faults.append(fault)


def findings_of(faults: Sequence[ArrivalFault]) -> tuple[Finding, ...]:
    """Findings of all ranks: the first fault of arrivals on each channel, and all faults of layouts by boundary."""
    by_channel: dict[tuple[int, str], list[ArrivalFault]] = {}
    by_boundary: dict[str, list[ArrivalFault]] = {}
    for fault in faults:
        if fault.num_elements:  # the messages are correct, but together do not match the receiver's layout
            by_boundary.setdefault(fault.where, []).append(fault)
        else:
            by_channel.setdefault((fault.rank, fault.where), []).append(fault)
    arrivals = (_arrival_finding(faults) for faults in by_channel.values())
    boundaries = sorted(by_boundary, key=lambda where: (where.endswith("backward"), where))  # the order of `check`
    return (*arrivals, *(_layout_finding(by_boundary[where]) for where in boundaries))


def _arrival_finding(faults: Sequence[ArrivalFault]) -> Finding:
    first = faults[0]
    more = f"; {len(faults) - 1} more faults on it" if len(faults) > 1 else ""
    return NOT_AS_SENT.finding(
        f"rank {first.rank}, step {first.step}, {first.op} over {first.where}: {first.fact}{more}",
        help="the plan is proved, so look at its execution: the order of ranks, the launcher's environment, the "
        "backend (`pipeproof doctor`), the link",
        witness=OpsWitness((WitnessOp(first.rank, first.op, first.op_id),)),
    )


def _layout_finding(faults: Sequence[ArrivalFault]) -> Finding:
    """Return the finding with the ranges of all receivers of the first work item, in the form of ``check``."""
    work_items = {(fault.step, fault.work_item) for fault in faults}
    first = [fault for fault in faults if (fault.step, fault.work_item) == min(work_items)]
    num_lost = sum(lost.stop - lost.start for fault in first for lost in fault.lost)
    steps, batches = ({item[index] for item in work_items} for index in (0, 1))
    number = f"each of {len(batches)} micro-batches" if len(batches) > 1 else f"micro-batch {min(batches)}"
    return NOT_AS_PROMISED.finding(
        f"{first[0].where}: {num_lost} of {sum(fault.num_elements for fault in first)} elements are wrong in "
        f"{number} of {len(steps)} steps",
        help="the messages are as sent: `pipeproof check` suggests fixes of the plan",
        witness=RangesWitness(
            tuple(lost for fault in first for lost in fault.lost),
            tuple(foreign for fault in first for foreign in fault.foreign),
        ),
    )


Reader = tuple[int, int, bool]
"""Reader of boundary tensors: a stage, a work item, and True for its forward."""


class Arrivals:
    """Messages of one rank: their senders' elements, and the faults of those that arrived. ``step`` is current."""

    def __init__(self, subject: Subject, rank: int, arrays: RehearsalArrays) -> None:
        self.graph, self.rank, self._arrays = subject.graph, rank, arrays
        self.step, self.checked = -1, ArrivalChecks()
        plan, graph = subject.plan, subject.graph
        self._numbers = tensors_of(plan.edges, plan.layers, plan.spec.transport).index
        places = places_of(subject)
        self._layouts = Layouts(subject, places)
        self._deliveries: dict[Reader, list[Delivery]] = {}
        delivered = events(graph, places)
        row = np.where(delivered.receive == NONE, delivered.gather, delivered.receive)
        event = np.repeat(np.arange(len(delivered.classes)), np.diff(delivered.offsets))
        for index in np.unique(event[graph.rank[row] == rank]).tolist():
            for delivery in delivered.deliveries(index):
                if graph.rank[delivery.receive] == rank:
                    self._deliveries.setdefault(self._reader(delivery.receive), []).append(delivery)
        self.transfers = ChannelTransfers(graph, rank)
        self._calls: Counter[int] = Counter()

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step = step
        self.transfers.begin()
        self._calls.clear()

    def count(self, group: int) -> int:
        """Count a call of a group; return the number of earlier calls in the step."""
        self._calls[group] += 1
        return self._calls[group] - 1

    def outgoing(self, side: str, stage: int, variant: int, member: int, work_item: int) -> RehearsalTensor | None:
        """Return a tensor that a stage of this rank makes; None for the gradient of a member without one."""
        number = self._numbers.get((side, stage, variant, member))
        if number is None:
            return None
        spec = self.graph.tensors[number]
        source = Source((self.step, work_item, number, self.rank), self.rank, spec.numel, "")
        return RehearsalTensor(spec.shape, spec.dtype, source)

    def arrived(self, receive: int, tensor: RehearsalTensor) -> None:
        """Check the elements of a finished receive; ``tensor`` has only these, or (for a slice) also others."""
        self.checked.messages += 1
        tensor.ranges = self._read(receive, tensor)
        if int(self.graph.stop[receive] - self.graph.start[receive]) < self._spec(receive).numel:
            return  # a part of a tensor, which is joined with others
        if tensor.is_slot:
            tensor.receive = receive
        else:
            tensor.buffer = None  # nothing reads it again

    def gathered(self, gather: int, ranks: Sequence[int], content: Bytes) -> RehearsalTensor:
        """Check the tensor that a gather joined from the received slices, and return it."""
        spec = self._spec(gather)
        (delivery,) = (d for d in self._deliveries[self._reader(gather)] if self._spec(d.receive) is spec)
        send = int(self.graph.match[delivery.receive])
        expected = [
            FoundRange(
                segment.start, segment.stop, self._source(send, self.step, segment.source_rank), segment.source_start
            )
            for segment in delivery.segments
        ]
        where = f"tp ranks {', '.join(map(str, ranks))}"
        ranges = self._compared(gather, where, content, spec.dtype, expected)
        return RehearsalTensor(spec.shape, spec.dtype, ranges=ranges)

    def read_slots(self, reader: Reader, tensors: Sequence[RehearsalTensor | None], op: str) -> None:
        """Check that slots still have the same messages when ``op`` reads them; ``tensors`` are all members."""
        for delivery in self._deliveries.get(reader, ()):
            tensor = self._tensor(delivery, tensors)
            if tensor is not None and tensor.receive is not None:
                tensor.ranges = self._read(tensor.receive, tensor, f"when {op} reads it, ")

    def require_layouts(self, reader: Reader, tensors: Sequence[RehearsalTensor | None]) -> None:
        """Check the arrived elements against the receiver's layout, in tensors without elements of other tensors."""
        graph = self.graph
        for delivery in self._deliveries.get(reader, ()):
            received, send = self._tensor(delivery, tensors), int(graph.match[delivery.receive])
            ranges = () if received is None else received.ranges
            tensor = self._source(send, self.step).key[:-1]
            segments = [
                Segment(part.start, part.stop, part.source.rank, part.source_start)
                for part in ranges
                if part.source is not None and part.source.key[:-1] == tensor
            ]
            if len(segments) < len(ranges):
                continue  # reported on arrival
            ordered = tuple(sorted(segments, key=lambda segment: segment.start))
            loss = self._layouts.loss(replace(delivery, segments=ordered))
            if loss is None:
                continue
            op, where = graph.ops[delivery.receive], f"boundary {graph.ops[send].stage}->{reader[0]}"
            self.checked.add_fault(
                ArrivalFault(
                    self.rank,
                    self.step,
                    str(op),
                    delivery.receive,
                    f"{where}, {'forward' if op.is_forward else 'backward'}",
                    "",
                    reader[1],
                    loss.num_elements,
                    loss.lost,
                    loss.foreign,
                )
            )

    def add_fault(self, op_id: int, where: str, fact: str) -> None:
        """Store that elements of an operation of this rank are wrong."""
        op = str(self.graph.ops[op_id])
        self.checked.add_fault(ArrivalFault(self.rank, self.step, op, op_id, where, fact))

    def _read(self, receive: int, tensor: RehearsalTensor, when: str = "") -> tuple[FoundRange, ...]:
        graph, dtype = self.graph, tensor.dtype
        start, stop = int(graph.start[receive]), int(graph.stop[receive])
        send = int(graph.match[receive])
        expected = FoundRange(0, stop - start, self._source(send, self.step), int(graph.start[send]))
        content = self._arrays.to_bytes(tensor)
        if tensor.numel > stop - start:  # the backend moves a slice of it
            content = content[start * dtype_bytes(dtype) : stop * dtype_bytes(dtype)]
        return self._compared(
            receive, str(graph.channels[int(graph.channel[receive])]), content, dtype, [expected], when
        )

    def _compared(
        self, op_id: int, where: str, content: Bytes, dtype: str, expected: Sequence[FoundRange], when: str = ""
    ) -> tuple[FoundRange, ...]:
        assert expected[0].source is not None
        nearest = expected[0].source
        origins = found_ranges(content, dtype, expected, lambda: self._others(nearest))
        self.checked.elements += expected[-1].stop
        if fact := difference(expected, origins):
            self.add_fault(op_id, where, when + fact)
        return origins

    def _reader(self, op_id: int) -> Reader:
        return int(self.graph.stage[op_id]), int(self.graph.work_item[op_id]), self.graph.ops[op_id].is_forward

    def _tensor(self, delivery: Delivery, tensors: Sequence[RehearsalTensor | None]) -> RehearsalTensor | None:
        position = self._spec(delivery.receive).position
        assert position is not None  # transfers move tensors of boundaries only
        return tensors[position[2]]

    def _spec(self, op_id: int) -> TensorSpec:
        return self.graph.tensors[int(self.graph.tensor[op_id])]

    def _source(self, send: int, step: int, rank: int | None = None) -> Source:
        """Tensor that a send moves, or the tensor of another ``rank`` in its place."""
        graph = self.graph
        tensor, holder = int(graph.tensor[send]), int(graph.rank[send]) if rank is None else rank
        key = step, int(graph.work_item[send]), tensor, holder
        return Source(key, holder, graph.tensors[tensor].numel, f"{graph.ops[send]} of rank {holder}, step {step}")

    def _others(self, nearest: Source) -> Iterable[Source]:
        """All tensors sent in this step or the previous one, those most similar to ``nearest`` first."""
        sends = np.flatnonzero(self.graph.is_kind(DATA_SENDS)).tolist()
        steps = [step for step in (self.step, self.step - 1) if step >= 0]
        sources = dict.fromkeys(self._source(send, step) for step in steps for send in sends)
        return sorted(sources, key=lambda s: [a != b for a, b in zip(s.key[::-1], nearest.key[::-1], strict=True)])


def difference(expected: Sequence[FoundRange], origins: Sequence[FoundRange]) -> str | None:
    """Text on the first unexpected range; None if there is none."""
    for part in origins:
        planned = next(e for e in expected if e.start <= part.start < e.stop)
        offset = part.start - planned.start
        if part.source != planned.source or part.source_start != planned.source_start + offset:
            right = replace(planned, start=part.start, stop=part.stop, source_start=planned.source_start + offset)
            return f"elements {part.start}..{part.stop} are {part.text}; expected are {right.text}"
    return None
