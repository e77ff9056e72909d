"""Communication of a pipeline that trains a script's modules: groups of its own, in addition to the script's.

Each channel, and each group that sums shared weights, has a process group of its own that the script cannot reach: no
hook or library can put its messages between the pipeline's. Only their members take part in making them, through the
store of the script's default group: pipelines of one mesh need no common order.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from pipeproof.exec.rank.group_channels import PostedTransfer
from pipeproof.exec.rank.torch.comm import post_recv, post_send
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.roll_call import REFUSED, RollCall, Round, connected_rounds
from pipeproof.schedule.op_table import Channel, Group, OpGraph
from pipeproof.stages.torch.runtime import start_backward_thread

# --- Process groups of the script. A pipeline holds weak references: the groups end when the script destroys them ---
# A gloo group that lives on has threads, which drop the tensors of their last work. If a thread does this while the
# interpreter ends, CPython ends the thread inside of C++, and the process aborts ("terminate called without an active
# exception").


class ScriptGroup:
    """A weak reference to a process group; calling it returns the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._name = weakref.ref(group), str(group.group_name)

    def __call__(self) -> dist.ProcessGroup:
        """Return the group.

        Raises:
            PipelineError: the script has destroyed it.
        """
        group = self._group()
        if group is None:
            raise PipelineError(f"the script has destroyed process group {self._name!r}: make a new Pipeline")
        return group

    def at_end(self, call: Callable[[], object]) -> None:
        """Call something when the script has destroyed the group."""
        weakref.finalize(self(), call)


def process_group(group: dist.ProcessGroup | dist.DeviceMesh | None) -> dist.ProcessGroup:
    """The process group of an argument.

    Raises:
        PipelineError: no process group is initialised, this rank is not in it, or the mesh has several dims.
    """
    if not dist.is_initialized():
        raise PipelineError("initialise torch.distributed first: start the script with torchrun and call "
                            "torch.distributed.init_process_group")  # fmt: skip
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise PipelineError(f"the mesh has dims {group.mesh_dim_names}: pass one, such as mesh['pp']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise PipelineError("this rank is not a member of the group: make its Pipeline on the members alone")
    return group


# --- Groups of the pipeline ---

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection by its descriptor. The addresses show whether the descriptor has since been used for another.

    ``ProcessGroupGloo.abort`` wakes nobody (PyTorch 2.13): a thread that waits for a message waits until its time
    limit. Shutting the connection down ends the wait at once, with an error, on both of its ends.
    """

    descriptor: int
    addresses: tuple[Any, Any]

    @property
    def local_address(self) -> str:
        """The host part of this end's address."""
        return str(self.addresses[0][0])

    def shut_down(self) -> None:
        """End the connection for both of its ends, unless it has ended."""
        if _addresses(self.descriptor) == self.addresses:
            with socket.socket(fileno=os.dup(self.descriptor)) as end:
                end.shutdown(socket.SHUT_RDWR)


def connections_of(make: Callable[[], _T]) -> tuple[_T, tuple[Connection, ...]]:
    """The result of a call, and the connections that the process has since then."""
    before = _connections()
    made = make()
    return made, tuple(each for each in _connections() if each not in before)


def _connections() -> list[Connection]:
    candidates = ((int(name), _addresses(int(name))) for name in os.listdir("/dev/fd"))  # noqa: PTH208 - no Path per file
    return [Connection(descriptor, addresses) for descriptor, addresses in candidates if addresses is not None]


def _addresses(descriptor: int) -> tuple[Any, Any] | None:
    """Both addresses of a connected socket; None for any other descriptor."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # else a failing socket() would leave the copy open
            return None
        with socket.socket(fileno=os.dup(descriptor)) as end:
            return end.getsockname(), end.getpeername()
    except OSError:  # closed meanwhile, or one that listens
        return None


_TAG: Final = 0
AFTER_WATCH_S: Final = 60.0
"""The backend's own time limit is this much later than the stall watch's, which knows the operation.

For messages, gloo uses the limit that it was made with; ``set_timeout`` only changes the limit of collectives.
"""


class StageChannels:
    """Ends of the channels of one rank, by the graph's ranks; a ``Channels``."""

    def __init__(self, index: int, backends: dict[Channel, Any], device: torch.device) -> None:
        self._index, self._backends = index, backends
        self._send, self._recv = (post_send, post_recv) if device.type == "cuda" else (_send, _recv)

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[PostedTransfer] = ()) -> PostedTransfer:
        """Start moving a contiguous buffer over this rank's end; ``after`` is on the same channel, a FIFO."""
        posted_ns = time.monotonic_ns()
        backend = self._backends[channel]
        if self._index != channel.src:  # a group of two: the source is member 0
            return PostedTransfer(buffer, self._recv(backend, buffer, 0), posted_ns)
        return PostedTransfer(buffer, self._send(backend, buffer, 1), posted_ns)

    def close(self) -> None:
        """Do nothing: the groups end with the world."""

    def release(self) -> None:
        """Let go of the groups."""
        self._backends.clear()


def _send(backend: Any, buffer: torch.Tensor, member: int) -> Any:
    return backend.send([buffer], member, _TAG)


def _recv(backend: Any, buffer: torch.Tensor, member: int) -> Any:
    return backend.recv([buffer], member, _TAG)


