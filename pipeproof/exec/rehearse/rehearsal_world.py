"""Communication of a rehearsal: a framework's channels and collectives, with checks of all arriving elements.

The k-th call of a group in a step is the k-th call in the graph, and its input is made from that identity, flat as on
the wire. Sums and maxima are of integers so small that any order of addition is exact. An exchange of tokens moves as
many rows to each member as the plan estimates: equal numbers, and one more to the first members if the division has a
remainder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from pipeproof.exec.rank.framework_protocol import Channels, Collectives, Tensor, Transfer, World
from pipeproof.exec.rank.message_buffers import Slice, SliceChannels, SliceCollectives
from pipeproof.exec.rank.op_log import collective_dtype
from pipeproof.exec.rehearse.element_identity import (
    Bytes,
    FoundRange,
    Numbers,
    RehearsalArrays,
    RehearsalTensor,
    Source,
    addends,
    decoded,
    encoded,
    found_ranges,
)
from pipeproof.exec.rehearse.rehearsal_arrivals import Arrivals, difference
from pipeproof.schedule.op_table import Channel
from pipeproof.schedule.ops import GATHER_KINDS, SEND_KINDS
from pipeproof.specs.plan_sections import RunSpec

_COLLECTIVE = -1
"""Marker in a key instead of a message's work item."""


class RehearsalTransfer:
    """Transfer whose elements are checked once, when it has ended; a ``Transfer``."""

    def __init__(self, transfer: Transfer, buffer: RehearsalTensor | Slice, check: Callable[[], None] | None) -> None:
        self.transfer, self.buffer, self._check = transfer, buffer, check
        self.posted_ns = self.start_ns = self.end_ns = 0

    def wait(self) -> None:
        """Wait for the transfer, and check the arrived elements."""
        self.transfer.wait()
        self.posted_ns, self.start_ns, self.end_ns = (
            self.transfer.posted_ns,
            self.transfer.start_ns,
            self.transfer.end_ns,
        )
        if self._check is not None:
            self._check()
            self._check = None


class RehearsalChannels:
    """Channels of one rank; a ``Channels``."""

    def __init__(self, channels: Channels, arrays: RehearsalArrays, arrivals: Arrivals) -> None:
        self._channels, self._arrays, self._arrivals = channels, arrays, arrivals

    def post(
        self, channel: Channel, buffer: RehearsalTensor, after: Sequence[RehearsalTransfer] = ()
    ) -> RehearsalTransfer:
        """Post the elements of a tensor to send, or zeros that they replace."""
        moved = self._channels.post(channel, self._arrays.buffer_of(buffer), [earlier.transfer for earlier in after])
        return self._checked(channel, moved, buffer, buffer)

    def _checked(
        self, channel: Channel, moved: Transfer, buffer: RehearsalTensor | Slice, tensor: RehearsalTensor
    ) -> RehearsalTransfer:
        op_id = self._arrivals.transfers.next(channel)
        is_send = self._arrivals.graph.ops[op_id].kind in SEND_KINDS
        return RehearsalTransfer(moved, buffer, None if is_send else lambda: self._arrivals.arrived(op_id, tensor))

    def close(self) -> None:
        """End the threads of the channels."""
        self._channels.close()


class RehearsalSliceChannels(RehearsalChannels):
    """Channels of a backend that moves slices; a ``SliceChannels``."""

    def post_slice(self, channel: Channel, part: Slice, after: Sequence[RehearsalTransfer] = ()) -> RehearsalTransfer:
        """Post a slice of a tensor's elements, or of zeros."""
        assert isinstance(self._channels, SliceChannels)
        real = replace(part, whole=self._arrays.buffer_of(part.whole))
        moved = self._channels.post_slice(channel, real, [earlier.transfer for earlier in after])
        return self._checked(channel, moved, part, part.whole)


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective on one rank: the input of each member, and this rank's index among them."""

    op_id: int
    sources: list[Source]
    index: int
    dtype: str

    @property
    def own(self) -> Source:
        """Input of this rank."""
        return self.sources[self.index]


