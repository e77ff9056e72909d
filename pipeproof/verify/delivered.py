"""Comparison of a delivered tensor with its receiver's layout: lost and foreign elements.

Both are maps from the receiver's local elements to those of the whole tensor:
the wanted one comes from the receiver's declared layout, the other from the
layouts of the ranks whose elements arrived. So a receiver may lie otherwise
than the sender (a reshard), as long as each element is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pipeproof.diagnostics.finding import ElementRange
from pipeproof.schedule.op_table import NONE, OpGraph, TensorSpec
from pipeproof.specs.axis_layout import INVARIANT, VARYING, Placement, PlacementKind, parse_placement
from pipeproof.stages.describe.index_map import NOWHERE, IndexMap, counts, differences, layout_map
from pipeproof.verify.provenance import Delivery, Places, Segment
from pipeproof.verify.subject import Subject

_STRANGE = -(2**60)
"""In place of a global index: an element of another data-parallel replica or another part of the sequence."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The damage at one receiver: ranges of the tensor that it should hold, and what lies there instead."""

    num_elements: int
    lost: tuple[ElementRange, ...]
    foreign: tuple[ElementRange, ...]


def places_of(subject: Subject) -> Places:
    """Places of the subject's ranks in their tensor-parallel groups: by the plan's mesh, else by the graph's groups.

    Without a plan ranks in no group are alone, and all ranks share one data_group.
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
        self._placements = tuple(parse_placement(tensor.placement) for tensor in subject.graph.tensors)
        self._maps: dict[tuple[int, Placement, int, int], IndexMap] = {}

    def loss(self, delivery: Delivery) -> Loss | None:
        """Compare what arrived with what must be there; None when every element is right."""
        receive, tensor = delivery.receive, self._graph.tensor
        sent, expected = int(tensor[self._graph.match[receive]]), int(tensor[receive])
        if NONE in (sent, expected):
            return None
        return _Comparison(self, delivery, int(self._graph.rank[receive]), expected, sent).loss()

    def whole_shape(self, tensor: int, rank: int) -> tuple[int, ...]:
        """The shape over all TP ranks of a tensor of which ``rank`` holds its local part."""
        spec, placement = self._graph.tensors[tensor], self._placements[tensor]
        if placement.kind is not PlacementKind.SHARDED:
            return spec.shape
        size = int(self._places.size[rank])
        return tuple(n * size if dim == placement.dim else n for dim, n in enumerate(spec.shape))

    def placement(self, tensor: int) -> Placement:
        """Declared placement of a tensor over tp."""
        return self._placements[tensor]

    def index(self, rank: int, copy: int) -> int:
        """The place in its TP group of the rank that is the ``copy``-th of those that ``rank`` represents."""
        return int(self._places.index[rank]) + copy

    def map(self, tensor: int, placement: Placement, rank: int, copy: int) -> IndexMap:
        """Elements of ``tensor`` that ``rank`` holds under ``placement``."""
        key = tensor, placement, int(self._places.size[rank]), self.index(rank, copy)
        if key not in self._maps:
            shape = self.whole_shape(tensor, rank) if placement == self._placements[tensor] else self.spec(tensor).shape
            self._maps[key] = layout_map(shape, placement, *key[2:])
        return self._maps[key]

    def spec(self, tensor: int) -> TensorSpec:
        """The tensor of the graph."""
        return self._graph.tensors[tensor]

    def is_stranger(self, source: int, sender: int, receiver: int) -> bool:
        """Return True if ``source`` has other data than the group that the receiver's own message comes from."""
        places = self._places
        return bool(
            places.team[source] != places.team[sender] or places.data_group[sender] != places.data_group[receiver]
        )

    def team_of(self, rank: int) -> list[tuple[int, int]]:
        """(rank, copy) of all that a rank's TP group holds."""
        ranks = np.flatnonzero(self._places.team == self._places.team[rank]).tolist()
        return [(mate, copy) for mate in ranks for copy in range(int(self._places.copies[mate]))]

    def global_rank(self, rank: int, copy: int) -> int:
        """The rank of the mesh that the ``copy``-th of those that ``rank`` represents is."""
        own = self._graph.global_rank[rank]
        lowered = self._subject.lowered
        if lowered is None or not copy:
            return own
        return lowered.mesh.rank({**lowered.mesh.coords(own), "tp": self.index(rank, copy)})


class _Comparison:
    """One delivery against its receiver's layout."""

    def __init__(self, layouts: Layouts, delivery: Delivery, rank: int, expected: int, sent: int) -> None:
        self._layouts, self._delivery, self._sent = layouts, delivery, sent
        self._rank = rank
        self._numel = layouts.spec(expected).numel
        self._placement = layouts.placement(sent)
        sender, copy = delivery.sender, delivery.copy
        same = layouts.spec(sent).dims == layouts.spec(expected).dims and layouts.whole_shape(
            sent, sender
        ) == layouts.whole_shape(expected, rank)
        if same:
            self._wanted = layouts.map(expected, layouts.placement(expected), rank, copy)
        else:  # two different tensors: that is for another rule; each element is to lie where its sender has it
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
        """Holders of ``length`` elements from ``whole`` on, the message's sender first; with their local index."""
        sender, copy = self._delivery.sender, self._delivery.copy
        mates = [(sender, copy), *(m for m in self._layouts.team_of(sender) if m != (sender, copy))]
        found: list[tuple[int, ElementRange]] = []
        for rank, mate_copy in mates:
            held = self._layouts.map(self._sent, self._placement, rank, mate_copy)
            for here, there, num in held.inverted().part(whole, whole + length, local).ranges:
                found.append((here, self._range(rank, mate_copy, there, num)))
            if found:
                return found
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
        spec = self._layouts.spec(self._sent)
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
