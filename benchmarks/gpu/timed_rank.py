"""One rank of a plan under pipeproof's executor, for timing: without its optimizer, and with its channels exchangeable.

It can be executed plainly, with every operation timed by its device, alone
(nothing is sent, and receives are already there), or as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from measure import captured_anew, meet

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.exec.rank.framework_protocol import Channels, World
from pipeproof.exec.rank.group_channels import PostedTransfer
from pipeproof.exec.rank.machine import Instruction
from pipeproof.exec.rank.op_log import HOST_QUEUE, Clock, HostClock, LogEntry
from pipeproof.exec.rank.torch.comm import TorchWorld
from pipeproof.exec.rank.torch.cuda_graph import captured
from pipeproof.exec.rank.torch.framework import TorchFramework
from pipeproof.exec.rank.torch.op_timing import timed
from pipeproof.schedule.op_table import NONE, Channel
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind


class AloneChannels:
    """Channels of a rank that is alone: sends go nowhere, receives are random numbers of the memory at hand.

    The numbers are copied, for a GPU draws less power over zeros; a copy takes about a thousandth of a forward.
    """

    def __init__(self, rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rank, self._numbers = rank, torch.randn(numel, device=device).to(dtype)
        self.received: list[torch.Tensor] = []
        """Received tensors: graphs that read them need them as long as they are replayed."""

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[Any] = ()) -> PostedTransfer:
        """Nothing to wait for."""
        if self._rank == channel.dst:
            buffer.copy_(self._numbers[: buffer.numel()].view_as(buffer))
            self.received.append(buffer)
        return _Done(buffer)

    def close(self) -> None:
        """Nothing is open."""


class _Done(PostedTransfer):
    """A transfer that takes no time."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.posted_ns, self.start_ns, self.end_ns = buffer, 0, 0, 0

    def wait(self) -> None:
        """It is done."""


@dataclass
class _Exchangeable:
    """Channels and clock that can be others from one step to the next: a ``Channels`` and a ``Clock``."""

    channels: Channels
    clock: Clock

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[Any] = ()) -> Any:
        return self.channels.post(channel, buffer)

    def close(self) -> None:
        self.channels.close()

    def begin(self) -> None:
        self.clock.begin()

    def now(self) -> int:
        return self.clock.now()

    def end_of(self, block: Callable[[], object]) -> int:
        return self.clock.end_of(block)

    def timed_entries(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        return self.clock.timed_entries(entries)


class OurRank:
    """One rank of ``plan``, in a ``world`` that has its channels."""

    def __init__(self, plan: LoweredPlan, rank: int, framework: TorchFramework, world: TorchWorld) -> None:
        self._device, self._plain = framework.device, world.channels
        timed_world, self._clock = timed(world)
        self._timed = timed_world.channels
        self._at = _Exchangeable(world.channels, HostClock())
        exchangeable: World = replace(world, channels=self._at)
        self.adapter = RankAdapter(plan, rank, framework, exchangeable, lambda *_: None, clock=self._at)
        graph = plan.graph
        ids = [i for i in graph.rank_ops(rank) if graph.parent[i] == NONE and graph.ops[i].kind is not OpKind.STEP]
        self.program = [Instruction.of(graph, i) for i in ids]
        dtype = getattr(torch, plan.spec.run.dtype)
        largest = max((tensor.numel for tensor in graph.tensors), default=0)
        self._alone = AloneChannels(rank, largest, dtype, self._device)

    def step(self, number: int) -> tuple[int, int]:
        """One step as it is; its start and end on the device, in nanoseconds of the host's clock."""
        self._use(self._plain)
        self.adapter.begin(number)
        return self._edges(self._execute)

    def timed_step(self, number: int) -> list[LogEntry]:
        """The log of a step whose operations are timed."""
        self._use(self._timed, self._clock)
        self.adapter.begin(number)
        meet(self._device)
        self._execute(keep_log=True)
        log = [*self._clock.timed_entries(self.adapter.log)]
        self.adapter.log.clear()
        return log

    def alone_step(self, number: int) -> list[LogEntry]:
        """The log of a step in which nothing is sent."""
        self._use(self._alone, self._clock)
        self.adapter.begin(number)
        meet(self._device)
        self._execute(keep_log=True)
        log = [*self._clock.timed_entries(self.adapter.log)]
        self._forget_alone()
        return log

    def captured(self) -> Callable[[], tuple[int, int]]:
        """A replay of the whole step, which returns its start and end."""
        self._use(self._plain)
        self.adapter.begin(0)
        replay = captured_anew(self._execute, self._device)
        return lambda: self._edges(replay)

    def replayed(self, num_replays: int) -> list[tuple[int, int]]:
        """Starts and ends of replays of the whole step."""
        replay = self.captured()
        return [replay() for _ in range(num_replays + 1)][1:]

    def replayed_alone(self, num_replays: int) -> list[tuple[int, int]]:
        """The same for the rank's computations alone, without messages: the shortest possible time of its step."""
        self._use(self._alone)
        self.adapter.begin(0)
        replay = captured(self._execute, self._device)
        times = [self._edges(replay) for _ in range(num_replays + 1)][1:]
        self._forget_alone()
        return times

    def replayed_ops(self, num_replays: int) -> list[tuple[str, list[int]]]:
        """Each computation captured by itself and replayed in the order of the step: its text, and nanoseconds each."""
        self._use(self._alone)
        self.adapter.begin(0)
        torch.cuda.synchronize(self._device)
        stream, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        graphs: list[tuple[str, torch.cuda.CUDAGraph]] = []
        with torch.cuda.stream(stream):
            for instruction in self.program:
                if instruction.op.kind not in COMPUTE_KINDS:
                    self.adapter.execute(instruction)
                    continue
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize(self._device)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                self.adapter.execute(instruction)
                graph.capture_end()
                graphs.append((str(instruction.op), graph))
            times: list[list[int]] = [[] for _ in graphs]
            for _ in range(num_replays + 1):
                self._clock.begin()
                entries = []
                for text, graph in graphs:
                    start = self._clock.now()
                    graph.replay()
                    entries.append(LogEntry(0, HOST_QUEUE, text, start, self._clock.now()))
                for place, entry in enumerate(self._clock.timed_entries(entries)):
                    times[place].append(entry.end_ns - entry.start_ns)
        self._forget_alone()
        return [(text, one[1:]) for (text, _), one in zip(graphs, times, strict=True)]

    def _execute(self, *, keep_log: bool = False) -> None:
        for instruction in self.program:
            self.adapter.execute(instruction)
        if not keep_log:
            self.adapter.log.clear()

    def _edges(self, work: Callable[[], None]) -> tuple[int, int]:
        self._clock.begin()
        meet(self._device)
        start = self._clock.now()
        work()
        (entry,) = self._clock.timed_entries([LogEntry(0, HOST_QUEUE, "", start, self._clock.now())])
        return entry.start_ns, entry.end_ns

    def _use(self, channels: Channels, clock: Clock | None = None) -> None:
        self._at.channels, self._at.clock = channels, HostClock() if clock is None else clock
        self.adapter.log.clear()

    def _forget_alone(self) -> None:
        self.adapter.log.clear()
        self._alone.received.clear()
