"""All ranks of a plan in one process, with the plan's framework: adapters in threads that run one at a time.

Channels and collectives are in memory.

A send is done at once.
"""

import importlib
import itertools
import time
from dataclasses import dataclass

from pipeproof.comm.accumulation_order import sum_orders, tied_sums
from pipeproof.exec.compare.compare_gradients import compare_step
from pipeproof.exec.compare.compare_log import compare_exchanges, compare_log
from pipeproof.exec.rank.adapter import RankAdapter, RankProgram
from pipeproof.exec.rank.framework_choice import start_framework
from pipeproof.exec.rank.job_files import StepOutcome
from pipeproof.stages.describe.layer_records import LayerWatch
from tests.rank_threads import RankThreads


class Memory(RankThreads):
    """Messages of ranks by channel, and their inputs of collectives by group and call.

    ``message_of(buffer)`` copies a buffer, and ``receive(buffer, channel, place)`` fills it with a channel's message.
    """

    def __init__(self):
        super().__init__()
        self.sent, self.put = {}, {}

    def wired(self, rank, channel):
        """The channel that a rank really uses instead of one."""
        return channel


class _Transfer:
    """A send that is done, or a receive that waits for its place in the channel."""

    def __init__(self, buffer, wait):
        self.buffer, self.wait = buffer, wait
        self.posted_ns = self.start_ns = self.end_ns = time.monotonic_ns()


class _Channels:
    def __init__(self, memory, rank):
        self.memory, self.rank, self.received = memory, rank, {}

    def post(self, channel, buffer, after=()):
        memory, is_send = self.memory, channel.src == self.rank
        channel = memory.wired(self.rank, channel)
        sent = memory.sent.setdefault(channel, [])
        if is_send:
            sent.append(memory.message_of(buffer))
            memory.turn.notify_all()
            return _Transfer(buffer, lambda: None)
        place = self.received.get(channel, 0)
        self.received[channel] = place + 1

        def wait():
            memory.wait_for(lambda: len(sent) > place)
            memory.receive(buffer, channel, place)

        return _Transfer(buffer, wait)


class GroupCalls:
    """Calls of a group meet in their order."""

    def __init__(self, memory, rank, index, ranks):
        self.memory, self.rank, self.index, self.ranks, self.calls = memory, rank, index, ranks, 0

    def meet(self, given):
        """Contribute a value, and return a function that waits for the values of all."""
        met = self.memory.put.setdefault((self.index, self.calls), {})
        self.calls += 1
        met[self.rank] = given
        self.memory.turn.notify_all()

        def wait():
            self.memory.wait_for(lambda: len(met) == len(self.ranks))
            return [met[rank] for rank in self.ranks]

        return wait


@dataclass
class _RankWorld:
    rank: int
    channels: _Channels
    collectives: dict
    barrier: object = None


def rank_world(memory, graph, rank, collectives):
    """A rank's ends of all channels, and an object of the class ``collectives`` for each of its groups."""
    groups = {
        index: collectives(memory, rank, index, group.ranks)
        for index, group in enumerate(graph.groups)
        if rank in group.ranks
    }
    return _RankWorld(rank, _Channels(memory, rank), groups)


class _TensorMemory(Memory):
    def __init__(self, arrays, library):
        super().__init__()
        self.arrays, self.library = arrays, library

    def message_of(self, buffer):
        return buffer.clone()

    def receive(self, buffer, channel, place):
        self.arrays.copy_into(buffer, self.sent[channel][place])


class _Collectives(GroupCalls):
    @property
    def begun(self):
        return _Begun(self)

    def gather(self, tensor):
        return self.meet(tensor.detach().clone())()

    def all_gather(self, tensor, dim):
        return self.begun.all_gather(tensor, dim).wait()

    def reduce_scatter(self, tensor, dim):
        return self.begun.reduce_scatter(tensor, dim).wait()

    def exchange(self, rows, send, receive):
        return self.begun.exchange(rows, send, receive).wait()

    def reduce(self, tensor, reduction):
        return self.combined(self.gather(tensor), reduction)

    def combined(self, parts, reduction):
        total, *others = parts
        for other in others:
            total = {"sum": self.memory.library.add, "max": self.memory.library.maximum}[reduction](total, other)
        return total


class _BegunCollective:
    def __init__(self, wait):
        self.wait = self.block = wait


