"""Communication of a pipeline that trains a script's Paddle layers: groups of its own, not the script's or Fleet's.

On gloo every channel and every pair has a two-rank group (``exec.rank.paddle.comm`` gives the reasons), and both ends
of a message meet before it moves. Each channel has a thread that executes its transfers: a failure elsewhere can wake
the rank.

On other devices the groups have Paddle's default backend (NCCL on GPUs), and a post never blocks the host.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group as PaddleGroup

from pipeproof.exec.rank.group_channels import TaskQueue, TransfersEnded
from pipeproof.exec.rank.paddle.comm import PaddleChannels, PairwiseCollectives
from pipeproof.exec.rank.paddle.nccl import NcclChannels, NcclCollectives
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.paddle_store import PaddleStore, gloo_pairs, process_group, store_address
from pipeproof.exec.store.rendezvous import address_towards
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.schedule.op_table import Channel, Group, OpGraph

_READY = b"1"
_CONNECT_S = 60.0


class Rendezvous:
    """This rank's end of one connection to a peer, on which both ends of a message wait for each other.

    Paddle's gloo gives up a message after 30 seconds, and a rank may wait much longer: for a data loader, or for
    another rank's checkpoint. So both ends of a channel first exchange a byte over a socket, and gloo moves the message
    when both are there. A peer that has gone is noticed at once.
    """

    def __init__(self, end: socket.socket, peer: int) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(None)
        self._end, self._peer = end, peer

    def meet(self) -> None:
        """Wait until the peer has made the same number of calls.

        Raises:
            TransfersEnded: the pipeline has failed meanwhile, or the peer has gone.
        """
        try:
            self._end.sendall(_READY)
            answer = self._end.recv(1)
        except OSError:
            answer = b""
        if answer != _READY:
            raise TransfersEnded(f"the peer, rank {self._peer}, has gone or has given up its transfers")

    def end(self) -> None:
        """End all waits, on both sides."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)


def connect_pairs(pairs: Sequence[tuple[int, ...]], agreement: Agreement) -> dict[int, Rendezvous]:
    """Connect the pairs of ranks that have this one, by their position.

    Raises:
        PipelineError: a rank cannot connect; every rank raises it.
    """
    index = agreement.rank
    listeners: dict[int, socket.socket] = {}

    def listen() -> dict[str, tuple[str, int]]:
        own = address_towards(*store_address())
        for position, (_, second) in enumerate(pairs):
            if second == index:
                listeners[position] = socket.create_server((own, 0), backlog=1)
        return {str(position): listener.getsockname()[:2] for position, listener in listeners.items()}

    reports = agreement.gather("addresses", listen)
    addresses: Mapping[int, tuple[str, int]] = {
        int(position): (str(host), int(port)) for of_rank in reports for position, (host, port) in of_rank.items()
    }
    made: dict[int, Rendezvous] = {}

    def connect() -> None:
        for position, (first, second) in enumerate(pairs):
            if first == index:
                made[position] = Rendezvous(socket.create_connection(addresses[position], timeout=_CONNECT_S), second)
        for position, listener in listeners.items():
            with listener:
                listener.settimeout(_CONNECT_S)
                made[position] = Rendezvous(listener.accept()[0], pairs[position][0])

    try:
        agreement.gather("rendezvous", connect)
    except PipelineError:
        for one in made.values():
            one.end()
        raise
    return made


Tensor: TypeAlias = paddle.Tensor
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0001, 0.005
_GET_S = 10.0


class GlooSums(PairwiseCollectives):
    """Sums and copies over some ranks by exchanges between pairs, always in one order of pairs, on a thread."""

    def __init__(
        self,
        index: int,
        group: Group,
        pairs: Mapping[tuple[int, int], PaddleGroup],
        rendezvous: Mapping[tuple[int, int], Rendezvous],
        tasks: TaskQueue,
    ) -> None:
        super().__init__(index, group, pairs)
        self._rendezvous, self._tasks = rendezvous, tasks

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all members in group order."""
        parts: list[Tensor] = []
        self._tasks.post(tensor, lambda: parts.extend(PairwiseCollectives.gather(self, tensor))).wait()
        return parts

    def _of_both(self, pair: tuple[int, int], tensor: Tensor) -> list[Tensor]:
        received: list[Tensor] = [paddle.empty_like(tensor) for _ in pair]
        self._rendezvous[pair].meet()
        self._pairs[pair].process_group.all_gather(received, tensor, True).wait()  # noqa: FBT003 - `sync_op`
        return received

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with a member's tensor."""

        def move() -> None:
            for pair, member in self._own_pairs():
                if source not in pair:
                    continue
                self._rendezvous[pair].meet()
                group = self._pairs[pair].process_group
                if self._rank == source:
                    group.send(tensor, 1 - member, True).wait()  # noqa: FBT003
                else:
                    group.recv(tensor, 1 - member, True).wait()  # noqa: FBT003

        self._tasks.post(tensor, move).wait()


class StoreCopies:
    """Copies of a tensor on all ranks through the store: without a group for each pair of ranks.

    No rank may be two copies ahead: between two copies there are messages of a step, or an agreement.
    """

    def __init__(self, index: int, store: PaddleStore) -> None:
        self._index, self._store, self._count = index, store, 0
        self._has_ended = threading.Event()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with a rank's tensor."""
        self._count += 1
        values = tensor.numpy()
        if self._index == source:
            self._store.set("copy", base64.b64encode(values.tobytes()).decode())
            return
        pause = _FIRST_POLL_S
        while self._store.add("copy#") < self._count:
            if self._has_ended.wait(pause):
                raise TransfersEnded("the pipeline has failed")
            pause = min(2 * pause, _LONGEST_POLL_S)
        content = base64.b64decode(self._store.get("copy", _GET_S))
        tensor.set_value(np.frombuffer(content, values.dtype).reshape(values.shape))

    def abort(self) -> None:
        """End all waits."""
        self._has_ended.set()


