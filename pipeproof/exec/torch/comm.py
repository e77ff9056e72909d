"""PyTorch's communication as the graph needs it: a process group for each channel, and one for each group.

- Each directed edge between two ranks (a channel) has a group of its own, so
  that no direction waits behind another: on NCCL that is a communicator with a
  stream of its own, on gloo a FIFO of its own.
- All groups are made in one global order, and every one is used once before
  the first step: NCCL connects at first use, and a receive that spins on a GPU
  whose kernels are not loaded yet may wait for ever.
- On a GPU nothing here makes the host wait: a transfer starts after what was
  launched before it, and a wait makes the current stream wait for it.
- gloo has neither reduce-scatter nor all-to-all for all types; there they are
  composed of exchanges between members, in group order, so that every rank
  gets the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeproof.exec.framework import Channels
from pipeproof.schedule.optable import Channel, Group

CONNECT_TIMEOUT = timedelta(minutes=30)
"""The backend's own patience. The watchdog's is shorter, and knows the operation."""


@dataclass(slots=True)
class Transfer:
    """A posted transfer and its buffer; times in nanoseconds of the host's monotonic clock.

    On a GPU ``end_ns`` is when the host went on, not when the data was there.
    """

    buffer: torch.Tensor
    work: dist.Work
    posted_ns: int
    start_ns: int = 0
    end_ns: int = 0

    def wait(self) -> None:
        """Block until the transfer is done, on a GPU the current stream in place of the host."""
        self.work.wait()
        self.start_ns, self.end_ns = self.posted_ns, time.monotonic_ns()


class TorchChannels:
    """The ends that one rank has of every channel."""

    def __init__(self, rank: int, groups: dict[Channel, dist.ProcessGroup]) -> None:
        self._rank = rank
        self._groups = {channel: group for channel, group in groups.items() if rank in (channel.src, channel.dst)}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Start moving a contiguous buffer over this rank's end of ``channel``; returns at once.

        What it comes ``after`` is on the same channel (``exec.carried_out`` refuses what asks for more), which is a
        FIFO already.
        """
        group = self._groups[channel]
        posted_ns = time.monotonic_ns()  # the peer may have it before this call returns
        if self._rank == channel.src:
            work = dist.isend(buffer, dst=channel.dst, group=group)
        else:
            work = dist.irecv(buffer, src=channel.src, group=group)
        assert work is not None
        return Transfer(buffer, work, posted_ns)

    def close(self) -> None:
        """Nothing is left to end: every transfer was waited for."""


class GroupCollectives:
    """Collectives over one group of ranks. Each returns new tensors and takes contiguous ones."""

    def __init__(self, rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self.ranks, self._place, self._group = ranks, ranks.index(rank), group
        self._native = dist.get_backend(group) == "nccl"

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What every member put in, joined along ``dim`` in group order; all shapes and types must be the same."""
        if self._native and _is_outermost(tensor, dim):
            shape = list(tensor.shape)
            shape[dim] *= len(self.ranks)
            joined = tensor.new_empty(shape)
            dist.all_gather_into_tensor(joined.view(-1), tensor.view(-1), group=self._group)
            return joined
        return torch.cat(self._parts(tensor), dim)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """``sum`` or ``max`` over the members; on gloo taken in group order."""
        if self._native:
            result = tensor.clone()
            dist.all_reduce(result, op=_NATIVE[reduction], group=self._group)
            return result
        combine = {"sum": torch.add, "max": torch.maximum}[reduction]
        first, *others = self._parts(tensor)
        for part in others:
            first = combine(first, part)
        return first

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor, group=self._group)
        return parts

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This member's part along ``dim`` of the sum over all; on gloo added in group order."""
        if not self._native:
            return self.reduce(tensor, "sum").chunk(len(self.ranks), dim)[self._place].contiguous()
        if _is_outermost(tensor, dim) and tensor.shape[dim] % len(self.ranks) == 0:
            shape = list(tensor.shape)
            shape[dim] //= len(self.ranks)
            result = tensor.new_empty(shape)
            dist.reduce_scatter_tensor(result.view(-1), tensor.view(-1), group=self._group)
            return result
        parts = [part.contiguous() for part in tensor.chunk(len(self.ranks), dim)]
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, group=self._group)
        return result

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """``send[m]`` rows, in order, to each member m, and ``receive[m]`` from it, joined in group order."""
        result = rows.new_empty([sum(receive), *rows.shape[1:]])
        if self._native:
            dist.all_to_all_single(result, rows, list(receive), list(send), group=self._group)
            return result
        outgoing, incoming = rows.split(list(send)), result.split(list(receive))
        incoming[self._place].copy_(outgoing[self._place])
        works = []
        for place, rank in enumerate(self.ranks):
            if place != self._place:
                if send[place]:
                    works.append(dist.isend(outgoing[place].contiguous(), dst=rank, group=self._group))
                if receive[place]:
                    works.append(dist.irecv(incoming[place], src=rank, group=self._group))
        for work in works:
            assert work is not None
            work.wait()
        return result


def _is_outermost(tensor: torch.Tensor, dim: int) -> bool:
    """Whether parts along a dim lie one behind the other in memory: nothing is copied to join or to cut them."""
    return all(size == 1 for size in tensor.shape[:dim])


_NATIVE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class TorchWorld:
    """One rank's communication, connected and ready."""

    rank: int
    device: torch.device
    channels: Channels
    collectives: dict[int, GroupCollectives]
    """By index of the graph's groups, those that this rank is a member of."""

    def barrier(self) -> None:
        """No rank leaves before all have come."""
        dist.barrier()


def connect(
    rank: int,
    num_ranks: int,
    device: torch.device,
    channels: tuple[Channel, ...],
    groups: tuple[Group, ...],
    progress: Callable[[str], None],
) -> TorchWorld:
    """Join the world that ``MASTER_ADDR`` and ``MASTER_PORT`` describe, make every group and use each once.

    Every rank must call this with the same channels and groups.
    """
    progress("joining the world group")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=rank,
        world_size=num_ranks,
        timeout=CONNECT_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    return connect_groups(rank, device, channels, groups, progress)


def connect_groups(
    rank: int,
    device: torch.device,
    channels: tuple[Channel, ...],
    groups: tuple[Group, ...],
    progress: Callable[[str], None],
) -> TorchWorld:
    """In a world that all ranks have joined: make every group, in one order on all ranks, and use each once."""
    token = torch.ones(1, device=device)
    by_channel: dict[Channel, dist.ProcessGroup] = {}
    for channel in channels:
        progress(f"connecting {channel}")
        by_channel[channel] = _group([channel.src, channel.dst])
        if rank == channel.src:
            dist.send(token, dst=channel.dst, group=by_channel[channel])
        elif rank == channel.dst:
            dist.recv(token, src=channel.src, group=by_channel[channel])
    collectives: dict[int, GroupCollectives] = {}
    for index, group in enumerate(groups):
        progress(f"connecting {group.axis} group {', '.join(map(str, group.ranks))}")
        made = _group(group.ranks)
        if rank in group.ranks:
            collectives[index] = GroupCollectives(rank, group.ranks, made)
            dist.all_reduce(token, group=made)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return TorchWorld(rank, device, TorchChannels(rank, by_channel), collectives)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), timeout=CONNECT_TIMEOUT)
    assert made is not None
    return made
