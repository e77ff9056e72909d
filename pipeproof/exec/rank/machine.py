"""Interpreter of one rank's program: events in, instructions out, no I/O and no framework.

The machine returns the next instructions of the rank by the graph; an adapter executes them and reports events. Nothing
else changes the state: all behaviour can be tested without a process, and an error can print the history of its
operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from pipeproof.schedule.op_table import NONE, OpGraph, Row
from pipeproof.schedule.ops import TRANSFER_KINDS, Op, OpKind


@dataclass(frozen=True, slots=True)
class Instruction:
    """Instruction to execute one operation. A transfer is only posted; all others are finished before their event."""

    op_id: int
    row: Row
    is_transfer: bool
    awaited_transfer: int | None
    """The transfer that a wait is for, ``NONE`` if the graph lacks it; None for any other operation."""

    @classmethod
    def of(cls, graph: OpGraph, op_id: int) -> Instruction:
        """The instruction of one operation of a graph."""
        row = graph.row(op_id)
        op = row.op
        waits = op.kind is OpKind.WAIT and op.target is not None and op.target.kind in TRANSFER_KINDS
        return cls(op_id, row, op.kind in TRANSFER_KINDS, int(graph.waits_for[op_id]) if waits else None)

    @property
    def op(self) -> Op:
        """Operation to execute."""
        return self.row.op


@dataclass(frozen=True, slots=True)
class Begin:
    """Event that a training step begins."""

    step: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Event that the adapter executed a host operation; for a WAIT its target is done too."""

    op_id: int


Event = Begin | Finished


class ProtocolError(Exception):
    """The adapter reported an event that does not fit the state; the message has the history of the operation."""


class RankMachine:
    """State of one rank's program: the step, the position in the program, and the operation that blocks the host.

    Everything else follows from the position, because the program is fixed: an operation costs the host little.
    """

    def __init__(self, graph: OpGraph, rank: int) -> None:
        self._graph, self._rank = graph, rank
        self._program = [i for i in graph.rank_ops(rank) if graph.parent[i] == NONE]
        self._cursor = len(self._program)
        self._awaited: int | None = None
        self._from: dict[int, list[Instruction]] = {}
        """Instructions from a position up to the first operation that blocks the host, which all steps share."""
        self._step = -1

    @property
    def step(self) -> int:
        """Current or last step; -1 before the first."""
        return self._step

    @property
    def finished(self) -> bool:
        """True if the step's program has ended."""
        return self._awaited is None and self._cursor == len(self._program)

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; return the next instructions, up to the first operation that blocks the host.

        An empty list means that the step is complete.

        Raises:
            ProtocolError: the event does not fit the state.
        """
        if isinstance(event, Begin):
            self._begin(event.step)
        else:
            self._finish(event.op_id)
        return self._advance()

    def _begin(self, step: int) -> None:
        if not self.finished:
            raise ProtocolError(
                f"step {step} begins while step {self._step} is at {self._describe_awaited()}\n{self._awaited_story()}"
            )
        if step <= self._step:
            raise ProtocolError(f"step {step} begins, but step {self._step} was run already")
        self._step, self._cursor = step, 0

    def _finish(self, op_id: int) -> None:
        if op_id != self._awaited:
            self._refuse(op_id)
        self._awaited = None

    def _refuse(self, op_id: int) -> NoReturn:
        """Refuse the end of an operation that the rank is not at."""
        if op_id not in self._graph.rank_ops(self._rank):
            raise ProtocolError(
                f"op {op_id} is reported finished, which does not belong to rank {self._rank}; the rank is at "
                f"{self._describe_awaited()}\n{self._awaited_story()}"
            )
        raise ProtocolError(
            f"{self._text(op_id)} is reported finished, but the rank is at {self._describe_awaited()}\n"
            f"{self.story(op_id)}"
        )

    def _advance(self) -> list[Instruction]:
        instructions = self._from.get(self._cursor)
        if instructions is None:
            instructions = self._from[self._cursor] = self._instructions_from(self._cursor)
        self._cursor += len(instructions)
        if instructions and not instructions[-1].is_transfer:
            self._awaited = instructions[-1].op_id
        return instructions

    def _instructions_from(self, position: int) -> list[Instruction]:
        instructions: list[Instruction] = []
        for op_id in self._program[position:]:
            instructions.append(Instruction.of(self._graph, op_id))
            if not instructions[-1].is_transfer:
                break
        return instructions

    def _handed_out(self) -> list[Instruction]:
        """The instructions of this step so far, in order."""
        handed_out: list[Instruction] = []
        while len(handed_out) < self._cursor and self._step >= 0:
            handed_out += self._from[len(handed_out)]
        return handed_out

    def _waited(self) -> set[int]:
        """Transfers whose wait has finished in this step; ``NONE`` for a wait without a transfer."""
        handed_out = self._handed_out()
        return {i.awaited_transfer for i in handed_out if i.awaited_transfer is not None and i.op_id != self._awaited}

    @property
    def under_way(self) -> frozenset[int]:
        """Transfers that were handed out to be posted, and whose wait is not finished."""
        if self.finished and self._step >= 0:
            return self._left_at_end
        return frozenset(i.op_id for i in self._handed_out() if i.is_transfer) - self._waited()

    @cached_property
    def _left_at_end(self) -> frozenset[int]:
        """Transfers of the program without a wait: a proved program has none."""
        every = [Instruction.of(self._graph, op_id) for op_id in self._program]
        return frozenset(i.op_id for i in every if i.is_transfer) - {i.awaited_transfer for i in every}

    def position(self) -> str:
        """Return the operation at which the rank is, in one line."""
        return f"rank {self._rank}, step {self._step}, is at {self._describe_awaited()}"

    def _text(self, op_id: int) -> str:
        return f"{self._graph.ops[op_id]} (op {op_id})"

    def _describe_awaited(self) -> str:
        return "its end" if self._awaited is None else self._text(self._awaited)

    def _awaited_story(self) -> str:
        return "" if self._awaited is None else self.story(self._awaited)

    def story(self, op_id: int) -> str:
        """Return the history of one operation in this step and its row of the graph, one line each."""
        row = self._graph.row(op_id)
        lines = [f"story of {self._text(op_id)} on rank {self._rank}:"]
        if row.peer != NONE:
            lines.append(f"  the graph: elements {row.start}..{row.stop} with rank {row.peer}")
        events = self._events(op_id) or [f"not reached; the rank is at {self._describe_awaited()}"]
        return "\n".join([*lines, *(f"  step {self._step}: {event}" for event in events)])

    def _events(self, op_id: int) -> list[str]:
        """The events of one operation in this step; none if it is not reached."""
        reached = next((i for i in self._handed_out() if i.op_id == op_id), None)
        if reached is None:
            return []
        if reached.is_transfer:
            return ["posted", "done"] if op_id in self._waited() else ["posted"]
        return ["started"] if op_id == self._awaited else ["started", "finished"]

    def validate_state(self) -> None:
        """Check the invariants between events; for tests and for debugging adapters.

        Raises:
            ProtocolError: an invariant is violated.
        """
        if not self.finished and not self._waited() <= {i.op_id for i in self._handed_out()}:
            raise ProtocolError("an operation is finished that was never handed out")
        under_way = self.under_way
        if self.finished and under_way:
            texts = ", ".join(self._text(i) for i in sorted(under_way))
            raise ProtocolError(f"the step is complete, but nothing waited for {texts}")
