"""Communication with PyTorch: a process group for each channel, and one for each group of the graph.

- ``exec.rank.group_channels`` makes channels and groups, on gloo too.
- gloo lacks reduce-scatter and all-to-all for some types. Then exchanges between members replace them, in group order:
every rank gets the same bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeproof.exec.rank.framework_protocol import Channels, Collectives
from pipeproof.exec.rank.group_channels import GroupChannels, connected_groups
from pipeproof.exec.store.torch_store import CONNECT_TIMEOUT, process_store
from pipeproof.schedule.op_table import Channel, Group

_TAG = 0


def post_send(backend: Any, buffer: torch.Tensor, member: int) -> Any:
    """Send a contiguous buffer to a member of the backend's group, as a batch of one; return PyTorch's handle at once.

    A batch uses the communicator of its group. Outside of a batch PyTorch makes another communicator, or warns that the
    message is serialized with all others of its group: these are the messages of one channel.
    """
    backend._start_coalescing()  # noqa: SLF001 - `batch_isend_irecv` does this, behind checks that cost more than it
    backend.send([buffer], member, _TAG)
    return backend._end_coalescing()  # noqa: SLF001


def post_recv(backend: Any, buffer: torch.Tensor, member: int) -> Any:
    """Receive into a contiguous buffer from a member of the backend's group; returns PyTorch's handle at once."""
    backend._start_coalescing()  # noqa: SLF001
    backend.recv([buffer], member, _TAG)
    return backend._end_coalescing()  # noqa: SLF001


class BatchedMessages:
    """Replacement of ``torch.distributed`` for ``exec.rank.group_channels`` on one GPU.

    Groups of channels have two members, and ``src`` or ``dst`` is the other one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def isend(self, buffer: torch.Tensor, *, dst: int, group: dist.ProcessGroup) -> Any:
        """Send to the rank ``dst``."""
        return post_send(group._get_backend(self._device), buffer, 1 - group.rank())  # noqa: SLF001

    def irecv(self, buffer: torch.Tensor, *, src: int, group: dist.ProcessGroup) -> Any:
        """Receive from the rank ``src``."""
        return post_recv(group._get_backend(self._device), buffer, 1 - group.rank())  # noqa: SLF001

    def send(self, buffer: torch.Tensor, *, dst: int, group: dist.ProcessGroup) -> None:
        """Send, and have the current stream wait."""
        self.isend(buffer, dst=dst, group=group).wait()

    def recv(self, buffer: torch.Tensor, *, src: int, group: dist.ProcessGroup) -> None:
        """Receive, and have the current stream wait."""
        self.irecv(buffer, src=src, group=group).wait()

    def all_reduce(self, tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        """Add up over the group."""
        dist.all_reduce(tensor, group=group)


class Begun:
    """A collective that has begun; a ``BegunCollective``. It keeps its tensors until it is dropped."""

    __slots__ = ("_join", "_kept", "_works")

    def __init__(self, works: Sequence[Any], join: Callable[[], torch.Tensor], *kept: torch.Tensor) -> None:
        self._works, self._join, self._kept = works, join, kept

    def block(self) -> None:
        """Block the host until it has ended; on a GPU block the current stream instead."""
        for work in self._works:
            work.wait()

    def wait(self) -> torch.Tensor:
        """Block, and return the result."""
        self.block()
        return self._join()


def combined(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the ``sum`` or ``max`` of tensors, taken in their order."""
    return functools.reduce({"sum": torch.add, "max": torch.maximum}[reduction], parts)


class BegunCollectives:
    """Collectives over one group that the caller waits for, see ``Begun``; an ``AsyncCollectives``.

    On NCCL they run on the group's stream after all work that the current stream has launched so far. With ``at_once``
    the current stream's next kernel already sees their results when the call returns.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup, *, at_once: bool) -> None:
        self.ranks, self._group_rank, self._group, self._is_async = ranks, ranks.index(rank), group, not at_once
        self._native = dist.get_backend(group) == "nccl"

    def all_gather(self, tensor: torch.Tensor, dim: int) -> Begun:
        """Begin ``Collectives.all_gather``."""
        if self._native and _is_outermost(tensor, dim):
            shape = list(tensor.shape)
            shape[dim] *= len(self.ranks)
            joined = tensor.new_empty(shape)
            into = joined.view(-1), tensor.view(-1)
            work = dist.all_gather_into_tensor(*into, group=self._group, async_op=self._is_async)
            return Begun(_works(work), lambda: joined, tensor)
        parts, works = self._parts(tensor)
        return Begun(works, lambda: torch.cat(parts, dim), tensor)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> Begun:
        """Begin ``Collectives.reduce``."""
        if self._native:
            result = tensor.clone()
            work = dist.all_reduce(result, op=_NATIVE[reduction], group=self._group, async_op=self._is_async)
            return Begun(_works(work), lambda: result)
        parts, works = self._parts(tensor)
        return Begun(works, lambda: combined(parts, reduction), tensor)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> Begun:
        """Begin ``Collectives.reduce_scatter``."""
        if not self._native:
            addends, works = self._parts(tensor)

            def own_part() -> torch.Tensor:
                return combined(addends, "sum").chunk(len(self.ranks), dim)[self._group_rank].contiguous()

            return Begun(works, own_part, tensor)
        if _is_outermost(tensor, dim) and tensor.shape[dim] % len(self.ranks) == 0:
            shape = list(tensor.shape)
            shape[dim] //= len(self.ranks)
            result = tensor.new_empty(shape)
            into = result.view(-1), tensor.view(-1)
            work = dist.reduce_scatter_tensor(*into, group=self._group, async_op=self._is_async)
            return Begun(_works(work), lambda: result, tensor)
        parts = [part.contiguous() for part in tensor.chunk(len(self.ranks), dim)]
        result = torch.empty_like(parts[0])
        work = dist.reduce_scatter(result, parts, group=self._group, async_op=self._is_async)
        return Begun(_works(work), lambda: result, *parts)

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> Begun:
        """Begin ``Collectives.exchange``."""
        result = rows.new_empty([sum(receive), *rows.shape[1:]])
        if self._native:
            sizes = list(receive), list(send)
            work = dist.all_to_all_single(result, rows, *sizes, group=self._group, async_op=self._is_async)
            return Begun(_works(work), lambda: result, rows)
        outgoing, incoming = rows.split(list(send)), result.split(list(receive))
        incoming[self._group_rank].copy_(outgoing[self._group_rank])
        works = []
        for member, rank in enumerate(self.ranks):
            if member != self._group_rank:
                if send[member]:
                    works.append(dist.isend(outgoing[member].contiguous(), dst=rank, group=self._group))
                if receive[member]:
                    works.append(dist.irecv(incoming[member], src=rank, group=self._group))
        return Begun(works, lambda: result, rows)

    def _parts(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], list[Any]]:
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        return parts, _works(dist.all_gather(parts, tensor, group=self._group, async_op=self._is_async))


class GroupCollectives:
    """Collectives over one group of ranks, waited for at once. Each takes contiguous tensors and returns new ones."""

    def __init__(self, rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self.ranks, self._now = ranks, BegunCollectives(rank, ranks, group, at_once=True)
        self.begun = BegunCollectives(rank, ranks, group, at_once=False)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensors of all members, joined along ``dim`` in group order; shapes and types must be equal."""
        return self._now.all_gather(tensor, dim).wait()

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the ``sum`` or ``max`` over the members; on gloo taken in group order."""
        return self._now.reduce(tensor, reduction).wait()

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this member's part along ``dim`` of the sum over all members; added in group order, NCCL excepted."""
        return self._now.reduce_scatter(tensor, dim).wait()

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send ``send[m]`` rows to each member m; return ``receive[m]`` rows of each, joined in group order."""
        return self._now.exchange(rows, send, receive).wait()


def _works(work: Any) -> list[Any]:
    """Handles of a collective; none if it was not asynchronous."""
    return [] if work is None else [work]


def _is_outermost(tensor: torch.Tensor, dim: int) -> bool:
    """Return True if parts along a dim are contiguous in memory: joining or splitting then copies nothing."""
    return all(size == 1 for size in tensor.shape[:dim])


_NATIVE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class TorchWorld:
    """Connected communication of one rank."""

    rank: int
    device: torch.device
    channels: Channels
    collectives: dict[int, Collectives]
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
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # keys of an earlier start are still in the store
    store = process_store().part(f"world/{attempt}/")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store.of_groups,
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
    messages = BatchedMessages(device) if device.type == "cuda" else dist
    by_channel, by_group = connected_groups(
        messages, _group, rank, token, channels, groups, progress, _prior_group if device.type == "cuda" else _group
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    collectives: dict[int, Collectives] = {
        index: GroupCollectives(rank, groups[index].ranks, group) for index, group in by_group.items()
    }
    return TorchWorld(rank, device, GroupChannels(messages, rank, by_channel), collectives)


def _group(ranks: Sequence[int], options: Any = None) -> dist.ProcessGroup:
    process_group = dist.new_group(list(ranks), timeout=CONNECT_TIMEOUT, pg_options=options)
    assert process_group is not None
    return process_group


def _prior_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a group on NCCL whose kernels get a multiprocessor before waiting kernels of computations.

    In overlapped pairs, a product would otherwise delay the exchange of tokens that should run next to it.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = CONNECT_TIMEOUT  # noqa: SLF001 - as `new_group` sets it, which warns of another one
    return _group(ranks, options)
