"""Process groups that Fleet can use on the CPU: Paddle's group interface on two-rank gloo groups.

Fleet's pipeline is written for NCCL and does not run on Paddle's own gloo groups: their creation hangs with more than
two processes, messages of one group share a counter as their tag, ``isend`` blocks, and the calls of its batched path
(``*_on_calc_stream``, ``partial`` calls, coalescing) are missing. So one function of Paddle's is replaced, the one that
makes the object behind a ``Group``. Topology, schedulers, P2P helper, shared weights and optimizer are Fleet's and call
this object as they would call NCCL's. ``ParallelEnv`` has no device number in a build for CPUs and is given one,
because a ``PipelineLayer`` stores it.

A message is done when its receiver has it. Calls between ``_start_coalescing`` and ``_end_coalescing`` are under way
together and end together, like a group of NCCL calls. Where NCCL orders by the compute stream, the host waits: as on
that stream, nothing that Fleet computes later begins before.
"""

# ruff: noqa: D102, FBT002 - the names, the order of arguments and their meaning are Paddle's `ProcessGroup`
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import paddle
import paddle.distributed.collective as collective

from pipeproof.exec.rank.group_channels import Task
from pipeproof.exec.rank.paddle.comm import PaddleWorld, PairwiseCollectives, connect
from pipeproof.schedule.op_parts import Channel, Group
from validation.fleet.fleet_order import EventRecorder

Tensor: TypeAlias = paddle.Tensor
_COMMUNICATOR = "fleet"


@dataclass(frozen=True, slots=True)
class FleetWorld:
    """State that all groups of one rank share."""

    rank: int
    world: PaddleWorld
    observer: EventRecorder | None

    def post(self, src: int, dst: int, buffer: Tensor) -> Task:
        """Post the send or the receive of a contiguous buffer."""
        return self.world.channels.post(Channel(_COMMUNICATOR, src, dst), buffer)

    def collectives(self, ranks: Sequence[int]) -> PairwiseCollectives:
        """Collectives over some of the ranks."""
        return self.world.collectives[0].among(ranks)


