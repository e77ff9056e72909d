"""Records of a pipeline's steps: messages for `pipeproof check --log`, gradients for `pipeproof state align`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeproof.analysis.align.record_format import Header
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.run_record import RecordWriter, recorded_gradients
from pipeproof.exec.rank.group_channels import PostedTransfer
from pipeproof.exec.rank.torch.copy_channels import CopyChannels
from pipeproof.exec.train.torch.channel_groups import StageChannels
from pipeproof.exec.train.torch.step_runner import StepRunner
from pipeproof.exec.train.train_rank import TrainRank
from pipeproof.interop.traces.recorder import Call, Recorder
from pipeproof.interop.traces.torch_calls import tensor_of, version_of
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.schedule.ops import TRANSFER_KINDS
from pipeproof.version import __version__


@dataclass(slots=True)
class RecordedTransfer(PostedTransfer):
    """A posted transfer whose wait is recorded."""

    number: int = -1
    recorder: Recorder | None = None

    def wait(self) -> None:
        """Wait, between two lines of the log."""
        assert self.recorder is not None
        self.recorder.waits((self.number,))
        self.work.wait()
        self.recorder.done((self.number,))
        self.start_ns = self.end_ns = self.posted_ns


class RecordedChannels:
    """A rank's channels, with a line for each post and wait; a ``Channels``.

    A channel's messages are posted in the graph's order, all of them in each step.
    """

    def __init__(
        self,
        channels: StageChannels | CopyChannels,
        recorder: Recorder,
        graph: OpGraph,
        index: int,
        ranks: Sequence[int],
    ) -> None:
        self._channels, self._recorder, self._index, self._ranks = channels, recorder, index, ranks
        self._marks: dict[Channel, list[dict[str, Any]]] = defaultdict(list)
        for op_id in graph.rank_ops(index):
            op = graph.ops[op_id]
            if op.kind in TRANSFER_KINDS:
                channel = graph.channels[int(graph.channel[op_id])]
                kind = "F" if op.is_forward else "B"
                self._marks[channel].append({"stage": op.stage, "micro_batch": op.micro_batch, "kind": kind})
        self._posts: Counter[Channel] = Counter()

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[PostedTransfer] = ()) -> RecordedTransfer:
        """Post a transfer, see ``Channels.post``."""
        recorder, members = self._recorder, [self._ranks[channel.src], self._ranks[channel.dst]]
        name, is_send = str(channel), self._index == channel.src
        recorder.group(name, members, "nccl" if buffer.is_cuda else "gloo")
        tensors = (tensor_of(buffer),)
        call = (
            Call("send", name, inputs=tensors, peer=members[1])
            if is_send
            else Call("recv", name, outputs=tensors, peer=members[0])
        )
        marks = self._marks[channel]
        number = recorder.call(call, marks[self._posts[channel] % len(marks)])
        self._posts[channel] += 1
        transfer = self._channels.post(channel, buffer)
        recorder.issued(number)
        return RecordedTransfer(buffer, transfer.work, transfer.posted_ns, number=number, recorder=recorder)

    def close(self) -> None:
        """Do nothing: the recorder is closed by its owner."""


class StepRecord:
    """The files of one recording; only the first rank writes values."""

    def __init__(self, directory: Path, plan: LoweredPlan, digest: str, index: int, group: dist.ProcessGroup) -> None:
        self._plan, self._group, self._is_first = plan, group, index == 0
        run = plan.spec.run
        header = Header("run", __version__, digest, "torch", run.dtype, 0, layers=False, values=False)
        self._writer = RecordWriter(directory / "values", header) if self._is_first else None

    def put(self, step: int, loss: float | None, gradients: Mapping[str, np.ndarray]) -> None:
        """Write one finished step; every rank of the pipeline calls it with its own gradients, by the plan's names."""
        first = dist.get_process_group_ranks(self._group)[0]
        answers: list[Any] | None = [None] * dist.get_world_size(self._group) if self._is_first else None
        dist.gather_object((loss, dict(gradients)), answers, dst=first, group=self._group)
        if self._writer is not None and answers is not None:
            found = next(np.float64(loss) for loss, _ in answers if loss is not None)
            self._writer.put(recorded_gradients(self._plan, step, found, [own for _, own in answers]), None)

    def put_step(self, runner: StepRunner, loss: torch.Tensor | None) -> None:
        """Write the step that ``runner`` has just finished, as ``put``."""
        copies = runner.gradients.copies("gradients", planned=True)
        arrays = {name: runner.framework.arrays.to_numpy(value) for (_, name), value in copies.items()}
        self.put(runner.num_steps - 1, None if loss is None else float(loss), arrays)


@contextmanager
def recorded_steps(runner: StepRunner, directory: Path) -> Iterator[None]:
    """Record the steps of this block, see ``Pipeline.record``."""
    ranks, plan = runner.ranks, runner.plan
    version = f"torch {torch.__version__}"
    recorder = Recorder(directory / "messages", dist.get_rank(), dist.get_world_size(), version, version_of)
    first = ranks.global_ranks[0]
    values = directory if first == 0 else directory / f"from rank {first}"
    runner.record = StepRecord(values, plan.lowered, plan.certificate.graph_digest, ranks.rank, ranks.group)
    error: BaseException | None = None

    def recorded(lowered: LoweredPlan) -> TrainRank:
        channels = RecordedChannels(runner.world.channels, recorder, lowered.graph, ranks.rank, ranks.global_ranks)
        return runner.rank_of(lowered, channels)

    try:
        with runner.running(recorded):
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        runner.record = None
        recorder.close(error)
