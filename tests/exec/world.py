"""An in-memory world in which the machines of all ranks run, with a scheduler that chooses at random.

It knows channels and groups and nothing of programs: a transfer is done when
both ends are posted and their queues have come to them (rendezvous, which is
the least that any backend gives), a collective when all its members have come.
"""

from dataclasses import dataclass, field

from pipeproof.exec.rank.machine import Begin, Finished, RankMachine
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import CHILD_KINDS, COLLECTIVE_KINDS, TRANSFER_KINDS, OpKind

HOST = "compute"
"""The queue of the host's own operations, next to the channels by their index."""


@dataclass
class World:
    """All ranks of one graph: their machines, posted operations, and the operations executed on each queue, in
    order."""

    graph: object
    machines: list = field(init=False)
    at: list = field(init=False)
    posted: dict = field(default_factory=dict)
    done: set = field(default_factory=set)
    arrived: dict = field(default_factory=dict)
    executed: dict = field(default_factory=dict)

    def __post_init__(self):
        self.machines = [RankMachine(self.graph, rank) for rank in range(self.graph.num_ranks)]
        self.at = [None] * self.graph.num_ranks
        self.children = {}
        for op_id, op in enumerate(self.graph.ops):
            if op.kind in CHILD_KINDS and self.graph.parent[op_id] != NONE:
                self.children.setdefault(int(self.graph.parent[op_id]), []).append(op_id)

    def begin(self, step):
        self.posted.clear()
        self.done.clear()
        self.arrived.clear()
        self.executed.clear()
        for rank, machine in enumerate(self.machines):
            self._take(rank, machine.handle(Begin(step)))

    def run(self, scheduler):
        """Let the scheduler pick among the operations that can move until none can; True if every program ended."""
        while moves := self._moves():
            scheduler.choice(moves)()
            for machine in self.machines:
                machine.validate_state()
        return all(machine.finished for machine in self.machines)

    def _take(self, rank, instructions):
        *posts, last = instructions or [None]
        for post in posts:
            assert post.op.kind in TRANSFER_KINDS
            key = rank, int(self.graph.channel[post.op_id])
            self.posted.setdefault(key, []).append(post.op_id)
        if last is not None and last.op.kind in TRANSFER_KINDS:  # a program may end with a post
            self.posted.setdefault((rank, int(self.graph.channel[last.op_id])), []).append(last.op_id)
            last = None
        self.at[rank] = None if last is None else self._steps_of(last.op_id)

    def _steps_of(self, op_id):
        """A host operation and the collectives inside it, in order; the host comes to each in turn."""
        self._ran(op_id)
        return [op_id, *self.children.get(op_id, [])]

    def _ran(self, op_id):
        rank = int(self.graph.rank[op_id])
        kind = self.graph.ops[op_id].kind
        queue = int(self.graph.channel[op_id]) if kind in TRANSFER_KINDS else HOST
        self.executed.setdefault((rank, queue), []).append(op_id)

    def _moves(self):
        moves = []
        for rank, steps in enumerate(self.at):
            if steps:
                if self.graph.ops[steps[0]].kind in COLLECTIVE_KINDS:
                    self._arrive(steps[0])
                if self._can_end(steps[0]):
                    moves.append(lambda rank=rank: self._end(rank))
        for channel in range(len(self.graph.channels)):
            ends = self.graph.channels[channel]
            heads = [self._head(rank, channel) for rank in (ends.src, ends.dst)]
            if None not in heads:
                moves.append(lambda heads=heads: self._transfer(heads))
        return moves

    def _head(self, rank, channel):
        return next((i for i in self.posted.get((rank, channel), []) if i not in self.done), None)

    def _transfer(self, heads):
        for op_id in heads:
            self.done.add(op_id)
            self._ran(op_id)

    def _meeting(self, op_id):
        return int(self.graph.group[op_id]), int(self.graph.position[op_id])

    def _arrive(self, op_id):
        self.arrived.setdefault(self._meeting(op_id), set()).add(op_id)

    def _can_end(self, op_id):
        kind = self.graph.ops[op_id].kind
        if kind is OpKind.WAIT:
            return int(self.graph.waits_for[op_id]) in self.done
        if kind in COLLECTIVE_KINDS:
            group, _ = meeting = self._meeting(op_id)
            return len(self.arrived.get(meeting, ())) == len(self.graph.groups[group].ranks)
        return True

    def _end(self, rank):
        op_id, *children = self.at[rank]
        if children:  # inside the operation, on to its next collective
            self.at[rank] = children
            self._ran(children[0])
            return
        parent = int(self.graph.parent[op_id])
        self._take(rank, self.machines[rank].handle(Finished(op_id if parent == NONE else parent)))