class CollectiveInputs:
    """Inputs of all members of the collectives of one rank, by the graph."""

    def __init__(self, arrivals: Arrivals, groups: Iterable[int], run: RunSpec) -> None:
        self.graph, self._arrivals, self._run = arrivals.graph, arrivals, run
        self._members: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        """Operation of each rank, by group and position."""
        for op_id in np.flatnonzero(np.isin(self.graph.group, list(groups))).tolist():
            self._members[self._position(op_id)][int(self.graph.rank[op_id])] = op_id

    def next_op(self, group: int) -> int:
        """Return this rank's operation that a group executes now."""
        return self._members[group, self._arrivals.count(group)][self._arrivals.rank]

    def call(self, op_id: int) -> _Call:
        """Return the call of an operation in the current step."""
        ranks = self.graph.groups[int(self.graph.group[op_id])].ranks
        sources = self._sources(*self._position(op_id), self._arrivals.step)
        return _Call(op_id, sources, ranks.index(self._arrivals.rank), self.tensor(op_id).dtype)

    def tensor(self, op_id: int) -> RehearsalTensor:
        """Return the tensor of a layer's collective, without elements."""
        dtype = collective_dtype(self.graph, op_id, self._run.dtype, self._run.weight_dtype)
        return RehearsalTensor((int(self.graph.stop[op_id] - self.graph.start[op_id]),), dtype)

    def nearby(self, call: _Call) -> list[Source]:
        """Inputs of the members to a call, to the calls before and after it, and to this call one step before."""
        (group, position), step = self._position(call.op_id), self._arrivals.step
        sources = list(call.sources)
        for neighbour in (position - 1, position + 1):
            if (group, neighbour) in self._members:
                sources += self._sources(group, neighbour, step)
        return sources + (self._sources(group, position, step - 1) if step > 0 else [])

    def exchanged(self, op_id: int) -> tuple[list[int], list[int]]:
        """Return the rows that this rank sends to and receives from each member of an exchange."""
        call = self.call(op_id)
        shares = _shares(call)
        return shares[call.index], [share[call.index] for share in shares]

    def _position(self, op_id: int) -> tuple[int, int]:
        return int(self.graph.group[op_id]), int(self.graph.position[op_id])

    def _sources(self, group: int, position: int, step: int) -> list[Source]:
        """Inputs of all members, in group order."""
        graph, members = self.graph, self._members[group, position]
        return [
            Source(
                (step, _COLLECTIVE, group, position, rank),
                rank,
                int(graph.stop[members[rank]] - graph.start[members[rank]]),
                f"{graph.ops[members[rank]]} of rank {rank}, step {step}",
            )
            for rank in graph.groups[group].ranks
        ]


