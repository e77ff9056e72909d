"""PP201 and PP202: the receiver holds the elements that its layout requires, for all values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pipeproof.diagnostics.finding import ElementRange, Finding, RangesWitness, RuleDoc
from pipeproof.diagnostics.units import size_text
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph, TensorSpec
from pipeproof.schedule.ops import FORWARD_KINDS
from pipeproof.specs.axis_layout import INVARIANT, VARYING, Placement, PlacementKind, dtype_bytes, parse_placement
from pipeproof.stages.describe.boundary import Transport, effective_transport
from pipeproof.stages.describe.index_map import NOWHERE, IndexMap, counts, differences, layout_map
from pipeproof.verify.provenance import DATA_SENDS, Delivery, Places, Segment, events
from pipeproof.verify.subject import Rule, Subject

# Comparison of a delivered tensor with its receiver's layout: lost and foreign elements.
#
# Both are maps from the receiver's local elements to the elements of the whole
# tensor: the wanted map comes from the receiver's declared layout, the other
# from the layouts of the ranks whose elements arrived. So the receiver's layout
# may differ (a reshard), as long as each element is the right one.


_STRANGE = -(2**60)
"""In place of a global index: an element of another data-parallel replica or another part of the sequence."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The damage at one receiver: ranges of the expected tensor, and the elements there instead."""

    num_elements: int
    lost: tuple[ElementRange, ...]
    foreign: tuple[ElementRange, ...]


def places_of(subject: Subject) -> Places:
    """Positions of the subject's ranks in their tensor-parallel groups: by the plan's mesh, else by the graph's groups.

    Without a plan, a rank without a group is alone, and all ranks share one data_group.
    """
    if subject.lowered is None:
        return _places_by_groups(subject.graph)
    mesh, rank = subject.lowered.mesh, np.array(subject.graph.global_rank, dtype=np.int64)
    none = np.zeros_like(rank)
    index, data_group, pp = none, none, none
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        rank, coord = np.divmod(rank, size)
        if axis == "tp":
            index = coord
        elif axis == "pp":
            pp = coord
        else:
            data_group = data_group * size + coord
    num_tp = mesh.size("tp")
    copies = 1 if index.any() else num_tp  # folded over tp: only first members are there
    return Places(index, none + num_tp, data_group * mesh.size("pp") + pp, data_group, none + copies)


def _places_by_groups(graph: OpGraph) -> Places:
    none = np.zeros(graph.num_ranks, dtype=np.int64)
    index, sizes, team, copies = none.copy(), none + 1, np.arange(graph.num_ranks), none + 1
    for group in graph.groups:
        if group.axis == "tp":
            ranks = list(group.ranks)
            index[ranks] = np.arange(len(ranks)) * group.copies
            sizes[ranks], team[ranks], copies[ranks] = group.size, min(ranks), group.copies
    return Places(index, sizes, team, none, copies)


