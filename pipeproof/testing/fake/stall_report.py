"""Explanation of a stall: the waits between ranks, as a cycle or as a chain that ends at a missing operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.diagnostics.finding import WitnessOp
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import (
    Call,
    DeadlockError,
    FakeOp,
    FakeWorldError,
    NeverComesError,
    Transfer,
    UnmatchedError,
)
from pipeproof.verify.fifo_matching import partner_of


@dataclass(eq=False, slots=True)
class HostState:
    """Position of one rank's program, and the operations that block it."""

    rank: int
    place: str = ""
    waits_for: Sequence[FakeOp] = ()
    opens: Mapping[Hashable, frozenset[int]] = field(default_factory=dict)
    """Connections that it is opening, each with the ranks that must reach it."""
    ended: bool = False

    def is_held(self, engine: Engine) -> bool:
        """True if it waits for an event that has not happened."""
        return any(not op.is_done for op in self.waits_for) or any(
            not ranks <= engine.came[connection] for connection, ranks in self.opens.items()
        )

    @property
    def words(self) -> str:
        """Its position in the program."""
        return "has ended" if self.ended else f"is held at {self.place}"


_Node = FakeOp | HostState

_MOST_STEPS = 100_000
"""Number of steps after which the search for a shorter cycle ends."""

_MOST_LINES = 20
"""Number of waits of a cycle that are printed."""


def explain(engine: Engine, hosts: Sequence[HostState], ops: Sequence[FakeOp]) -> FakeWorldError | None:
    """Return the error once no event is possible; None if all issued operations are done and matched.

    ``ops`` are all operations in the order of issue.
    """
    reader = _Reader(engine, hosts)
    left = [op for op in ops if not op.is_done]
    stuck: list[_Node] = [*(host for host in hosts if not host.ended), *left]
    cycle = _shortest_cycle(reader, stuck)
    if cycle:
        return _deadlock(reader, cycle, engine.model)
    waiting = next((host for host in hosts if not host.ended), None)
    if waiting is not None:
        return NeverComesError("\n  ".join([f"rank {waiting.rank} waits for ever:", *reader.chain(waiting)]))
    alone = [op for op in ops if isinstance(op, Transfer) and engine.channels[op.channel].other(op) is None]
    if alone:
        lines = [f"rank {op.rank}: {op.words}, {'to' if op.is_send else 'from'} rank {op.peer}" for op in alone]
        return UnmatchedError("\n  ".join(["all programs have ended, but nobody ever met:", *lines]))
    assert not left, "what is left waits for something"
    return None


def _deadlock(reader: _Reader, cycle: Sequence[_Node], model: ChannelModel) -> DeadlockError:
    ranks = sorted({node.rank for node in cycle})
    named = f"rank {ranks[0]} waits for itself" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} deadlock"
    lines = [reader.edge(one, other) for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"and {len(lines) - 2 * half} more waits", *lines[-half:]]
    ops = tuple(WitnessOp(node.rank, str(node.op)) for node in cycle if isinstance(node, FakeOp))
    return DeadlockError("\n  ".join([f"{named} ({model}):", *lines]), ops)


def _shortest_cycle(reader: _Reader, nodes: Sequence[_Node]) -> list[_Node]:
    """Return the first of the shortest cycles of waits; empty if there is none.

    In a large component the search ends with the shortest cycle so far.
    """
    best: list[_Node] = []
    num_steps = 0
    for start in nodes:
        if best and num_steps > _MOST_STEPS:
            break
        way: dict[_Node, _Node] = {}
        queue = deque([start])
        while queue and start not in way:
            node = queue.popleft()
            num_steps += 1
            for other in reader.waits(node):
                if other not in way:
                    way[other] = node
                    queue.append(other)
        if start in way:
            back = [start]
            while (node := way[back[-1]]) is not start:
                back.append(node)
            if not best or len(back) < len(best):
                best = [back[0], *reversed(back[1:])]
    return best


class _Reader:
    """Reads the waits between ranks."""

    def __init__(self, engine: Engine, hosts: Sequence[HostState]) -> None:
        self._engine, self._hosts = engine, hosts

    def waits(self, node: _Node) -> Iterator[_Node]:
        """Return all events that a host or an operation still waits for."""
        if isinstance(node, HostState):
            yield from (op for op in node.waits_for if not op.is_done)
            for connection, ranks in node.opens.items():
                yield from (self._hosts[rank] for rank in sorted(ranks - self._engine.came[connection]))
        elif node.posted_us is None:
            yield from (op for op in node.follows if not op.is_done)
        elif isinstance(node, Call):
            yield from self._members(node)
        elif isinstance(node, Transfer):
            yield from self._other_end(node)

    def _members(self, call: Call) -> Iterator[_Node]:
        there = {member.rank: member for member in self._engine.calls[call.group_index, call.position]}
        for rank in call.group.ranks:
            if rank not in there:
                yield self._hosts[rank]
            elif there[rank].posted_us is None:
                yield there[rank]

    def _other_end(self, transfer: Transfer) -> Iterator[_Node]:
        ends = self._engine.channels[transfer.channel]
        if transfer.is_send and not self._engine.meets(transfer):
            awaited = self._engine.awaited(transfer)
            assert awaited is not None, "a send that waits for no room is done when it is posted"
            yield ends.receives[awaited] if awaited < len(ends.receives) else self._hosts[transfer.peer]
        else:
            yield ends.other(transfer) or self._hosts[transfer.peer]

    def chain(self, start: HostState) -> Iterator[str]:
        """Return the chain from a waiting host to a missing operation, if there is no cycle."""
        node: _Node = start
        while (other := next(self.waits(node), None)) is not None:
            yield self.edge(node, other)
            node = other

    def edge(self, one: _Node, other: _Node) -> str:
        """Return one wait as text."""
        if isinstance(one, HostState):
            if isinstance(other, HostState):
                return f"rank {one.rank} {one.words} until rank {other.rank}, which {other.words}, opens its end, too"
            return f"rank {one.rank} {one.words} until {other.words} is done"
        start = f"rank {one.rank}: {one.words} waits for"
        if isinstance(other, HostState):
            return f"{start} rank {other.rank}, which {other.words} and has not issued {self._missing(one)}"
        if one.posted_us is None:
            return f"{start} {other.words}, which is before it in its queue"
        return f"{start} {other.words} of rank {other.rank}"

    def _missing(self, op: FakeOp) -> str:
        """Return the operation that the other rank has not issued."""
        if not isinstance(op, Transfer):
            return "it"
        if op.is_send and not self._engine.meets(op):
            return "the receive that makes room"
        return str(partner_of(op.op))
