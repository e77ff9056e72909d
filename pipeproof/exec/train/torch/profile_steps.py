"""Steps of a pipeline: their messages recorded, for `check`, and their times measured, as a profile for `simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from pipeproof.atomic_write import write_json
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.monitor.plan_ring import RingChannels
from pipeproof.exec.rank.idle_messages import EdgeTimes, HostPingClock, ping_edges
from pipeproof.exec.rank.op_log import ChannelTransfers, Clock, LogEntry, Timing
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.rank.torch.op_timing import CudaPingClock, timed_channels, timing_of
from pipeproof.exec.train.torch.step_runner import StepRunner
from pipeproof.exec.train.train_rank import TrainRank
from pipeproof.interop.traces.recorder import Call, Recorder
from pipeproof.interop.traces.torch_calls import tensor_of, version_of
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile
from pipeproof.verify.subject import make_subject

if TYPE_CHECKING:
    from pipeproof.exec.rank.framework_protocol import World


class RecordedMessages:
    """Messages of one rank of a plan in the log of its calls; a ``MessageRecord``."""

    def __init__(self, recorder: Recorder, graph: OpGraph, index: int, ranks: Sequence[int]) -> None:
        self.recorder, self._graph, self._index, self._ranks = recorder, graph, index, ranks
        self._transfers = ChannelTransfers(graph, index)

    def issue_message(self, channel: Channel, buffer: torch.Tensor) -> int:
        """Write the next message of a channel, with its stage, micro-batch and direction; return its number."""
        op, name = self._graph.ops[self._transfers.next(channel)], str(channel)
        source, target = self._ranks[channel.src], self._ranks[channel.dst]
        self.recorder.group(name, [source, target], "nccl" if buffer.is_cuda else "gloo")
        tensors = (tensor_of(buffer),)
        if self._index == channel.src:
            call = Call("send", name, inputs=tensors, peer=target)
        else:
            call = Call("recv", name, outputs=tensors, peer=source)
        mark = {"stage": op.stage, "micro_batch": op.micro_batch, "kind": "F" if op.is_forward else "B"}
        return self.recorder.call(call, mark)


@contextmanager
def recorded_steps(runner: StepRunner, directory: Path) -> Iterator[None]:
    """Record the steps of this block, see ``Pipeline.record``."""
    ranks, version = runner.ranks, f"torch {torch.__version__}"
    recorder = Recorder(directory, dist.get_rank(), dist.get_world_size(), version, version_of)
    error: BaseException | None = None

    def recorded(lowered: LoweredPlan) -> TrainRank:
        messages = RecordedMessages(recorder, lowered.graph, ranks.rank, ranks.global_ranks)
        return runner.rank_of(lowered, RingChannels(runner.world.channels, messages))

    try:
        with runner.running(recorded):
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        recorder.close(error)


_ANSWER = TypeAdapter(tuple[list[LogEntry], EdgeTimes, Timing])
"""The measurements of one rank."""


def profile_steps(runner: StepRunner, run: Callable[[], object], file: Path, num_steps: int) -> Profile:
    """Run steps by ``run`` and return their profile, the same on all ranks; the first rank writes it to ``file``."""
    channels, clock = timed_channels(runner.world.channels, runner.device)
    try:
        with runner.unchanged():
            measured = _measured(runner, run, channels, clock, num_steps)
    finally:
        channels.close()
    name, agreement = f"profile {runner.num_steps}", runner.ranks.agreement
    answers = agreement.gather(name, lambda: _ANSWER.dump_python(measured, mode="json"))
    profile = Profile.model_validate(
        agreement.gather(f"{name}: result", lambda: None if agreement.rank else _profile(runner, answers))[0]
    )
    if agreement.rank == 0:
        write_json(file, profile.to_json())
    return profile


def _measured(
    runner: StepRunner, run: Callable[[], object], channels: Any, clock: Clock, num_steps: int
) -> tuple[list[LogEntry], EdgeTimes, Timing]:
    """Time the messages of a step's plan alone, then some steps."""
    device = runner.device
    with runner.running(runner.rank_of):
        run()  # loads kernels, and takes the plan for these arguments
    lowered = runner.current.plan
    entries: list[LogEntry] = []
    world = cast("World", runner.world)
    where, ping_clock = ("gpu", CudaPingClock()) if device.type == "cuda" else ("cpu", HostPingClock())
    times = ping_edges(world, TorchArrays(device), ping_clock, lowered.graph, where, lambda _: None)
    with runner.running(partial(runner.rank_of, channels=channels, clock=clock)):
        for _ in range(num_steps):
            run()
            entries += clock.timed_entries(runner.current.adapter.log)
    return entries, times, timing_of(clock)


def _profile(runner: StepRunner, answers: list[Any]) -> Any:
    """The profile as JSON values, from the measurements of all ranks."""
    read = [_ANSWER.validate_python(answer) for answer in answers]
    logs, _, timings = (dict(enumerate(parts)) for parts in zip(*read, strict=True))
    idle = {channel: times for _, own, _ in read for channel, times in own.items()}
    plan = runner.signature.plan
    assert plan is not None
    subject = make_subject(plan_from_dict(plan.content)).with_graph(plan.lowered.graph)
    digest, threads = plan.certificate.graph_digest, torch.get_num_threads()
    return measured_profile(subject, digest, logs, idle, threads, timings).to_json()
