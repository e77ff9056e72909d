"""Process of one rank in a rehearsal: it executes the communication without computation, and checks all arrivals.

The launcher starts it as ``python -m pipeproof.exec.rehearse.rehearsal_worker DIRECTORY EVENT_FD``; under an external
launcher ``rehearse_rank`` is called in the launched process. The framework is started as for a run, but its kernels are
not tested.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeproof.exec.launch.job_files import Job
from pipeproof.exec.rank.framework_choice import start_framework, start_ping_clock
from pipeproof.exec.rank.framework_protocol import Arrays, World
from pipeproof.exec.rank.machine import Instruction, RankMachine
from pipeproof.exec.rank.op_log import HOST_QUEUE, LogEntry
from pipeproof.exec.rank.worker import Emit, FaultInjector, main, require_same_plan, run_step
from pipeproof.exec.rehearse.rehearsal_collectives import RehearsalCollectives, children_of
from pipeproof.exec.rehearse.rehearsal_edges import EdgeTimes, ping_edges, save_edges
from pipeproof.exec.rehearse.rehearsal_faults import ArrivalChecks
from pipeproof.exec.rehearse.rehearsal_transfers import RehearsalTransfers
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import GATHER_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.verify.subject import Subject, make_subject

_READERS = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})
"""Computations that read boundary tensors."""


class RehearsalAdapter:
    """Adapter of one rank of an unfolded plan.

    ``enter`` is called with the step and id of each host operation and child collective before it is executed.
    """

    def __init__(
        self, subject: Subject, rank: int, arrays: Arrays, world: World, enter: Callable[[int, int], None]
    ) -> None:
        self._graph, self._arrays, self._world, self._enter = subject.graph, arrays, world, enter
        self.checked = ArrivalChecks()
        self.log: list[LogEntry] = []
        self._transfers = RehearsalTransfers(subject, rank, world.channels, arrays, self.checked)
        run = subject.plan.spec.run
        self._collectives = RehearsalCollectives(self._graph, run, world.collectives, arrays, self.checked)
        self._children = children_of(self._graph, rank)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._transfers.step = step
        self._transfers.begin()

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction; a transfer is only posted, all others are finished on return."""
        op_id, op = instruction.op_id, instruction.op
        if op.kind in TRANSFER_KINDS:
            self._transfers.post(op_id)
            return
        step = self._transfers.step
        self._enter(step, op_id)
        start, position = time.monotonic_ns(), len(self.log)
        ranks: tuple[int, ...] = ()
        numel, dtype = 0, ""
        if op.kind is OpKind.WAIT:
            if op.target is not None and op.target.kind in TRANSFER_KINDS:
                self.log.append(self._transfers.wait(step, op_id))
        elif op.kind in GATHER_KINDS:
            self._transfers.drain()
            collectives = self._world.collectives[instruction.row.group]
            part = self._transfers.gathered(op_id, collectives)
            ranks, (numel, dtype) = collectives.ranks, self._transfers.size_of(part)
        elif self._graph.group[op_id] != NONE:
            self._transfers.drain()
            issued = self._collectives.issue(op_id, step)
            ranks, numel, dtype = issued.ranks, issued.numel, issued.dtype
        elif op.kind in _READERS:
            self._transfers.consume(op_id)
        for child in self._children.get(op_id, ()):
            self._issue_child(child, step)
        entry = LogEntry(step, HOST_QUEUE, str(op), start, time.monotonic_ns(), ranks, numel, dtype)
        self.log.insert(position, entry)  # before the children that ran inside it

    def _issue_child(self, op_id: int, step: int) -> None:
        """Issue a collective of a running computation or sum of gradients."""
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


def checks_file(job: Job, rank: int) -> Path:
    """File of a rank's checks and faults."""
    return job.directory / f"rank{rank}.checks.json"


def rehearse_rank(job: Job, rank: int, emit: Emit) -> None:
    """Execute the communication of every step of one rank; write its checks, the op log and the edges' times.

    Raises:
        RuntimeError: this process derives another plan than the checked one, a peer died, or the backend failed.
    """
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.certificate)
    plan = subject.plan
    framework = start_framework(plan.spec.run, computes=False, share_gpus=job.share_gpus)
    world = framework.connect(rank, plan, lambda phase: emit("setup", what=phase))
    fault = FaultInjector(job.fault, rank)

    def enter(step: int, op_id: int) -> None:
        emit("at", step=step, op=op_id)
        fault.inject(plan.graph.ops[op_id])

    adapter = RehearsalAdapter(subject, rank, framework.arrays, world, enter)
    machine = RankMachine(plan.graph, rank)
    emit("ready", threads=framework.num_threads())
    for step in range(plan.spec.run.steps):
        adapter.begin(step)
        run_step(machine, step, adapter.execute)
        emit("step", step=step)
    run = plan.spec.run
    times: EdgeTimes = {}
    if not job.share_gpus:  # with shared GPUs edges are sockets
        clock = start_ping_clock(run, framework.arrays)
        times = ping_edges(
            world, framework.arrays, clock, plan.graph, run.device, lambda phase: emit("setup", what=phase)
        )
    save_edges(job, rank, times)
    # The host runs ahead of a GPU: if a rank ended now, its peers would not get its last messages.
    framework.arrays.synchronize()
    world.barrier()
    world.channels.close()
    checks_file(job, rank).write_text(json.dumps(adapter.checked.to_json()))
    job.log_file(rank).write_text(json.dumps([entry.to_json() for entry in adapter.log]))
    emit("finished")


if __name__ == "__main__":
    status = main(sys.argv[1:], rehearse_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a framework's threads would block a normal exit when a peer is gone