class Layouts:
    """The declared layouts of a subject's boundary tensors, rank by rank.

    Raises:
        ValueError: a tensor of the graph declares a placement that is none.
    """

    def __init__(self, subject: Subject, places: Places) -> None:
        self._subject, self._graph, self._places = subject, subject.graph, places
        self.tensors = subject.graph.tensors
        self.placements = tuple(parse_placement(tensor.placement) for tensor in subject.graph.tensors)
        self._maps: dict[tuple[int, Placement, int, int], IndexMap] = {}

    def loss(self, delivery: Delivery) -> Loss | None:
        """Compare a delivery with the receiver's layout; None if every element is right."""
        receive, tensor = delivery.receive, self._graph.tensor
        sent, expected = int(tensor[self._graph.match[receive]]), int(tensor[receive])
        if NONE in (sent, expected):
            return None
        return _Comparison(self, delivery, int(self._graph.rank[receive]), expected, sent).loss()

    def whole_shape(self, tensor: int, rank: int) -> tuple[int, ...]:
        """The shape over all TP ranks of a tensor, from the local part of ``rank``."""
        spec, placement = self.tensors[tensor], self.placements[tensor]
        if placement.kind is not PlacementKind.SHARDED:
            return spec.shape
        size = int(self._places.size[rank])
        return tuple(n * size if dim == placement.dim else n for dim, n in enumerate(spec.shape))

    def index(self, rank: int, copy: int) -> int:
        """The position in its TP group of the ``copy``-th rank that ``rank`` represents."""
        return int(self._places.index[rank]) + copy

    def map(self, tensor: int, placement: Placement, rank: int, copy: int) -> IndexMap:
        """Elements of ``tensor`` that ``rank`` holds under ``placement``."""
        key = tensor, placement, int(self._places.size[rank]), self.index(rank, copy)
        if key not in self._maps:
            shape = (
                self.whole_shape(tensor, rank) if placement == self.placements[tensor] else self.tensors[tensor].shape
            )
            self._maps[key] = layout_map(shape, placement, *key[2:])
        return self._maps[key]

    def is_stranger(self, source: int, sender: int, receiver: int) -> bool:
        """Return True if ``source`` has other data than the group that sends the receiver's own message."""
        places = self._places
        return bool(
            places.team[source] != places.team[sender] or places.data_group[sender] != places.data_group[receiver]
        )

    def team_of(self, rank: int) -> list[tuple[int, int]]:
        """(rank, copy) of all members of a rank's TP group."""
        ranks = np.flatnonzero(self._places.team == self._places.team[rank]).tolist()
        return [(mate, copy) for mate in ranks for copy in range(int(self._places.copies[mate]))]

    def global_rank(self, rank: int, copy: int) -> int:
        """The rank in the mesh of the ``copy``-th rank that ``rank`` represents."""
        own = self._graph.global_rank[rank]
        lowered = self._subject.lowered
        if lowered is None or not copy:
            return own
        return lowered.mesh.rank({**lowered.mesh.coords(own), "tp": self.index(rank, copy)})