def connect_fleet(
    rank: int,
    num_ranks: int,
    edges: Sequence[tuple[int, int]],
    observer: EventRecorder | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> FleetWorld:
    """Join the world of the ``PADDLE_*`` environment; ``edges`` are the (source, destination) pairs of messages."""
    channels = tuple(Channel(_COMMUNICATOR, src, dst) for src, dst in edges)
    return FleetWorld(rank, connect(rank, channels, (Group("fleet", tuple(range(num_ranks))),), progress), observer)


@contextmanager
def fleet_groups(world: FleetWorld) -> Iterator[None]:
    """Make Paddle's groups ``PairGroup`` objects, and give the process a device number, within the context."""
    original = collective._new_process_group_impl  # noqa: SLF001 - the only place that chooses a group's implementation

    def make(*arguments: Any, group_id: int = 0, **others: Any) -> PairGroup:
        return PairGroup(world, group_id)

    collective._new_process_group_impl = make  # noqa: SLF001
    paddle.distributed.ParallelEnv._device_id = 0  # noqa: SLF001
    try:
        yield
    finally:
        collective._new_process_group_impl = original  # noqa: SLF001
        del paddle.distributed.ParallelEnv._device_id  # noqa: SLF001


class _Task:
    """Equivalent of Paddle's ``task``: transfers under way that can be waited for."""

    def __init__(self, transfers: Sequence[Task] = (), then: Callable[[], None] = lambda: None) -> None:
        self._transfers, self._then = transfers, then

    def wait(self) -> bool:
        for transfer in self._transfers:
            transfer.wait()
        self._transfers = ()
        self._then()
        self._then = lambda: None
        return True

    def is_completed(self) -> bool:
        return all(transfer.done.is_set() for transfer in self._transfers)


class PairGroup:
    """The object behind a group; as in Paddle's methods, peers are group ranks."""

    def __init__(self, world: FleetWorld, group_id: int) -> None:
        self._world, self._id = world, group_id
        self._batch: list[_Task] | None = None

    @property
    def _ranks(self) -> Sequence[int]:
        ranks: Sequence[int] = collective._get_group_map()[self._id].ranks  # noqa: SLF001 - set after this was made
        return ranks

    def name(self) -> str:
        return "GLOO"

    def rank(self) -> int:
        return self._ranks.index(self._world.rank)

    def size(self) -> int:
        return len(self._ranks)

    def _start_coalescing(self) -> None:
        self._batch = []

    def _end_coalescing(self, tasks: Sequence[Any] = ()) -> None:
        batch, self._batch = self._batch or (), None
        for task in batch:
            task.wait()

    def send(self, tensor: Tensor, dst: int, sync_op: bool = True) -> _Task:
        return self._send(tensor, dst, 1, 0)

    def recv(self, tensor: Tensor, src: int, sync_op: bool = True) -> _Task:
        return self._recv(tensor, src, 1, 0)

    def send_on_calc_stream(self, tensor: Tensor, dst: int) -> _Task:
        return self._on_calc_stream(self._send(tensor, dst, 1, 0))

    def recv_on_calc_stream(self, tensor: Tensor, src: int) -> _Task:
        return self._on_calc_stream(self._recv(tensor, src, 1, 0))

    def send_partial_on_calc_stream(self, tensor: Tensor, dst: int, nranks: int, rank_id: int) -> _Task:
        return self._on_calc_stream(self._send(tensor, dst, nranks, rank_id))

    def recv_partial_on_calc_stream(self, tensor: Tensor, src: int, nranks: int, rank_id: int) -> _Task:
        return self._on_calc_stream(self._recv(tensor, src, nranks, rank_id))

    def all_gather_partial_on_calc_stream(self, out: Tensor, tensor: Tensor, nranks: int, rank_id: int) -> _Task:
        part = _slice(tensor, nranks, rank_id)
        return _write(out, paddle.concat(self._world.collectives(self._ranks).gather(part)))

    def all_reduce(self, tensor: Tensor, op: Any, sync_op: bool = True) -> _Task:
        reductions = {paddle.base.core.ReduceOp.SUM: "sum", paddle.base.core.ReduceOp.MAX: "max"}
        return _write(tensor, self._world.collectives(self._ranks).reduce(_flat(tensor), reductions[op]))

    def all_reduce_on_calc_stream(self, tensor: Tensor, op: Any) -> _Task:
        return self.all_reduce(tensor, op)

    def allreduce(self, tensor: Tensor) -> _Task:
        return self.all_reduce(tensor, paddle.base.core.ReduceOp.SUM)

    def all_gather(self, tensor: Tensor, out: Tensor) -> _Task:
        return _write(out, self._world.collectives(self._ranks).all_gather(tensor.detach(), 0))

    def reduce_scatter_tensor(self, out: Tensor, tensor: Tensor, op: Any, sync_op: bool = True) -> _Task:
        assert op == paddle.base.core.ReduceOp.SUM, "Fleet's layers only sum"
        return _write(out, self._world.collectives(self._ranks).reduce_scatter(tensor.detach(), 0))

    def broadcast(self, tensor: Tensor, src: int, sync_op: bool = True) -> _Task:
        return _write(tensor, self._world.collectives(self._ranks).gather(_flat(tensor))[src])

    def broadcast_on_calc_stream(self, tensor: Tensor, src: int) -> _Task:
        return self.broadcast(tensor, src)

    def _send(self, tensor: Tensor, dst: int, num_slices: int, index: int) -> _Task:
        peer = self._ranks[dst]
        if self._world.observer is not None:
            self._world.observer.sends(tensor, peer, num_slices)
        return _Task([self._world.post(self._world.rank, peer, _slice(tensor, num_slices, index))])

    def _recv(self, tensor: Tensor, src: int, num_slices: int, index: int) -> _Task:
        peer = self._ranks[src]
        if self._world.observer is not None:
            self._world.observer.receives(tensor, peer, num_slices)
        buffer = paddle.empty([tensor.size // num_slices], dtype=tensor.dtype)

        def copy_received() -> None:
            if num_slices == 1:
                _write(tensor, buffer)
                return
            whole = _flat(tensor)
            whole[index * buffer.size : (index + 1) * buffer.size] = buffer
            _write(tensor, whole)

        return _Task([self._world.post(peer, self._world.rank, buffer)], copy_received)

    def _on_calc_stream(self, task: _Task) -> _Task:
        if self._batch is None:
            task.wait()
        else:
            self._batch.append(task)
        return task


def _flat(tensor: Tensor) -> Tensor:
    """Flat copy of a tensor."""
    with paddle.no_grad():
        return tensor.detach().contiguous().clone().reshape([-1])


def _slice(tensor: Tensor, num_slices: int, index: int) -> Tensor:
    size = tensor.size // num_slices
    return _flat(tensor)[index * size : (index + 1) * size].contiguous()


def _write(tensor: Tensor, values: Tensor) -> _Task:
    """Copy values into a tensor's memory, which other tensors may share."""
    with paddle.no_grad():
        tensor.copy_(values.reshape(tensor.shape), True)  # noqa: FBT003 - the argument `blocking` has no name
    return _Task()
