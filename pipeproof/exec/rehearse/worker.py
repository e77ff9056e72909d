"""One rank's process in a rehearsal: joins the world, carries out the plan's communication, leaves what it found.

Started by the launcher as ``python -m pipeproof.exec.rehearse.worker DIRECTORY
EVENT_FD``, or called in-process under an existing launcher. The framework is
started as for a run, but not asked whether it computes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pipeproof.exec.frameworks import start_framework, start_ping_clock
from pipeproof.exec.jobs import Job
from pipeproof.exec.machine import RankMachine
from pipeproof.exec.rehearse.adapter import RehearsalAdapter
from pipeproof.exec.rehearse.pinged import EdgeTimes, ping_edges, save_edges
from pipeproof.exec.worker import Emit, FaultPlan, main, require_same_plan, run_step
from pipeproof.verify.subject import make_subject


def found_file(job: Job, rank: int) -> Path:
    """Where a rank leaves what it looked at and what it found."""
    return job.directory / f"rank{rank}.found.json"


def rehearse_rank(job: Job, rank: int, emit: Emit) -> None:
    """Carry out every step's communication of one rank; leaves what it found, the op log and the edges' times.

    Raises:
        RuntimeError: the plan that this process derives is not the one that was checked, a peer died, or the backend
            failed.
    """
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.digest)
    plan = subject.plan
    framework = start_framework(plan.spec.run, computes=False, share_gpus=job.share_gpus)
    world = framework.connect(rank, plan, lambda what: emit("setup", what=what))
    fault = FaultPlan(job.fault, rank)

    def enter(step: int, op_id: int) -> None:
        emit("at", step=step, op=op_id)
        fault.strike(plan.graph.ops[op_id])

    adapter = RehearsalAdapter(subject, rank, framework.arrays, world, enter)
    machine = RankMachine(plan.graph, rank)
    emit("ready", threads=framework.num_threads())
    for step in range(plan.spec.run.steps):
        adapter.begin(step)
        run_step(machine, step, adapter.carry_out)
        emit("step", step=step)
    run = plan.spec.run
    times: EdgeTimes = {}
    if not job.share_gpus:  # edges are sockets then
        clock = start_ping_clock(run, framework.arrays)
        times = ping_edges(
            world, framework.arrays, clock, plan.graph, run.device, lambda what: emit("setup", what=what)
        )
    save_edges(job, rank, times)
    # The host runs ahead of a GPU: a rank that left now would leave its peers without what it sends last.
    framework.arrays.synchronize()
    world.barrier()
    world.channels.close()
    found_file(job, rank).write_text(json.dumps(adapter.checked.to_json()))
    job.log_file(rank).write_text(json.dumps([entry.to_json() for entry in adapter.log]))
    emit("finished")


if __name__ == "__main__":
    status = main(sys.argv[1:], rehearse_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a framework's threads would hold a normal exit up when a peer is gone
