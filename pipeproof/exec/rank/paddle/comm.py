"""Communication with Paddle over gloo: a thread for each end of a channel, and collectives in rank order.

The behaviour of Paddle's gloo decides the design:

- ``isend`` and ``irecv`` block, so each end of each channel has its own thread, and a post never blocks the host;
- tags are a counter per rank and group, so each (channel, direction) has its own two-rank group;
- groups that share a store read each other's addresses, so each has a separate store (``exec.store.paddle_store``);
- collectives over more than two ranks hang or are missing, so they are composed of exchanges between pairs, always in
  the same order of pairs, and sums add in group order: every rank gets the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from pipeproof.exec.rank.group_channels import Task, TaskQueue
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.paddle_store import gloo_pairs, process_store, store_address
from pipeproof.schedule.op_table import Channel, Group
from pipeproof.stages.paddle.runtime import quiet_native

_CONNECT_S = 1800.0
"""Timeout of connecting. The watchdog's is shorter."""
_FIRST_GROUP_ID = 1_000
"""First group id after the world's, which ``init_parallel_env`` makes."""


class PaddleChannels:
    """Ends of the channels of one rank, each with its thread; a ``Channels``.

    ``before`` is called in the thread of a channel before each message on it.
    """

    def __init__(
        self, rank: int, groups: Mapping[Channel, Any], before: Callable[[Channel], None] = lambda _: None
    ) -> None:
        self._rank, self._groups, self._before = rank, groups, before
        self._queues = {channel: TaskQueue(f"pipeproof {channel}") for channel in groups}

    def post(self, channel: Channel, buffer: paddle.Tensor, after: Sequence[Task] = ()) -> Task:
        """Queue a contiguous buffer on this rank's end of ``channel`` after the transfers ``after``; return at once."""
        group, is_send = self._groups[channel], self._rank == channel.src
        call = group.process_group.send if is_send else group.process_group.recv

        def move() -> None:
            self._before(channel)
            call(buffer, 1 - group.rank, True).wait()  # noqa: FBT003 - Paddle's argument `sync_op`

        return self._queues[channel].post(buffer, move, after)

    def abort(self) -> None:
        """End all transfers with an error."""
        for each in self._queues.values():
            each.abort()

    def close(self) -> None:
        """End the threads once all transfers are done."""
        for each in self._queues.values():
            each.close()


