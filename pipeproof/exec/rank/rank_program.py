"""Program of one rank: the machine that orders its operations, and the adapter that executes them.

Runs, rehearsals and the runtime for user modules all execute steps by it, with frameworks of their own.
"""

from __future__ import annotations

from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.exec.rank.machine import Begin, Finished, ProtocolError, RankMachine
from pipeproof.schedule.op_table import OpGraph


class RankProgram:
    """State of one rank, the ``index``-th of the graph: its position in the program, its transfers and tensors.

    The state after a step is validated if the plan ``is_proved``; another plan may leave anything behind.
    """

    def __init__(self, graph: OpGraph, index: int, adapter: RankAdapter, *, is_proved: bool = True) -> None:
        self.machine, self.adapter, self._is_proved = RankMachine(graph, index), adapter, is_proved
        self.op_id = -1
        """The last operation that was begun, which may be a transfer that is only posted; -1 before the first."""
        self._due: list[int] = []
        """Operations that the machine handed out and the adapter has not executed."""

    def run(self, step: int) -> None:
        """Run one step, operation by operation; the adapter has begun it.

        Raises:
            ProtocolError: the state is wrong when the step has ended.
            Exception: any error of an operation, with the state of the rank as a note.
        """
        try:
            instructions = self.machine.handle(Begin(step))
            while instructions:
                self._due = [instruction.op_id for instruction in instructions]
                for instruction in instructions:
                    self.op_id = instruction.op_id
                    self.adapter.execute(instruction)
                    del self._due[0]
                instructions = self.machine.handle(Finished(self.op_id))
            if self._is_proved:
                self.validate_state()
        except Exception as error:
            error.add_note(self.story())
            raise

    def validate_state(self) -> None:
        """Check the invariants of the machine before an operation or after a step, and of transfers and tensors.

        Raises:
            ProtocolError: an invariant is violated.
        """
        self.machine.validate_state()
        due = frozenset(self._due)
        self.adapter.transfers.validate_state(self.machine.under_way - due, due=due, at_end=self.machine.finished)

    def story(self) -> str:
        """Return the rank's position, and what is posted, held in slots and kept of work items, one line each."""
        lines = [self.machine.position(), *self.adapter.transfers.story()]
        try:
            self.validate_state()
        except ProtocolError as error:
            lines.append(f"  wrong: {error}")
        return "\n".join(lines)