class _Comparison:
    def __init__(self, layouts: Layouts, delivery: Delivery, rank: int, expected: int, sent: int) -> None:
        self._layouts, self._delivery, self._sent = layouts, delivery, sent
        self._rank = rank
        self._numel = layouts.tensors[expected].numel
        self._placement = layouts.placements[sent]
        sender, copy = delivery.sender, delivery.copy
        same = layouts.tensors[sent].dims == layouts.tensors[expected].dims and layouts.whole_shape(
            sent, sender
        ) == layouts.whole_shape(expected, rank)
        if same:
            self._wanted = layouts.map(expected, layouts.placements[expected], rank, copy)
        else:  # different tensors are for another rule; each element should be at its sender's position
            self._placement = INVARIANT if self._placement.holds_equal_values else VARYING
            self._wanted = layouts.map(sent, self._placement, sender, copy).part(0, self._numel, 0)

    def loss(self) -> Loss | None:
        lost: list[tuple[int, ElementRange]] = []
        foreign: list[ElementRange] = []
        for segment in self._delivery.segments:
            held = self._held(segment)
            for difference in differences(self._wanted.part(segment.start, segment.stop, segment.start), held):
                if difference.first == NOWHERE:
                    continue  # beyond the receiver's tensor
                lost += self._sources(difference.local, difference.first, difference.length)
                start = segment.source_start + difference.local - segment.start
                foreign.append(self._range(segment.source_rank, segment.source_copy, start, difference.length))
        written = [(segment.start, segment.stop - segment.start) for segment in self._delivery.segments]
        for gap in counts(written, self._numel):
            if not gap.times:
                for piece in self._wanted.part(gap.start, gap.stop, gap.start).ranges:
                    lost += self._sources(*piece)
        if not lost:
            return None
        return Loss(self._numel, _merged([item for _, item in sorted(lost, key=lambda at: at[0])]), _merged(foreign))

    def _held(self, segment: Segment) -> IndexMap:
        """Elements that arrived in one segment, by the receiver's local index."""
        start, length = segment.source_start, segment.stop - segment.start
        if self._layouts.is_stranger(segment.source_rank, self._delivery.sender, self._rank):
            return IndexMap.of([(segment.start, _STRANGE, length)])
        own = self._layouts.map(self._sent, self._placement, segment.source_rank, segment.source_copy)
        return own.part(start, start + length, segment.start)

    def _sources(self, local: int, whole: int, length: int) -> list[tuple[int, ElementRange]]:
        """Holders of ``length`` elements from ``whole`` on, with their local index; the message's sender first."""
        sender, copy = self._delivery.sender, self._delivery.copy
        mates = [(sender, copy), *(m for m in self._layouts.team_of(sender) if m != (sender, copy))]
        holders: list[tuple[int, ElementRange]] = []
        for rank, mate_copy in mates:
            held = self._layouts.map(self._sent, self._placement, rank, mate_copy)
            for start, there, num in held.inverted().part(whole, whole + length, local).ranges:
                holders.append((start, self._range(rank, mate_copy, there, num)))
            if holders:
                return holders
        return [(local, self._range(sender, copy, local, length))]

    def _range(self, source: int, copy: int, start: int, length: int) -> ElementRange:
        layouts = self._layouts
        first, last = (self._coordinates(source, copy, flat) for flat in (start, start + length - 1))
        return ElementRange(
            layouts.global_rank(self._rank, self._delivery.copy),
            start,
            start + length,
            layouts.global_rank(source, copy),
            f"{first} .. {last}",
        )

    def _coordinates(self, rank: int, copy: int, flat: int) -> str:
        """A local element of ``rank`` in coordinates of the whole tensor: ``s 8 b 0 h 63``."""
        spec = self._layouts.tensors[self._sent]
        index = [flat // prod(spec.shape[dim + 1 :]) % spec.shape[dim] for dim in range(len(spec.shape))]
        if self._placement.dim is not None:
            index[self._placement.dim] += self._layouts.index(rank, copy) * spec.shape[self._placement.dim]
        return " ".join(f"{d} {i}" for d, i in zip(spec.dims, index, strict=False))


def _merged(ranges: list[ElementRange]) -> tuple[ElementRange, ...]:
    merged: list[ElementRange] = []
    for item in ranges:
        last = merged[-1] if merged else None
        if last is not None and (last.rank, last.source_rank, last.stop) == (item.rank, item.source_rank, item.start):
            covers = f"{last.covers.partition(' .. ')[0]} .. {item.covers.partition(' .. ')[2]}"
            merged[-1] = replace(last, stop=item.stop, covers=covers)
        else:
            merged.append(item)
    return tuple(merged)


LOSSY = RuleDoc(
    code="PP201",
    title="a transport loses elements of a boundary tensor and delivers others in their place",
    explanation=(
        "Each element of the tensor that a stage sends has an identity (rank, index). The check pushes the identities "
        "through the lowered slices, sends, receives and gathers: those that arrive are not the ones in the receiver's "
        "layout. The classic case is Paddle Fleet's `enable_partial_send_recv` (on by default) together with "
        "sequence parallelism: each TP rank sends its 1/n of the flattened tensor and the receivers gather the "
        "slices as if all ranks had held the same tensor, but under sequence parallelism each holds another part "
        "of the sequence. Shapes fit, nothing hangs, the loss looks plausible, and every gradient is wrong. The two "
        "sides may declare different layouts, if the messages between them bring every element to its place."
    ),
    wrong="topology: {pp: 2, tp: 2, sequence_parallel: true}\ntransport: partial",
    right="topology: {pp: 2, tp: 2, sequence_parallel: true}\ntransport: full",
)


def _check_lossy(subject: Subject) -> Iterator[Finding]:
    """Examine one event of each kind, and if it is damaged, all events of the first micro-batch."""
    graph = subject.graph
    places = places_of(subject)
    layouts = Layouts(subject, places)
    all_events = events(graph, places)
    kinds, first = np.unique(all_events.classes, return_index=True)
    damaged = [
        kind
        for kind, event in zip(kinds.tolist(), first.tolist(), strict=True)
        if kind != NONE and any(layouts.loss(delivery) for delivery in all_events.deliveries(event, places))
    ]
    if not damaged:
        return
    bad = np.flatnonzero(np.isin(all_events.classes, damaged))
    receive = np.maximum.reduceat(all_events.receive, all_events.offsets[:-1])[bad]  # one of each event
    columns = ~graph.is_kind(FORWARD_KINDS)[receive], graph.stage[graph.match[receive]], graph.stage[receive]
    edge = np.stack(columns, axis=1)
    for key in np.unique(edge, axis=0).tolist():
        mask = (edge == key).all(axis=1)
        batches = np.unique(graph.work_item[receive[mask]])
        in_first = mask & (graph.work_item[receive] == batches[0])
        all_losses = [
            (int(graph.match[delivery.receive]), loss)
            for event in bad[in_first].tolist()
            for delivery in all_events.deliveries(event, places)
            if (loss := layouts.loss(delivery)) is not None
        ]
        backward, source, sink = key
        yield _lossy_finding(subject, source, sink, not backward, batches, all_losses)


def _lossy_finding(
    subject: Subject, source: int, sink: int, forward: bool, batches: IntColumn, losses: list[tuple[int, Loss]]
) -> Finding:
    direction = "forward" if forward else "backward"
    which = f"micro-batch {int(batches[0])}" if len(batches) == 1 else f"each of {len(batches)} micro-batches"
    num_lost = sum(r.stop - r.start for _, loss in losses for r in loss.lost)
    num_all = sum(loss.num_elements for _, loss in losses)
    graph = subject.graph
    send = losses[0][0]
    tensor, expected = (graph.tensors[int(graph.tensor[i])] for i in (send, graph.match[send]))
    member = f" of `{tensor.member}`" if tensor.member else ""
    changes_layout = tensor.placement != expected.placement
    if subject.lowered is None:
        transport = "the messages deliver"
    elif changes_layout:
        transport = f"the messages from {tensor.placement} to {expected.placement} deliver"
    else:
        transport = f"`{getattr(subject.lowered.spec.transport, direction)}` delivers"
    return LOSSY.finding(
        f"boundary {source}->{sink}, {direction}: {transport} {num_lost} of {num_all} elements{member} "
        f"wrongly in {which}",
        location=subject.locate("boundaries") if changes_layout else subject.locate("transport", direction),
        help=None if changes_layout else _suggested_fix(subject, direction, tensor),
        witness=RangesWitness(
            tuple(item for _, loss in losses for item in loss.lost),
            tuple(item for _, loss in losses for item in loss.foreign),
        ),
    )


def _suggested_fix(subject: Subject, direction: str, tensor: TensorSpec) -> str | None:
    if subject.lowered is None or getattr(subject.lowered.spec.transport, direction) != Transport.PARTIAL:
        return None
    full, num_tp = tensor.numel * dtype_bytes(tensor.dtype), subject.lowered.spec.topology.tp
    return (
        f"set `transport.{direction}: full`: {size_text(full)} per rank and micro-batch on the wire, not "
        f"{size_text(full // num_tp)}, and no all-gather"
    )


FULL_INSTEAD = RuleDoc(
    code="PP202",
    title="`partial` is declared, but full tensors are sent",
    severity="note",
    explanation=(
        "Paddle Fleet takes `partial` per tensor, and only if the number of local elements divides by the TP "
        "degree; otherwise it sends the full tensor without a message. That is correct, but saves no bytes. The "
        "same holds without tensor parallelism."
    ),
    wrong="topology: {pp: 2, tp: 1}\ntransport: partial",
    right="topology: {pp: 2, tp: 1}\ntransport: full",
)


def _check_full_instead(subject: Subject) -> Iterator[Finding]:
    graph, spec = subject.graph, subject.plan.spec
    if spec.topology.pp == 1:
        return
    num_tp = spec.topology.tp
    for direction, forward in (("forward", True), ("backward", False)):
        declared = getattr(spec.transport, direction)
        if declared != Transport.PARTIAL:
            continue
        rows = graph.is_kind(DATA_SENDS) & (graph.is_kind(FORWARD_KINDS) == forward) & (graph.tensor != NONE)
        tensors = [graph.tensors[t] for t in np.unique(graph.tensor[rows]).tolist()]
        whole = [t for t in tensors if effective_transport(declared, t.numel, num_tp) is Transport.FULL]
        forms = {(t.member, t.numel): t for t in whole}
        for (member, numel), _ in sorted(forms.items()):
            of = f"`{member}`" if member else "a boundary tensor"
            why = (
                "topology.tp is 1"
                if num_tp == 1
                else f"the {numel} local elements of {of} do not divide by topology.tp {num_tp}"
            )
            all_whole = len(whole) == len(tensors)
            yield FULL_INSTEAD.finding(
                f"{direction}: `partial` is declared, but {why}, so each rank sends its full tensor, as Fleet does",
                location=subject.locate("transport", direction),
                help=f"set `transport.{direction}: full`, which is what happens" if all_whole else None,
            )
            if num_tp == 1:
                break


RULES = (Rule(LOSSY, _check_lossy), Rule(FULL_INSTEAD, _check_full_instead, needs_plan=True))