class PairwiseCollectives:
    """Collectives over one group, composed of all-gathers in two-rank groups.

    Every rank visits the pairs in lexicographic order: both members of the lowest unfinished pair are always ready.
    Sums and maxima are taken in group order.
    """

    def __init__(self, rank: int, group: Group, pairs: Mapping[tuple[int, int], Any]) -> None:
        self.ranks = group.ranks
        self._rank = rank
        self._pairs = pairs

    def among(self, ranks: Sequence[int]) -> PairwiseCollectives:
        """Return the collectives over some of the members, including this rank."""
        return PairwiseCollectives(self._rank, Group("part", tuple(ranks)), self._pairs)

    def gather(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Return the tensors of all members in group order; all shapes and dtypes must be equal."""
        parts = {self._rank: tensor}
        for pair, member in self._own_pairs():
            parts[pair[1 - member]] = self._of_both(pair, tensor)[1 - member]
        return [parts[rank] for rank in self.ranks]

    def _own_pairs(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the pairs of this rank in their common order, with its position in each."""
        for pair in combinations(self.ranks, 2):
            if self._rank in pair:
                yield pair, pair.index(self._rank)

    def _of_both(self, pair: tuple[int, int], tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Return the tensors of both members of a pair; all shapes and dtypes must be equal."""
        received: list[paddle.Tensor] = []
        dist.all_gather(received, tensor, group=self._pairs[pair])
        return received

    def all_gather(self, tensor: paddle.Tensor, dim: int) -> paddle.Tensor:
        """Return the tensors of all members, joined along ``dim`` in group order."""
        return paddle.concat(self.gather(tensor), axis=dim)

    def reduce_scatter(self, tensor: paddle.Tensor, dim: int) -> paddle.Tensor:
        """Return this member's part along ``dim`` of the sum over the members, added in group order."""
        parts = paddle.split(self.reduce(tensor, "sum"), len(self.ranks), axis=dim)
        return parts[self.ranks.index(self._rank)].contiguous()

    def exchange(self, rows: paddle.Tensor, send: Sequence[int], receive: Sequence[int]) -> paddle.Tensor:
        """Send ``send[m]`` rows to each member m, in order; return ``receive[m]`` rows of each, joined in group order.

        The two ranks of a pair gather as many rows as the larger of their two parts has, and each takes its part; if
        both parts are empty, nothing is issued.
        """
        ends = np.cumsum(send)
        sent = {
            m: rows[int(end) - size : int(end)] for m, size, end in zip(self.ranks, send, ends, strict=True) if size
        }
        sizes = dict(zip(self.ranks, zip(send, receive, strict=True), strict=True))
        parts = {self._rank: sent.get(self._rank)}
        for pair, member in self._own_pairs():
            peer = pair[1 - member]
            outgoing, incoming = sizes[peer]
            if most := max(outgoing, incoming):
                padded = paddle.zeros([most, *rows.shape[1:]], dtype=rows.dtype)
                if outgoing:
                    padded[:outgoing] = sent[peer]
                gathered = self._of_both(pair, padded)[1 - member]
                parts[peer] = gathered[:incoming] if incoming else None
        full = [part for rank in self.ranks if (part := parts.get(rank)) is not None]
        return paddle.concat(full) if full else paddle.zeros([0, *rows.shape[1:]], dtype=rows.dtype)

    def reduce(self, tensor: paddle.Tensor, reduction: str) -> paddle.Tensor:
        """Return the ``sum`` or ``max`` over the members, taken in group order, in a new tensor."""
        return functools.reduce({"sum": paddle.add, "max": paddle.maximum}[reduction], self.gather(tensor))


@dataclass(frozen=True)
class PaddleWorld:
    """Connected communication of one rank."""

    rank: int
    channels: PaddleChannels
    collectives: dict[int, PairwiseCollectives]
    """Collectives of the groups that this rank is a member of, by index of the graph's groups."""

    def barrier(self) -> None:
        """Wait until all ranks have called this. For one rank Paddle makes no group, and there is no wait."""
        if dist.get_world_size() > 1:
            dist.barrier()


def connect(
    rank: int, channels: tuple[Channel, ...], groups: tuple[Group, ...], progress: Callable[[str], None]
) -> PaddleWorld:
    """Join the world of the ``PADDLE_*`` environment and make every group.

    Every rank must call this with the same channels and groups.
    """
    progress("joining the world group")
    with quiet_native():
        dist.init_parallel_env()

    everyone = dist.get_world_size()
    pairs = [pair for group in groups for pair in combinations(group.ranks, 2)]
    wanted = [(min(c.src, c.dst), max(c.src, c.dst)) for c in channels] + pairs
    if wanted:
        progress("connecting channels and groups")
    made = connected_pairs(rank, everyone, wanted, _FIRST_GROUP_ID)
    by_channel = {channel: made[position] for position, channel in enumerate(channels) if position in made}
    collectives: dict[int, PairwiseCollectives] = {}
    position = len(channels)
    for index, group in enumerate(groups):
        of_group = {pair: made.get(position + k) for k, pair in enumerate(combinations(group.ranks, 2))}
        position += len(of_group)
        if rank in group.ranks:
            collectives[index] = PairwiseCollectives(rank, group, of_group)
    return PaddleWorld(rank, PaddleChannels(rank, by_channel), collectives)


def connected_pairs(
    rank: int, num_ranks: int, wanted: Sequence[tuple[int, int]], first_id: int
) -> dict[int, dist.communication.group.Group]:
    """Make the groups of pairs that have this rank, by their position in ``wanted``; every rank must call this.

    Their ids, from ``first_id`` on, must be new.
    """
    if not wanted:
        return {}
    store = process_store(*store_address(), num_ranks, f"pipeproof/connect/{first_id}/", is_first=rank == 0)
    return gloo_pairs(wanted, first_id, Agreement(store, rank, num_ranks, _CONNECT_S))
