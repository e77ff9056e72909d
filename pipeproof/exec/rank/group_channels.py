"""Channels of a backend whose posts do not block the host: a two-rank group for each, of either framework.

Each directed edge between two ranks (a channel) has its own group: no direction waits for another. On NCCL a group is a
communicator with its own stream: a post starts after the work launched before it, and a wait blocks the compute stream,
not the host. On gloo a group is a separate FIFO.

All groups are made in one global order, and each is used once before the first step: NCCL connects at first use, and a
receive that spins on a GPU without loaded kernels may wait forever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from pipeproof.exec.rank.framework_protocol import Tensor
from pipeproof.schedule.op_table import Channel, Group


@dataclass(slots=True)
class PostedTransfer:
    """A transfer that the framework executes, with its buffer and the framework's handle; a ``Transfer``.

    Times are nanoseconds of the host's monotonic clock. On a GPU ``end_ns`` is when the host continued, not when the
    data arrived.
    """

    buffer: Tensor
    work: Any
    posted_ns: int
    start_ns: int = 0
    end_ns: int = 0

    def wait(self) -> None:
        """Block the host until the transfer is done; on a GPU block the current stream instead."""
        self.work.wait()
        self.start_ns, self.end_ns = self.posted_ns, time.monotonic_ns()


class GroupChannels:
    """Ends of all channels on one rank; ``dist`` is the framework's module of communication."""

    def __init__(self, dist: Any, rank: int, groups: Mapping[Channel, Any]) -> None:
        self._dist, self._rank = dist, rank
        self._groups = {channel: group for channel, group in groups.items() if rank in (channel.src, channel.dst)}

    def post(self, channel: Channel, buffer: Tensor, after: Sequence[PostedTransfer] = ()) -> PostedTransfer:
        """Start moving a contiguous buffer over this rank's end of ``channel``; returns at once.

        The transfers in ``after`` are on the same channel, which is a FIFO: ``executor_support`` refuses others.
        """
        group = self._groups[channel]
        posted_ns = time.monotonic_ns()  # the peer may have it before this call returns
        if self._rank == channel.src:
            work = self._dist.isend(buffer, dst=channel.dst, group=group)
        else:
            work = self._dist.irecv(buffer, src=channel.src, group=group)
        assert work is not None
        return PostedTransfer(buffer, work, posted_ns)

    def close(self) -> None:
        """Do nothing: the rank has waited for every transfer."""


def connecting(channel: Channel) -> str:
    """Text of the phase in which a channel is connected."""
    return f"connecting {channel}"


def connected_groups(
    dist: Any,
    new_group: Callable[[list[int]], Any],
    rank: int,
    token: Tensor,
    channels: Sequence[Channel],
    groups: Sequence[Group],
    progress: Callable[[str], None],
    new_experts_group: Callable[[list[int]], Any] | None = None,
) -> tuple[dict[Channel, Any], dict[int, Any]]:
    """Make the group of every channel and of every group of the graph, and use each once with ``token``.

    ``new_experts_group`` makes groups over ``ep`` (default: ``new_group``). Returns the channels' groups, and this
    rank's groups by index of the graph's groups. Every rank must call this with the same channels and groups.
    """
    by_channel: dict[Channel, Any] = {}
    for channel in channels:
        progress(connecting(channel))
        by_channel[channel] = new_group([channel.src, channel.dst])
        if rank == channel.src:
            dist.send(token, dst=channel.dst, group=by_channel[channel])
        elif rank == channel.dst:
            dist.recv(token, src=channel.src, group=by_channel[channel])
    own: dict[int, Any] = {}
    for index, group in enumerate(groups):
        progress(f"connecting {group.axis} group {', '.join(map(str, group.ranks))}")
        make = new_experts_group if new_experts_group is not None and group.axis == "ep" else new_group
        made = make(list(group.ranks))
        if rank in group.ranks:
            own[index] = made
            dist.all_reduce(token, group=made)
    return by_channel, own


# --- Transfers that a thread executes in order, because the backend's own calls block the host ---


class TransfersEnded(RuntimeError):  # noqa: N818 - no error by itself: another rank has failed
    """The pipeline has aborted its transfers, or a peer has gone."""


@dataclass(slots=True, eq=False)
class Task:
    """Work of another thread on a tensor, and its times and outcome once it is done; a ``Transfer``.

    It begins when the tasks ``after`` are done.
    """

    buffer: Tensor
    act: Callable[[], None]
    after: Sequence[Task] = ()
    posted_ns: int = field(default_factory=time.monotonic_ns)
    start_ns: int = 0
    end_ns: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        """Block until the work is done; raise its error."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class TaskQueue:
    """A FIFO of tasks and the thread that executes them."""

    def __init__(self, name: str) -> None:
        self._fifo: SimpleQueue[Task | None] = SimpleQueue()
        self._open: list[Task] = []
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(
        self, buffer: Tensor, act: Callable[[], None], after: Sequence[Task] = (), *, begun_ns: int | None = None
    ) -> Task:
        """Queue work on a tensor. ``begun_ns`` is its begin elsewhere, if ``act`` only waits for its end.

        Raises:
            TransfersEnded: after ``abort``.
        """
        task = Task(buffer, act, after) if begun_ns is None else Task(buffer, act, after, begun_ns, begun_ns)
        with self._lock:
            if self._has_ended:
                raise TransfersEnded("the pipeline has failed")
            self._open.append(task)
        self._fifo.put(task)
        return task

    def abort(self) -> None:
        """End all tasks with an error, and accept no more. A task that runs is left to its thread."""
        with self._lock:
            self._has_ended = True
            tasks, self._open = self._open, []
        for task in tasks:
            task.error = TransfersEnded("the pipeline has failed")
            task.done.set()

    def close(self) -> None:
        """End the thread once all tasks are done."""
        self._fifo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended and (task := self._fifo.get()) is not None:
            for earlier in task.after:
                earlier.done.wait()
            task.after = ()
            task.start_ns = task.start_ns or time.monotonic_ns()
            error: Exception | None = None
            try:
                task.act()
            except Exception as raised:  # noqa: BLE001 - the wait for the task raises it
                error = raised
            task.end_ns = time.monotonic_ns()
            with self._lock:
                if task not in self._open:  # ended meanwhile
                    return
                self._open.remove(task)
            task.error = error
            task.done.set()
