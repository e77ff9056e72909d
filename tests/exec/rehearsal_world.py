"""All ranks of a rehearsal in one process: tensors are bytes, channels and collectives are in memory, faults injected.

Only one rank runs at any time, until it waits for another; a send is done at once.
"""

import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
from hypothesis import assume, note
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.exec.executor_support import require_issuable
from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.exec.rank.rank_program import RankProgram
from pipeproof.exec.rehearse.rehearsal_framework import RehearsalFramework
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.features import FEATURES, TOPOLOGIES, mixed

WAIT_S = 30.0

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
    """Some bytes, and what they are elements of."""

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
    """Injected faults: each changes what really arrived."""

    message: object = lambda channel, place, sent: sent[place]
    """Content of the ``place``-th message of a channel, given all messages sent so far."""
    gathered: object = lambda rank, group, call, parts: parts
    """Inputs of the members of a collective."""
    wiring: object = lambda rank, channel: channel
    """Channel that a rank really uses instead of one."""


class _Memory:
    def __init__(self, faults):
        self.faults, self.turn, self.failure = faults, threading.Condition(), None
        self.sent, self.put = {}, {}

    def wait_for(self, come):
        assert self.turn.wait_for(lambda: come() or self.failure is not None, timeout=WAIT_S), "a rank waits alone"
        assert self.failure is None


@dataclass
class _Transfer:
    buffer: HostTensor
    wait: object

    def __post_init__(self):
        self.posted_ns = self.start_ns = self.end_ns = time.monotonic_ns()


class _Channels:
    def __init__(self, memory, rank):
        self.memory, self.rank, self.counts = memory, rank, {}

    def post(self, channel, buffer, after=()):
        memory, is_send = self.memory, channel.src == self.rank
        channel = memory.faults.wiring(self.rank, channel)
        sent = memory.sent.setdefault(channel, [])
        if is_send:
            sent.append(buffer.content.copy())
            memory.turn.notify_all()
            return _Transfer(buffer, lambda: None)
        place = self.counts.get(channel, 0)
        self.counts[channel] = place + 1

        def wait():
            memory.wait_for(lambda: len(sent) > place)
            came = memory.faults.message(channel, place, sent)
            buffer.content[: len(came)] = came

        return _Transfer(buffer, wait)


class _Collectives:
    def __init__(self, memory, rank, index, ranks):
        self.memory, self.rank, self.index, self.ranks, self.calls = memory, rank, index, ranks, 0

    def _met(self, given, dtype):
        met = self.memory.put.setdefault((self.index, self.calls), {})
        call, self.calls = self.calls, self.calls + 1
        met[self.rank] = given
        self.memory.turn.notify_all()
        self.memory.wait_for(lambda: len(met) == len(self.ranks))
        return self.memory.faults.gathered(self.rank, self.index, call, [met[rank].view(dtype) for rank in self.ranks])

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


@dataclass
class _World:
    rank: int
    channels: _Channels
    collectives: dict
    barrier: object = None


def rehearsed(subject, faults=None, num_steps=2, around=lambda world: world, prepare=lambda program: None, proved=True):
    """Checks of each rank; the logs must match the graph. ``around`` changes each rank's world."""
    subject = subject.unfolded()
    graph, memory = subject.graph, _Memory(faults or Faults())
    adapters, frameworks = [None] * graph.num_ranks, [None] * graph.num_ranks

    def on_rank(rank):
        with memory.turn:
            try:
                run_rank(rank)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                memory.failure = memory.failure or error
                memory.turn.notify_all()

    def run_rank(rank):
        collectives = {
            index: _Collectives(memory, rank, index, group.ranks)
            for index, group in enumerate(graph.groups)
            if rank in group.ranks
        }
        world = around(_World(rank, _Channels(memory, rank), collectives))
        framework = RehearsalFramework(SimpleNamespace(arrays=HostArrays(), num_threads=lambda: 1), subject, rank)
        frameworks[rank] = framework
        adapter = RankAdapter(subject.plan, rank, framework, framework.world(world), lambda step, op_id: None)
        adapters[rank], program = adapter, RankProgram(graph, rank, adapter, is_proved=proved)
        prepare(program)
        for step in range(num_steps):
            adapter.begin(step)
            program.run(step)
            adapter.finish()

    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(graph.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if memory.failure is not None:
        raise memory.failure
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