class RehearsalCollectives:
    """Collectives over one group of ranks; a ``Collectives`` that makes and checks the elements of each call."""

    def __init__(
        self,
        collectives: Collectives,
        group: int,
        inputs: CollectiveInputs,
        arrays: RehearsalArrays,
        arrivals: Arrivals,
    ) -> None:
        self.ranks = collectives.ranks
        self._collectives, self._group, self._inputs = collectives, group, inputs
        self._arrays, self._arrivals = arrays.real, arrivals

    def all_gather(self, tensor: RehearsalTensor, dim: int) -> RehearsalTensor:
        """Gather received slices, or identities."""
        op_id = self._inputs.next_op(self._group)
        if self._inputs.graph.ops[op_id].kind in GATHER_KINDS:
            return self._joined(op_id, self._collectives.all_gather(tensor.buffer, 0))
        call = self._inputs.call(op_id)
        content = self._arrays.to_bytes(self._collectives.all_gather(self._made(call), 0))
        return self._require_elements(call, content, [(source, 0, source.numel) for source in call.sources])

    def exchange(self, rows: RehearsalTensor, send: Sequence[int], receive: Sequence[int]) -> RehearsalTensor:
        """Exchange ranges of identities; ``CollectiveInputs.exchanged`` has every member's numbers."""
        call = self._inputs.call(self._inputs.next_op(self._group))
        content = self._arrays.to_bytes(self._collectives.exchange(self._made(call), send, receive))
        parts = [
            (source, sum(share[: call.index]), share[call.index])
            for source, share in zip(call.sources, _shares(call), strict=True)
        ]
        return self._require_elements(call, content, parts)

    def reduce(self, tensor: RehearsalTensor, reduction: str) -> RehearsalTensor:
        """Reduce small integers."""
        call = self._inputs.call(self._inputs.next_op(self._group))
        parts = addends(call.sources, call.dtype)
        result = self._collectives.reduce(self._encoded(call, parts), reduction)
        self._require_numbers(call, self._arrays.to_bytes(result), parts, reduction)
        return tensor

    def reduce_scatter(self, tensor: RehearsalTensor, dim: int) -> RehearsalTensor:
        """Reduce and scatter small integers."""
        call = self._inputs.call(self._inputs.next_op(self._group))
        parts = addends(call.sources, call.dtype)
        content = self._arrays.to_bytes(self._collectives.reduce_scatter(self._encoded(call, parts), 0))
        size = call.own.numel // len(parts)
        shard = slice(call.index * size, (call.index + 1) * size)
        self._require_numbers(call, content, [part[shard] for part in parts], "sum")
        return RehearsalTensor((size,), call.dtype)

    def _joined(self, op_id: int, tensor: Tensor) -> RehearsalTensor:
        return self._arrivals.gathered(op_id, self.ranks, self._arrays.to_bytes(tensor))

    def _made(self, call: _Call) -> Tensor:
        numel = call.own.numel
        return self._arrays.from_bytes(call.own.content(0, numel, call.dtype), [numel], call.dtype)

    def _encoded(self, call: _Call, parts: list[Numbers]) -> Tensor:
        return self._arrays.from_bytes(encoded(parts[call.index], call.dtype), [call.own.numel], call.dtype)

    def _require_elements(
        self, call: _Call, content: Bytes, parts: Sequence[tuple[Source, int, int]]
    ) -> RehearsalTensor:
        """Check the result of a call; ``parts`` are (source, start in the source, length) in the result's order."""
        expected, position = [], 0
        for source, start, length in parts:
            if length:
                expected.append(FoundRange(position, position + length, source, start))
            position += length
        self._count(position)
        origins = found_ranges(content, call.dtype, expected, lambda: self._inputs.nearby(call))
        if fact := difference(expected, origins):
            self._add_fault(call, fact)
        return RehearsalTensor((position,), call.dtype)

    def _require_numbers(self, call: _Call, content: Bytes, parts: list[Numbers], reduction: str) -> None:
        total = reduce(np.add if reduction == "sum" else np.maximum, parts)
        self._count(len(total))
        if np.array_equal(encoded(total, call.dtype), content):
            return
        expected, actual = total.astype(np.float64), decoded(content, call.dtype)
        ranks = list(self.ranks)
        if len(actual) != len(expected):
            self._add_fault(call, f"the result has {len(actual)} elements instead of {len(expected)}")
            return
        missing = [rank for rank, part in zip(ranks, parts, strict=True) if np.array_equal(expected - part, actual)]
        wrong = np.flatnonzero(expected != actual)
        first, stop = int(wrong[0]), int(wrong[-1]) + 1
        why = f"; the input of rank {missing[0]} is missing" if missing and reduction == "sum" else ""
        self._add_fault(
            call,
            f"elements {first}..{stop} are not the {reduction} over ranks {ranks}: element {first} is "
            f"{actual[first]:g} instead of {expected[first]:g}{why}",
        )

    def _count(self, num_elements: int) -> None:
        self._arrivals.checked.collectives += 1
        self._arrivals.checked.elements += num_elements

    def _add_fault(self, call: _Call, fact: str) -> None:
        axis = self._inputs.graph.groups[self._group].axis
        self._arrivals.add_fault(call.op_id, f"{axis} ranks {', '.join(map(str, self.ranks))}", fact)


class RehearsalSliceCollectives(RehearsalCollectives):
    """Collectives of a backend that joins slices; a ``SliceCollectives``."""

    def gather_slices(self, part: Slice) -> RehearsalTensor:
        """Join received slices."""
        assert isinstance(self._collectives, SliceCollectives)
        op_id = self._inputs.next_op(self._group)
        return self._joined(op_id, self._collectives.gather_slices(replace(part, whole=part.whole.buffer)))


class RehearsalWorld:
    """Communication of one rank over a framework's ``real`` world; a ``World``."""

    def __init__(self, real: World, inputs: CollectiveInputs, arrays: RehearsalArrays, arrivals: Arrivals) -> None:
        self.rank, self.barrier = real.rank, real.barrier
        channels = RehearsalSliceChannels if isinstance(real.channels, SliceChannels) else RehearsalChannels
        self.channels = channels(real.channels, arrays, arrivals)
        self.collectives = {
            group: (RehearsalSliceCollectives if isinstance(each, SliceCollectives) else RehearsalCollectives)(
                each, group, inputs, arrays, arrivals
            )
            for group, each in real.collectives.items()
        }


def _shares(call: _Call) -> list[list[int]]:
    """Rows that each member sends to each: equal numbers, and one more to the first members if there is a remainder."""
    num_members = len(call.sources)
    return [
        [source.numel // num_members + (index < source.numel % num_members) for index in range(num_members)]
        for source in call.sources
    ]
