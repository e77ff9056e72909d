"""Carries out a rank's instructions in a rehearsal: all communication, no computation, everything read on arrival."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeproof.exec.framework import Arrays, World
from pipeproof.exec.machine import Instruction
from pipeproof.exec.oplog import HOST_QUEUE, LogEntry
from pipeproof.exec.rehearse.collectives import RehearsedCollectives, children_of
from pipeproof.exec.rehearse.faults import Checked
from pipeproof.exec.rehearse.transfers import RehearsedTransfers
from pipeproof.schedule.ops import GATHER_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE
from pipeproof.verify.subject import Subject

_READERS = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})
"""Computations that read what comes over boundaries."""


class RehearsalAdapter:
    """One rank of a plan whose ranks all stand for themselves.

    ``enter`` is called with the step and id of each host operation and each
    collective below one before it is carried out.
    """

    def __init__(
        self, subject: Subject, rank: int, arrays: Arrays, world: World, enter: Callable[[int, int], None]
    ) -> None:
        self._graph, self._arrays, self._world, self._enter = subject.graph, arrays, world, enter
        self.checked = Checked()
        self.log: list[LogEntry] = []
        self._transfers = RehearsedTransfers(subject, rank, world.channels, arrays, self.checked)
        run = subject.plan.spec.run
        self._collectives = RehearsedCollectives(self._graph, run, world.collectives, arrays, self.checked)
        self._children = children_of(self._graph, rank)

    def begin(self, step: int) -> None:
        """A step starts."""
        self._transfers.step = step
        self._transfers.begin()

    def carry_out(self, instruction: Instruction) -> None:
        """Do what one instruction says; a transfer is posted, everything else is finished on return."""
        op_id, op = instruction.op_id, instruction.op
        if op.kind in TRANSFER_KINDS:
            self._transfers.post(op_id)
            return
        step = self._transfers.step
        self._enter(step, op_id)
        start, place = time.monotonic_ns(), len(self.log)
        ranks: tuple[int, ...] = ()
        numel, dtype = 0, ""
        if op.kind is OpKind.WAIT:
            if op.target is not None and op.target.kind in TRANSFER_KINDS:
                self.log.append(self._transfers.wait(step, op_id))
        elif op.kind in GATHER_KINDS:
            self._transfers.drain()
            collectives = self._world.collectives[instruction.row.group]
            own = self._transfers.gathered(op_id, collectives)
            ranks, (numel, dtype) = collectives.ranks, self._transfers.size_of(own)
        elif self._graph.group[op_id] != NONE:
            self._transfers.drain()
            issued = self._collectives.issue(op_id, step)
            ranks, numel, dtype = issued.ranks, issued.numel, issued.dtype
        elif op.kind in _READERS:
            self._transfers.consume(op_id)
        for child in self._children.get(op_id, ()):
            self._issue_below(child, step)
        entry = LogEntry(step, HOST_QUEUE, str(op), start, time.monotonic_ns(), ranks, numel, dtype)
        self.log.insert(place, entry)  # before what ran inside it

    def _issue_below(self, op_id: int, step: int) -> None:
        """A collective that a computation, or a sum of gradients, issues while it runs."""
        self._enter(step, op_id)
        self._transfers.drain()
        start = time.monotonic_ns()
        issued = self._collectives.issue(op_id, step)
        self.log.append(
            LogEntry(
                step,
                HOST_QUEUE,
                str(self._graph.ops[op_id]),
                start,
                time.monotonic_ns(),
                issued.ranks,
                issued.numel,
                issued.dtype,
                traffic=issued.traffic,
            )
        )
