"""Steps of a pipeline recorded, for `check --log` and `state align`, and measured, as a profile for `simulate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from pipeproof.analysis.align.array_digests import fast_digest, md5_of
from pipeproof.analysis.align.record_format import DECIMALS, WHOLE, Header, Recorded, RecordedStep, Shard
from pipeproof.atomic_write import write_json
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.run_record import RecordWriter
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.monitor.plan_ring import RingChannels
from pipeproof.exec.rank.idle_messages import IdleMessageEnd, time_idle_messages
from pipeproof.exec.rank.op_log import ChannelTransfers, Clock, LogEntry, Timing
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.rank.torch.op_timing import timed_channels, timing_of
from pipeproof.exec.train.torch.module_stage import trained
from pipeproof.exec.train.torch.record_layers import to_numpy
from pipeproof.exec.train.torch.step_runner import StepRunner
from pipeproof.exec.train.train_rank import TrainRank
from pipeproof.interop.traces.recorder import Call, Recorder
from pipeproof.interop.traces.torch_calls import tensor_of, version_of
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile
from pipeproof.verify.subject import make_subject
from pipeproof.version import __version__

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


class StepRecord:
    """The values of one recording, which the first rank writes: losses and gradients, as ``record_layers`` has them."""

    def __init__(self, directory: Path, digest: str, dtype: str, index: int, group: dist.ProcessGroup) -> None:
        self._group, self._is_first, self._number = group, index == 0, 0
        header = Header("program", __version__, digest, "torch", dtype, 0, layers=False, values=False)
        self._writer = RecordWriter(directory / "values", header) if self._is_first else None

    def __call__(self, runner: StepRunner, loss: torch.Tensor | None) -> None:
        """Write the step that ``runner`` has just finished; every rank of the pipeline calls it."""
        received, gradients = {*runner.gradients.received()}, []
        planned = {id(w): name for stage in runner.modules.values() for name, w in stage.parameters.items()}
        weights = {(n, k): w for n, stage in runner.modules.items() for k, w in trained(stage.module).items()}
        for (stage, name), gradient in runner.gradients.copies("gradients").items():
            array, dtype = to_numpy(gradient)
            if (stage, name) in received:
                digest = Recorded(0, "", array.shape, dtype, *fast_digest(array), ())
                gradients.append(_Gradient(stage, name, planned[id(weights[stage, name])], digest))
        own = (None if loss is None else to_numpy(loss)[0].reshape(()), gradients)
        answers: list[Any] | None = [None] * dist.get_world_size(self._group) if self._is_first else None
        dist.gather_object(own, answers, dst=dist.get_process_group_ranks(self._group)[0], group=self._group)
        if self._writer is not None and answers is not None:
            total = next(loss_array for loss_array, _ in answers if loss_array is not None)
            of_ranks = [(rank, each) for rank, (_, of_rank) in enumerate(answers) for each in of_rank]
            lines = tuple(_lines(self._number, of_ranks))
            self._writer.put(RecordedStep(self._number, f"{float(total):.{DECIMALS}f}", md5_of(total), lines), None)
        self._number += 1


class _Gradient(NamedTuple):
    """A gradient of one rank; ``planned`` is the name that all stages with this weight have in the plan."""

    stage: int
    name: str
    planned: str
    content: Recorded


def _lines(step: int, of_ranks: Sequence[tuple[int, _Gradient]]) -> Iterator[Recorded]:
    """Gradients under the names of the unpartitioned module, from the last stage on.

    Stages that were cut from a model have its names. Names that mean several weights are local to their stages, and
    those of a list of the stages are taken.
    """
    meanings, by_weight = defaultdict[str, set[str]](set), dict[str, list[tuple[int, _Gradient]]]()
    for rank, each in sorted(of_ranks, key=lambda one: one[1].stage):
        meanings[each.name].add(each.planned)
        by_weight.setdefault(each.planned, []).append((rank, each))
    is_local = any(len(weights) > 1 for weights in meanings.values())
    for copies in reversed(by_weight.values()):
        first, content = copies[0][1], copies[0][1].content
        name = f"{first.stage}.{first.name}" if is_local else first.name
        whole = tuple((0, size) for size in content.shape)
        shards = {rank: Shard(rank, each.content.md5, whole) for rank, each in copies}
        layer = name.rpartition(".")[0] or WHOLE
        yield replace(content, step=step, layer=layer, parameter=name, shards=tuple(shards.values()))


@contextmanager
def recorded_steps(runner: StepRunner, directory: Path) -> Iterator[None]:
    """Record the steps of this block, see ``Pipeline.record``."""
    ranks, plan = runner.ranks, runner.plan
    version = f"torch {torch.__version__}"
    recorder = Recorder(directory / "messages", dist.get_rank(), dist.get_world_size(), version, version_of)
    first = ranks.global_ranks[0]
    values = directory if first == 0 else directory / f"from rank {first}"
    digest, dtype = plan.certificate.graph_digest, plan.lowered.spec.run.dtype
    runner.record = StepRecord(values, digest, dtype, ranks.rank, ranks.group)
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
        runner.record = None
        recorder.close(error)


_ANSWER = TypeAdapter(tuple[list[LogEntry], list[IdleMessageEnd], Timing])
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
) -> tuple[list[LogEntry], list[IdleMessageEnd], Timing]:
    """Time the messages of a step's plan alone, then some steps."""
    device = runner.device
    with runner.running(runner.rank_of):
        run()  # loads kernels, and takes the plan for these arguments
    lowered = runner.current.plan
    entries: list[LogEntry] = []
    world = cast("World", runner.world)
    ends = time_idle_messages(world, TorchArrays(device), lowered.graph, on_device=device.type == "cuda")
    with runner.running(partial(runner.rank_of, channels=channels, clock=clock)):
        for _ in range(num_steps):
            run()
            entries += clock.timed_entries(runner.current.adapter.log)
    return entries, ends, timing_of(clock)


def _profile(runner: StepRunner, answers: list[Any]) -> Any:
    """The profile as JSON values, from the measurements of all ranks."""
    read = [_ANSWER.validate_python(answer) for answer in answers]
    logs, idle, timings = (dict(enumerate(parts)) for parts in zip(*read, strict=True))
    plan = runner.signature.plan
    assert plan is not None
    subject = make_subject(plan_from_dict(plan.content)).with_graph(plan.lowered.graph)
    digest, threads = plan.certificate.graph_digest, torch.get_num_threads()
    return measured_profile(subject, digest, logs, idle, threads, timings).to_json()
