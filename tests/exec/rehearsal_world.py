"""All ranks of a rehearsal in one process: tensors are bytes, channels and collectives are in memory, faults injected.

A send is done at once.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
from hypothesis import assume, note
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.exec.rank.adapter import RankAdapter, RankProgram
from pipeproof.exec.rank.executor_support import require_issuable
from pipeproof.exec.rehearse.rehearsal_framework import RehearsalFramework
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.exec.in_memory import GroupCalls, Memory, rank_world
from tests.features import FEATURES, TOPOLOGIES, mixed

MIXTURES = (
    st.lists(st.sampled_from(list(FEATURES)), unique=True, max_size=3),
    st.sampled_from(list(TOPOLOGIES)),
    st.sampled_from([kind for kind in SCHEDULE_KINDS if kind not in {"file", "custom"}]),
)
"""Features, topology and kind of schedule of a random plan."""


def proved_subject(features, topology, kind):
    """The subject of a mixture that passes check and can be rehearsed; others are not drawn."""
    try:
        report = check(plan_from_dict(mixed(features, topology, kind)))
        require_issuable(report.subject)
    except PipeproofError:
        assume(False)
    assume(not report.errors)
    note(f"{topology}; {kind}; {', '.join(features)}")
    return report.subject


@dataclass
class HostTensor:
    """Some bytes, with their dtype."""

    content: np.ndarray
    dtype: str

    @property
    def numbers(self):
        return self.content.view(self.dtype)


class HostArrays:
    """The ``Arrays`` that a rehearsal needs of a framework."""

    def from_bytes(self, content, shape, dtype):
        return HostTensor(content.copy(), dtype)

    def to_bytes(self, tensor):
        return tensor.content.copy()

    def zeros(self, shape, dtype):
        return HostTensor(np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype=np.uint8), dtype)

    def shaped(self, memory, shape, dtype):
        return HostTensor(memory.content[: int(np.prod(shape)) * np.dtype(dtype).itemsize], dtype)

    def copy_into(self, target, source):
        target.content[:] = source.content
        return target

    def numel(self, tensor):
        return len(tensor.numbers)

    def dtype(self, tensor):
        return tensor.dtype


@dataclass
class Faults:
    """Injected faults: each changes received data."""

    message: object = lambda channel, place, sent: sent[place]
    """Content of the ``place``-th message of a channel, given all messages sent so far."""
    gathered: object = lambda rank, group, call, parts: parts
    """Inputs of the members of a collective."""
    wiring: object = lambda rank, channel: channel
    """Channel that a rank really uses instead of one."""


class _FaultyMemory(Memory):
    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    def message_of(self, buffer):
        return buffer.content.copy()

    def wired(self, rank, channel):
        return self.faults.wiring(rank, channel)

    def receive(self, buffer, channel, place):
        message = self.faults.message(channel, place, self.sent[channel])
        buffer.content[: len(message)] = message


class _Collectives(GroupCalls):
    def _met(self, given, dtype):
        call, met = self.calls, self.meet(given)()
        return self.memory.faults.gathered(self.rank, self.index, call, [content.view(dtype) for content in met])

    def _made(self, numbers, dtype):
        return HostTensor(np.ascontiguousarray(numbers).view(np.uint8), dtype)

    def all_gather(self, tensor, dim):
        return self._made(np.concatenate(self._met(tensor.content, tensor.dtype)), tensor.dtype)

    def reduce(self, tensor, reduction):
        combine = {"sum": np.sum, "max": np.max}[reduction]
        return self._made(combine(self._met(tensor.content, tensor.dtype), axis=0).astype(tensor.dtype), tensor.dtype)

    def reduce_scatter(self, tensor, dim):
        place = self.ranks.index(self.rank)
        total = self.reduce(tensor, "sum").numbers
        return self._made(np.split(total, len(self.ranks))[place], tensor.dtype)

    def exchange(self, rows, send, receive):
        place, size = self.ranks.index(self.rank), sum(send)
        met = self._met(np.concatenate([np.array(send, dtype="int64").view(np.uint8), rows.content]), "uint8")
        parts = []
        for one in met:
            counts = one[: 8 * len(self.ranks)].view("int64")
            ends = np.cumsum(counts)
            numbers = one[8 * len(self.ranks) :].view(rows.dtype)
            parts.append(numbers[ends[place] - counts[place] : ends[place]])
        assert [len(part) for part in parts] == list(receive)
        assert size == len(rows.numbers)
        return self._made(np.concatenate(parts), rows.dtype)


def rehearsed(subject, faults=None, num_steps=2, around=lambda world: world, prepare=lambda program: None, proved=True):
    """Checks of each rank; the logs must match the graph. ``around`` changes each rank's world."""
    subject = subject.unfolded()
    graph, memory = subject.graph, _FaultyMemory(faults or Faults())
    adapters, frameworks = [None] * graph.num_ranks, [None] * graph.num_ranks

    def run_rank(rank):
        world = around(rank_world(memory, graph, rank, _Collectives))
        framework = RehearsalFramework(SimpleNamespace(arrays=HostArrays(), num_threads=lambda: 1), subject, rank)
        frameworks[rank] = framework
        adapter = RankAdapter(subject.plan, rank, framework, framework.world(world), lambda step, op_id: None)
        adapters[rank], program = adapter, RankProgram(graph, rank, adapter, is_proved=proved)
        prepare(program)
        for step in range(num_steps):
            adapter.begin(step)
            program.run(step)
            adapter.finish()

    memory.run(run_rank, graph.num_ranks)
    run = subject.plan.spec.run
    for rank, adapter in enumerate(adapters):
        types = {"dtype": run.dtype, "weight_dtype": run.weight_dtype}
        assert list(compare_log(graph, rank, adapter.log, num_steps=num_steps, **types)) == []
    return [framework.checked for framework in frameworks]


def swapped(first, second):
    """A wiring in which two ranks got each other's receiving ends."""
    other = {first: second, second: first}

    def wiring(rank, channel):
        if rank not in other or channel.dst != rank:
            return channel
        by = other[rank] - rank
        return replace(channel, src=channel.src + by, dst=channel.dst + by)

    return wiring
