"""Communication with PyTorch: a process group for each channel, and one for each group of the graph.

- Each directed edge between two ranks (a channel) has its own group, so that no direction waits for another: on NCCL a
  communicator with its own stream, on gloo its own FIFO.
- All groups are made in one global order, and each is used once before the first step: NCCL connects at first use, and
  a receive that spins on a GPU without loaded kernels may wait forever.
- On a GPU nothing here blocks the host: a transfer starts after the work launched before it, and a wait blocks the
  current stream.
- gloo lacks reduce-scatter and all-to-all for some types; there they are composed of exchanges between members, in
  group order, so that every rank gets the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeproof.exec.rank.framework_protocol import Channels
from pipeproof.schedule.op_table import Channel, Group

CONNECT_TIMEOUT = timedelta(minutes=30)
"""Timeout of the backend. The watchdog's is shorter and knows the operation."""


@dataclass(slots=True)
class Transfer:
    """A posted transfer and its buffer; times in nanoseconds of the host's monotonic clock.

    On a GPU ``end_ns`` is when the host continued, not when the data arrived.
    """

    buffer: torch.Tensor
    work: dist.Work
    posted_ns: int
    start_ns: int = 0
    end_ns: int = 0

    def wait(self) -> None:
        """Block the host until the transfer is done; on a GPU block the current stream instead."""
        self.work.wait()
        self.start_ns, self.end_ns = self.posted_ns, time.monotonic_ns()


class TorchChannels:
    """Ends of all channels on one rank."""

    def __init__(self, rank: int, groups: dict[Channel, dist.ProcessGroup]) -> None:
        self._rank = rank
        self._groups = {channel: group for channel, group in groups.items() if rank in (channel.src, channel.dst)}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Start moving a contiguous buffer over this rank's end of ``channel``; returns at once.

        The transfers in ``after`` are on the same channel, which is a FIFO (``exec.executor_support`` refuses others).
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
        """Do nothing: the rank has waited for every transfer."""


class GroupCollectives:
    """Collectives over one group of ranks. Each takes contiguous tensors and returns new ones."""

    def __init__(self, rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self.ranks, self._group_rank, self._group = ranks, ranks.index(rank), group
        self._native = dist.get_backend(group) == "nccl"

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensors of all members, joined along ``dim`` in group order; shapes and types must be equal."""
        if self._native and _is_outermost(tensor, dim):
            shape = list(tensor.shape)
            shape[dim] *= len(self.ranks)
            joined = tensor.new_empty(shape)
            dist.all_gather_into_tensor(joined.view(-1), tensor.view(-1), group=self._group)
            return joined
        return torch.cat(self._parts(tensor), dim)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the ``sum`` or ``max`` over the members; on gloo taken in group order."""
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
        """Return this member's part along ``dim`` of the sum over all members; on gloo added in group order."""
        if not self._native:
            return self.reduce(tensor, "sum").chunk(len(self.ranks), dim)[self._group_rank].contiguous()
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
        """Send ``send[m]`` rows to each member m; return ``receive[m]`` rows of each, joined in group order."""
        result = rows.new_empty([sum(receive), *rows.shape[1:]])
        if self._native:
            dist.all_to_all_single(result, rows, list(receive), list(send), group=self._group)
            return result
        outgoing, incoming = rows.split(list(send)), result.split(list(receive))
        incoming[self._group_rank].copy_(outgoing[self._group_rank])
        works = []
        for member, rank in enumerate(self.ranks):
            if member != self._group_rank:
                if send[member]:
                    works.append(dist.isend(outgoing[member].contiguous(), dst=rank, group=self._group))
                if receive[member]:
                    works.append(dist.irecv(incoming[member], src=rank, group=self._group))
        for work in works:
            assert work is not None
            work.wait()
        return result


def _is_outermost(tensor: torch.Tensor, dim: int) -> bool:
    """Return True if parts along a dim are contiguous in memory, so that joining or splitting copies nothing."""
    return all(size == 1 for size in tensor.shape[:dim])


_NATIVE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class TorchWorld:
    """Connected communication of one rank."""

    rank: int
    device: torch.device
    channels: Channels
    collectives: dict[int, GroupCollectives]
    """Collectives of the groups that this rank is a member of, by index of the graph's groups."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        dist.barrier()


def connect(
    rank: int,
    num_ranks: int,
    device: torch.device,
    channels: tuple[Channel, ...],
    groups: tuple[Group, ...],
    progress: Callable[[str], None],
) -> TorchWorld:
    """Join the world at ``MASTER_ADDR`` and ``MASTER_PORT``, make every group and use each once.

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
    """Make every group of a joined world, in one order on all ranks, and use each once."""
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
        process_group = _group(group.ranks)
        if rank in group.ranks:
            collectives[index] = GroupCollectives(rank, group.ranks, process_group)
            dist.all_reduce(token, group=process_group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return TorchWorld(rank, device, TorchChannels(rank, by_channel), collectives)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    process_group = dist.new_group(list(ranks), timeout=CONNECT_TIMEOUT)
    assert process_group is not None
    return process_group
