"""Communication with Paddle on GPUs: one communicator for each channel and group, and no kernel of Paddle's.

- ``exec.rank.group_channels`` makes channels and groups. There are no threads.
- The partial transport is Fleet's: the process group gets the whole tensor, and sends, receives or gathers the slice of
  one rank.
- ``paddle.distributed.barrier`` launches a kernel on GPUs. Here ranks wait for each other at the store of the
  rendezvous: a build whose kernels do nothing on this GPU can still copy and communicate, and so rehearse.
- A rehearsal (``computes`` is not set) only issues NCCL's sums and moves memory. A run adds the gathered tensors in
group order, with the bits of the ordered reference.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from pipeproof.exec.rank.group_channels import GroupChannels, PostedTransfer, connected_groups
from pipeproof.exec.rank.message_buffers import Slice
from pipeproof.schedule.op_table import Channel, Group
from pipeproof.stages.paddle.runtime import quiet_native

_ProcessGroup = Any
"""Handle of a group in ``paddle.distributed``."""


class NcclChannels(GroupChannels):
    """Ends of all channels on one rank; ``SliceChannels``."""

    def __init__(self, rank: int, groups: Mapping[Channel, _ProcessGroup]) -> None:
        super().__init__(dist, rank, groups)

    def post_slice(self, channel: Channel, part: Slice, after: Sequence[PostedTransfer] = ()) -> PostedTransfer:
        """Start moving a slice of a tensor, with the calls of Fleet's partial transport."""
        group = self._groups[channel]
        posted_ns = time.monotonic_ns()
        is_send = self._rank == channel.src
        peer = group.get_group_rank(channel.dst if is_send else channel.src)
        call = group.process_group.send_partial if is_send else group.process_group.recv_partial
        return PostedTransfer(part, call(part.whole, peer, part.num_slices, part.index, sync_op=False), posted_ns)


class NcclCollectives:
    """Collectives over one group of ranks; ``SliceCollectives``. Each takes contiguous tensors and returns new ones."""

    def __init__(self, rank: int, ranks: tuple[int, ...], group: _ProcessGroup, *, computes: bool) -> None:
        self.ranks, self._group_rank, self._group, self._computes = ranks, ranks.index(rank), group, computes

    def all_gather(self, tensor: paddle.Tensor, dim: int) -> paddle.Tensor:
        """Return the tensors of all members, joined along ``dim`` in group order; shapes and types must be equal."""
        joined = _unwritten([len(self.ranks) * tensor.shape[0], *tensor.shape[1:]], tensor)
        dist.stream.all_gather(joined, tensor, group=self._group, use_calc_stream=True)
        return joined if dim == 0 else paddle.concat(paddle.split(joined, len(self.ranks)), axis=dim)

    def reduce(self, tensor: paddle.Tensor, reduction: str) -> paddle.Tensor:
        """Return the ``sum`` or ``max`` over the members; in a run taken in group order."""
        if not self._computes:
            op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[reduction]
            result = tensor.clone()  # a copy on the device, without a kernel
            dist.stream.all_reduce(result, op, group=self._group, use_calc_stream=True)
            return result
        parts = paddle.split(self.all_gather(tensor.flatten(), 0), len(self.ranks))
        return functools.reduce({"sum": paddle.add, "max": paddle.maximum}[reduction], parts).reshape(tensor.shape)

    def reduce_scatter(self, tensor: paddle.Tensor, dim: int) -> paddle.Tensor:
        """Return this member's part along ``dim`` of the sum over all members; in a run added in group order."""
        if self._computes:
            return paddle.split(self.reduce(tensor, "sum"), len(self.ranks), axis=dim)[self._group_rank].contiguous()
        assert dim == 0, "a rehearsal's tensors are flat"
        part = _unwritten([tensor.shape[0] // len(self.ranks), *tensor.shape[1:]], tensor)
        dist.stream.reduce_scatter(part, tensor, group=self._group, use_calc_stream=True)
        return part

    def exchange(self, rows: paddle.Tensor, send: Sequence[int], receive: Sequence[int]) -> paddle.Tensor:
        """Send ``send[m]`` rows to each member m; return ``receive[m]`` rows of each, joined in group order."""
        result = _unwritten([sum(receive), *rows.shape[1:]], rows)
        call = self._group.process_group.all_to_all_single_on_calc_stream
        call(result, rows, [int(n) for n in receive], [int(n) for n in send])
        return result

    def gather_slices(self, part: Slice) -> paddle.Tensor:
        """Gather the slices of all members in place, with Fleet's call."""
        call = self._group.process_group.all_gather_partial_on_calc_stream
        call(part.whole, part.whole, part.num_slices, part.index)
        return part.whole


def _unwritten(shape: Sequence[int], like: paddle.Tensor) -> paddle.Tensor:
    return paddle.empty(list(shape), dtype=like.dtype)


@dataclass
class NcclWorld:
    """Connected communication of one rank."""

    rank: int
    num_ranks: int
    store: Any
    channels: NcclChannels
    collectives: dict[int, NcclCollectives]
    """Collectives of the groups that this rank is a member of, by index of the graph's groups."""
    _num_barriers: int = field(default=0, init=False)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._num_barriers += 1
        key = f"pipeproof/barrier/{self._num_barriers}"
        if self.store.add(key, 1) == self.num_ranks:
            self.store.set(f"{key}/open", "1")
        self.store.wait(f"{key}/open")
        # The store is a thread of rank 0, which must not end while other ranks wait for it.
        if self.rank > 0:
            self.store.add(f"{key}/left", 1)
        else:
            while self.store.add(f"{key}/left", 0) < self.num_ranks - 1:
                time.sleep(0.001)


def connect(
    rank: int,
    num_ranks: int,
    channels: tuple[Channel, ...],
    groups: tuple[Group, ...],
    progress: Callable[[str], None],
    *,
    computes: bool,
) -> NcclWorld:
    """Join the world of the ``PADDLE_*`` environment, make every group in one order and use each once.

    Every rank must call this with the same channels and groups.
    """
    progress("joining the world group")
    with quiet_native():
        dist.init_parallel_env()
    token = paddle.to_tensor(np.ones(1, dtype="float32"))
    by_channel, by_group = connected_groups(dist, dist.new_group, rank, token, channels, groups, progress)
    token.numpy()  # waits for all of it
    collectives = {
        index: NcclCollectives(rank, groups[index].ranks, group, computes=computes) for index, group in by_group.items()
    }
    store = paddle.base.core.create_or_get_global_tcp_store()
    return NcclWorld(rank, num_ranks, store, NcclChannels(rank, by_channel), collectives)