class DeviceSums(NcclCollectives):
    """Sums and copies over some ranks by one group on a device."""

    def __init__(self, index: int, ranks: tuple[int, ...], group: PaddleGroup) -> None:
        super().__init__(index, ranks, group, computes=True)
        self._process_group = group

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with a member's tensor."""
        dist.stream.broadcast(tensor, src=source, group=self._process_group, use_calc_stream=True)


Sums: TypeAlias = GlooSums | DeviceSums
"""Sums and copies over some of the pipeline's ranks; a ``Collectives`` for gradients of shared weights."""


@dataclass(frozen=True)
class StageWorld:
    """The connected groups of one rank; a ``World``. ``rank`` is the rank in the pipeline."""

    rank: int
    channels: PaddleChannels | NcclChannels
    collectives: Mapping[int, Sums]
    """By index of the graph's groups, without groups of one member."""
    everyone: StoreCopies | DeviceSums | None
    """Copies on all ranks of the pipeline; None for one rank."""
    rendezvous: Sequence[Rendezvous] = ()
    tasks: TaskQueue | None = None

    def barrier(self) -> None:
        """Not needed: a step has no barrier."""
        raise NotImplementedError

    def abort(self) -> None:
        """Abort all communication: ranks that wait for this one get an error.

        On a device nothing can end a transfer under way: the stall watch ends the process.
        """
        for one in self.rendezvous:
            one.end()
        if self.tasks is not None:
            self.tasks.abort()
        if isinstance(self.everyone, StoreCopies):
            self.everyone.abort()
        if isinstance(self.channels, PaddleChannels):
            self.channels.abort()


def connect_stages(graph: OpGraph, agreement: Agreement, store: PaddleStore) -> StageWorld:
    """Make the groups of a pipeline in one order, and use each once on a device.

    Raises:
        PipelineError: a rank cannot connect; every rank raises it.
    """
    index, num_ranks = agreement.rank, agreement.num_ranks
    if num_ranks == 1:
        return StageWorld(index, PaddleChannels(index, {}), {}, None)
    backend, everyone = str(dist.get_backend()).lower(), tuple(range(num_ranks))
    is_gloo = backend == "gloo"
    sums = {number: group.ranks for number, group in enumerate(graph.groups) if len(group.ranks) > 1}
    pairs = sorted({pair for ranks in sums.values() for pair in combinations(ranks, 2)})
    wanted: list[tuple[int, ...]] = [(channel.src, channel.dst) for channel in graph.channels]
    num_channels = len(wanted)
    wanted += pairs if is_gloo else sorted({*sums.values(), everyone})
    first_id = agreement.gather("group ids", lambda: 0 if index else store.reserve_group_ids(len(wanted)))[0]
    if is_gloo:
        made = gloo_pairs(wanted, first_id, agreement)
    else:
        made = _device_groups(wanted, first_id, backend, agreement, store)
    channels = {channel: made[position] for position, channel in enumerate(graph.channels) if position in made}
    groups = {wanted[position]: group for position, group in made.items() if position >= num_channels}
    if is_gloo:
        met = connect_pairs(wanted, agreement)
        of_channel = {channel: met[position] for position, channel in enumerate(graph.channels) if position in met}
        of_pair = {(wanted[n][0], wanted[n][1]): one for n, one in met.items() if n >= num_channels}
        by_pair = {(ranks[0], ranks[1]): group for ranks, group in groups.items()}
        tasks = TaskQueue("pipeproof sums")
        collectives: Mapping[int, Sums] = {
            number: GlooSums(index, graph.groups[number], by_pair, of_pair, tasks)
            for number, ranks in sums.items()
            if index in ranks
        }
        ends = PaddleChannels(index, channels, lambda channel: of_channel[channel].meet())
        return StageWorld(index, ends, collectives, StoreCopies(index, store), tuple(met.values()), tasks)
    _use_once(index, channels, groups)
    of_ranks = {ranks: DeviceSums(index, ranks, group) for ranks, group in groups.items()}
    collectives = {number: of_ranks[ranks] for number, ranks in sums.items() if index in ranks}
    return StageWorld(index, NcclChannels(index, channels), collectives, of_ranks[everyone])


def _device_groups(
    wanted: Sequence[tuple[int, ...]], first_id: int, backend: str, agreement: Agreement, store: PaddleStore
) -> dict[int, PaddleGroup]:
    """The groups that have this rank, by their position in ``wanted``; they connect at their first use."""
    index = agreement.rank
    made: dict[int, PaddleGroup] = {}

    def make() -> None:
        for position, ranks in enumerate(wanted):
            if index in ranks:
                made[position] = process_group(ranks, index, backend, store.client, first_id + position)

    agreement.gather("groups", make)
    return made


def _use_once(
    index: int, channels: Mapping[Channel, PaddleGroup], groups: Mapping[tuple[int, ...], PaddleGroup]
) -> None:
    """Use every channel and every group once, in one order on all ranks: NCCL connects at first use."""
    token = paddle.ones([1])
    for channel, group in channels.items():
        call = dist.send if index == channel.src else dist.recv
        peer = channel.dst if index == channel.src else channel.src
        call(token, peer, group=group)
    for group in groups.values():
        dist.all_reduce(token, group=group)
    token.numpy()  # waits for all of it