class _Begun:
    """Collectives that are given at once, and whose results are waited for later."""

    def __init__(self, collectives):
        self.of, self.library = collectives, collectives.memory.library
        self.place = collectives.ranks.index(collectives.rank)

    def all_gather(self, tensor, dim):
        met = self.of.meet(tensor.detach().clone())
        return _BegunCollective(lambda: self.library.concat(met(), dim))

    def reduce_scatter(self, tensor, dim):
        met = self.of.meet(tensor.detach().clone())

        def own_part():
            total = self.of.combined(met(), "sum")
            return self.library.chunk(total, len(self.of.ranks), dim)[self.place].contiguous()

        return _BegunCollective(own_part)

    def exchange(self, rows, send, receive):
        ends = list(itertools.accumulate(send))
        met = self.of.meet(
            [rows[end - size : end].clone() if size else None for size, end in zip(send, ends, strict=True)]
        )

        def joined():
            mine = [part for parts_of in met() if (part := parts_of[self.place]) is not None]
            assert sum(len(part) for part in mine) == sum(receive)
            return self.library.concat(mine) if mine else self.library.zeros([0, *rows.shape[1:]], dtype=rows.dtype)

        return _BegunCollective(joined)


def run_all(plan, seen=None, *, first_step=0, prepare=None, around=lambda ends: ends):
    """Every step of every rank from ``first_step`` on: the outcomes by step and rank, and the adapters.

    ``seen``, where it is given, gets by (step, rank) the tensors at the boundaries between layers. ``prepare`` is
    called with each adapter, the framework's arrays and the rank before the first step. ``around`` makes another of
    each rank's world.
    """
    framework = start_framework(plan.spec.run)
    memory = _TensorMemory(framework.arrays, importlib.import_module(plan.spec.run.backend))
    num_ranks = plan.mesh.num_ranks
    outcomes = [[None] * num_ranks for _ in range(plan.spec.run.steps)]
    adapters = [None] * num_ranks

    def run_rank(rank):
        watch = None if seen is None else LayerWatch()
        ends = around(rank_world(memory, plan.graph, rank, _Collectives))
        adapter = RankAdapter(plan, rank, framework, ends, lambda step, op_id: None, watch)
        adapters[rank], program = adapter, RankProgram(plan.graph, rank, adapter)
        if prepare is not None:
            prepare(adapter, framework.arrays, rank)
        for step in range(first_step, plan.spec.run.steps):
            adapter.begin(step)
            program.run(step)
            adapter.finish()
            outcomes[step][rank] = adapter.outcome
            if seen is not None:
                seen[step, rank] = watch.take()

    memory.run(run_rank, num_ranks)
    return outcomes, adapters


def compared(plan):
    """Each step's comparison with Paddle's ordered reference, and the unpartitioned one; logs must be the graph's."""
    from pipeproof.stages.reference.ordered import Orders, run_ordered
    from pipeproof.stages.reference.unpartitioned import unpartitioned_step

    outcomes, adapters = run_all(plan)
    orders = sum_orders(plan)
    references = run_ordered(plan.spec, Orders(orders.loss, orders.by_parameter(plan), tied_sums(plan)))
    results = []
    for step, (of_step, reference) in enumerate(zip(outcomes, references, strict=True)):
        unpartitioned = unpartitioned_step(plan.spec, reference.weights, step)
        results.append(compare_step(plan, step, of_step, outcome_of(reference), outcome_of(unpartitioned)))
    require_logged(plan, adapters)
    return results


def compared_with_torch(plan, *, around=lambda ends: ends):
    """Each step's comparison with PyTorch's unpartitioned reference; logs must be the graph's; see ``run_all``."""
    from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned

    outcomes, adapters = run_all(plan, around=around)
    require_logged(plan, adapters)
    results = []
    for step, (of_step, reference) in enumerate(zip(outcomes, run_unpartitioned(plan.spec), strict=True)):
        results.append(compare_step(plan, step, of_step, *[outcome_of(reference)] * 2))
    return results


def outcome_of(reference):
    """The outcome of a reference's step."""
    return StepOutcome(reference.loss, reference.gradients, reference.routers)


def require_logged(plan, adapters):
    """Assert that the log of every rank equals the graph."""
    run = plan.spec.run
    for rank, adapter in enumerate(adapters):
        types = {"dtype": run.dtype, "weight_dtype": run.weight_dtype}
        assert list(compare_log(plan.graph, rank, adapter.log, num_steps=run.steps, **types)) == []
        assert list(compare_exchanges(plan.graph, rank, adapter.log)) == []