class OrderedSums:
    """Sums over one group of ranks, added in group order; a ``Collectives`` for gradients of shared weights.

    ``members`` are ranks of the pipeline, and ``ranks`` the same ranks in the plan's mesh.
    """

    def __init__(self, members: tuple[int, ...], ranks: tuple[int, ...], backend: Any) -> None:
        self.members, self.ranks, self._backend = members, ranks, backend

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the sum over the members, in group order."""
        assert reduction == "sum"
        return functools.reduce(torch.add, self.gathered(tensor))

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all members, in group order."""
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self._backend.allgather([parts], [tensor.contiguous()]).wait()
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with the first member's tensor."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._backend.broadcast([tensor], options).wait()

    def release(self) -> None:
        """Let go of the group."""
        self._backend = None


@dataclass(frozen=True)
class StageWorld:
    """The connected groups of one rank; a ``World``. ``rank`` is the rank in the pipeline."""

    rank: int
    channels: StageChannels
    collectives: dict[int, OrderedSums]
    """By index of the graph's groups, without groups of one member."""
    backends: list[Any]
    group: ScriptGroup
    rounds: tuple[Round, ...] = ()
    """Connections of the hosts, over which all ranks agree on a step."""
    connections: tuple[Connection, ...] = ()
    """Connections of gloo backends."""

    def barrier(self) -> None:
        """Wait until all ranks of the pipeline have called this."""
        dist.barrier(self.group())

    def abort(self) -> None:
        """Abort all communication: ranks that wait for this one get an error."""
        connections = [each.shut_down for each in self.connections], [each.shut_down for each in self.rounds]
        for end in chain((backend.abort for backend in self.backends), *connections):
            try:
                end()
            except (RuntimeError, OSError):  # it has already ended
                continue

    def close(self) -> None:
        """Let go of all groups, whose threads end with them: none may be left when the interpreter ends."""
        self.channels.release()
        for each in self.collectives.values():
            each.release()
        self.backends.clear()
        for connected in self.rounds:
            connected.close()


def connect_stages(
    graph: OpGraph,
    index: int,
    device: torch.device,
    store: dist.Store,
    group: ScriptGroup,
    timeout_s: float,
) -> StageWorld:
    """Make this rank's groups and use each once: the first step then connects nothing.

    ``index`` is the rank in the pipeline, which is its rank in ``graph``; ``store`` is the pipeline's own, and
    ``group`` the script's.

    Raises:
        PipelineError: a peer did not come, or the device has no backend.
    """
    backends: list[Any] = []
    connections: list[Connection] = []
    by_channel: dict[Channel, Any] = {}
    channels = StageChannels(index, by_channel, device)
    token = torch.ones(1, device=device)

    def connected(name: str, members: Sequence[int], between: torch.device = device) -> Any:
        member, size, limit_s = members.index(index), len(members), timeout_s + AFTER_WATCH_S
        backend, own = connections_of(partial(_backend, name, member, size, between, store, limit_s))
        backends.append(backend)
        connections.extend(own if between.type == "cpu" else ())
        return backend

    try:
        for channel in graph.channels:
            if index in (channel.src, channel.dst):
                by_channel[channel] = connected(str(channel), (channel.src, channel.dst))
                channels.post(channel, token).wait()
        sums = {number: _sums(group, number, index, graph, connected) for number, group in enumerate(graph.groups)}
        if device.type == "cuda":
            start_backward_thread(device)
            torch.cuda.synchronize(device)
        rounds = _rounds(index, group().size(), store, timeout_s + AFTER_WATCH_S)
    except RuntimeError as error:
        raise PipelineError(f"the pipeline's ranks cannot connect: {error}") from None
    collectives = {number: each for number, each in sums.items() if each is not None}
    return StageWorld(index, channels, collectives, backends, group, rounds, tuple(connections))


def _rounds(index: int, num_ranks: int, store: dist.Store, timeout_s: float) -> tuple[Round, ...]:
    """Connections for the words of a pipeline's ranks, on the network that gloo chooses for them."""
    if num_ranks == 1:
        return ()
    gloo, own = connections_of(partial(_backend, "hosts", index, num_ranks, torch.device("cpu"), store, timeout_s))
    rounds = connected_rounds(own[0].local_address, index, num_ranks, store, timeout_s)
    RollCall(rounds, lambda _: None).exchange(REFUSED)  # now gloo is connected on all ranks, and may end
    del gloo
    return rounds


def _sums(group: Group, number: int, index: int, graph: OpGraph, connected: Any) -> OrderedSums | None:
    if index not in group.ranks or len(group.ranks) == 1:
        return None
    ranks = tuple(graph.global_rank[member] for member in group.ranks)
    return OrderedSums(group.ranks, ranks, connected(f"{group.axis}.{number}", group.ranks))


def _backend(name: str, member: int, size: int, device: torch.device, store: dist.Store, timeout_s: float) -> Any:
    own, timeout = dist.PrefixStore(f"{name}/", store), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - the documented way to set it
        backend = dist.ProcessGroupNCCL(own, member, size, options)
        backend.bound_device_id = device
        return backend
    if device.type == "cpu":
        return dist.ProcessGroupGloo(own, member, size, timeout=timeout)
    raise PipelineError(f"modules on {device.type} are not supported: put them on the CPU or on a CUDA device")
