"""Collectives over GPUs of one host as copies by copy engines: each member sends to every other on its own channel.

Kernels only add, for a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch

from pipeproof.exec.rank.torch.begun import Begun, WaitedCollectives, combined
from pipeproof.exec.rank.torch.copy_channels import AllEnded
from pipeproof.schedule.op_table import Channel, Group

SLOT_BYTES: Final = 2**26
"""Bytes of a slot; larger tensors move in pieces, each of which costs the host some calls and the GPU about 10 us."""


def pair_channels(groups: Iterable[Group]) -> dict[Channel, int]:
    """A channel between any two members of each group, with the bytes of its slots, in an order of all ranks."""
    return {
        Channel(group.axis, source, target): SLOT_BYTES
        for group in groups
        for source in group.ranks
        for target in group.ranks
        if source != target
    }


class Reductions(Protocol):
    """Collectives that the backend keeps."""

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the ``sum`` or ``max`` over the members."""
        ...


class Moves(Protocol):
    """Ends of the channels of a rank."""

    def move(
        self, messages: Sequence[tuple[Channel, torch.Tensor]], copied: tuple[torch.Tensor, torch.Tensor] | None
    ) -> AllEnded:
        """Start moving contiguous buffers over this rank's ends, and copying from the second tensor to the first."""
        ...


class BegunCopies:
    """Collectives over one group that the caller waits for; an ``AsyncCollectives``.

    They begin after all that the current stream has launched so far.
    """

    def __init__(self, rank: int, group: Group, channels: Moves) -> None:
        size, own = len(group.ranks), group.ranks.index(rank)
        self._ranks, self._own, self._channels = group.ranks, own, channels
        # From the next member on, so that no link has the messages of all.
        others = [((own + distance) % size, (own - distance) % size) for distance in range(1, size)]
        self._messages = [
            (to, Channel(group.axis, rank, group.ranks[to]), source, Channel(group.axis, group.ranks[source], rank))
            for to, source in others
        ]

    def all_gather(self, tensor: torch.Tensor, dim: int) -> Begun:
        """Begin ``Collectives.all_gather``."""
        parts = tensor.new_empty([len(self._ranks), *tensor.shape])
        transfers = self._begin([tensor] * len(self._ranks), list(parts))

        def joined() -> torch.Tensor:
            return parts.flatten(0, 1) if dim == 0 else torch.cat(list(parts), dim)

        return Begun(transfers, joined, tensor)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> Begun:
        """Begin ``Collectives.reduce_scatter``, which adds in group order."""
        outgoing = [part.contiguous() for part in tensor.chunk(len(self._ranks), dim)]
        own = outgoing[self._own]
        incoming = [own if m == self._own else torch.empty_like(own) for m in range(len(self._ranks))]
        return Begun(self._begin(outgoing, incoming), lambda: combined(incoming, "sum"), *outgoing)

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> Begun:
        """Begin ``Collectives.exchange``."""
        result = rows.new_empty([sum(receive), *rows.shape[1:]])
        transfers = self._begin(rows.split_with_sizes(list(send)), result.split_with_sizes(list(receive)))
        return Begun(transfers, lambda: result, rows)

    def _begin(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> list[AllEnded]:
        """Send each member its tensor and receive from each."""
        messages: list[tuple[Channel, torch.Tensor]] = []
        for member, to_member, source, from_source in self._messages:
            messages += ((to_member, outgoing[member]), (from_source, incoming[source]))
        target, kept = incoming[self._own], outgoing[self._own]
        is_copied = kept.numel() and target is not kept
        return [self._channels.move(messages, (target, kept) if is_copied else None)]


class CopyCollectives(WaitedCollectives):
    """Collectives over one group of ranks, see ``exec.rank.framework_protocol.Collectives``.

    ``channels`` has the ends of ``pair_channels`` on this rank. Calls of all members come in one order.
    """

    def __init__(self, rank: int, group: Group, backend: Reductions, channels: Moves) -> None:
        self.begun, self._backend = BegunCopies(rank, group, channels), backend
        super().__init__(group.ranks, self.begun)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the reduction over the members, as the backend makes it."""
        return self._backend.reduce(tensor, reduction)
