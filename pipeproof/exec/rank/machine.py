"""Interpreter of one rank's program: events in, instructions out, no I/O and no framework.

The machine returns the next instructions of the rank by the graph; an adapter executes them and reports events. Nothing
else changes the state, so that all behaviour can be tested without a process, and an error can print the history of its
operation.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """The transfer that a wait is for, ``NONE`` where the graph lacks it; None for any other operation."""

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
    """State of one rank's program: posted and finished operations, and the next one."""

    def __init__(self, graph: OpGraph, rank: int) -> None:
        self._graph, self._rank = graph, rank
        self._program = [i for i in graph.rank_ops(rank) if graph.parent[i] == NONE]
        self._cursor = len(self._program)
        self._awaited: int | None = None
        self._awaited_transfer: int | None = None
        self._instructions: dict[int, Instruction] = {}
        self._under_way: set[int] = set()
        self._finished: set[int] = set()
        self._history: list[tuple[int, int, str]] = []
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
        self._under_way.clear()
        self._finished.clear()
        self._history.clear()

    def _finish(self, op_id: int) -> None:
        if op_id != self._awaited:
            self._refuse(op_id)
        history, step, transfer = self._history, self._step, self._awaited_transfer
        if transfer is not None:
            self._under_way.discard(transfer)
            history.append((transfer, step, "done"))
            self._finished.add(transfer)
        history.append((op_id, step, "finished"))
        self._finished.add(op_id)
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
        program, history, step = self._program, self._history, self._step
        found: list[Instruction] = []
        while self._cursor < len(program):
            op_id = program[self._cursor]
            self._cursor += 1
            instruction = self._instructions.get(op_id)
            if instruction is None:  # all steps share the instructions
                instruction = self._instructions[op_id] = Instruction.of(self._graph, op_id)
            found.append(instruction)
            if not instruction.is_transfer:
                history.append((op_id, step, "started"))
                self._awaited, self._awaited_transfer = op_id, instruction.awaited_transfer
                break
            self._under_way.add(op_id)
            history.append((op_id, step, "posted"))
        return found

    @property
    def under_way(self) -> frozenset[int]:
        """Transfers that were handed out to be posted, and whose wait is not finished."""
        return frozenset(self._under_way)

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
        lines += [f"  step {step}: {event}" for op, step, event in self._history if op == op_id]
        if not any(op == op_id for op, _, _ in self._history):
            lines.append(f"  step {self._step}: not reached; the rank is at {self._describe_awaited()}")
        return "\n".join(lines)

    def validate_state(self) -> None:
        """Check the invariants between events; for tests and for debugging adapters.

        Raises:
            ProtocolError: an invariant is violated.
        """
        both = self._under_way & self._finished
        if both:
            raise ProtocolError(f"both under way and finished: {sorted(both)}")
        for op_id in self._under_way:
            if self._graph.ops[op_id].kind not in TRANSFER_KINDS:
                raise ProtocolError(f"{self._text(op_id)} is under way, but is not a transfer")
        reached = set(self._program[: self._cursor])
        if not (self._under_way | self._finished) <= reached:
            raise ProtocolError("an operation is under way or finished that was never handed out")
        if self.finished and self._cursor and self._under_way:
            texts = ", ".join(self._text(i) for i in sorted(self._under_way))
            raise ProtocolError(f"the step is complete, but nothing waited for {texts}")
