"""A rank that goes on from many states, one after the other: the worker of ``make_reshard.py``'s jobs.

Started by pipeproof's launcher. In the job's directory ``states.json`` has the
states; of the k-th it leaves each step's loss and gradients in folder ``k``.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from pipeproof.exec.adapter import RankAdapter
from pipeproof.exec.clock import HostClock
from pipeproof.exec.frameworks import start_framework
from pipeproof.exec.jobs import Job, save_step
from pipeproof.exec.kept import go_on
from pipeproof.exec.machine import RankMachine
from pipeproof.exec.worker import Emit, main, require_same_plan, run_step
from pipeproof.verify.subject import make_subject

STATES_FILE = "states.json"


def go_on_from_all(job: Job, rank: int, emit: Emit) -> None:
    """Carry out the steps that are left, once from each state."""
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.digest)
    plan = subject.plan
    framework = start_framework(plan.spec.run)
    world = framework.connect(rank, plan, lambda what: emit("setup", what=what))
    states = json.loads((job.directory / STATES_FILE).read_text())
    emit("ready", threads=framework.num_threads())
    for number, directory in enumerate(states):
        own = replace(job, directory=job.directory / str(number))
        adapter = RankAdapter(plan, rank, framework, world, lambda step, op: emit("at", step=step, op=op), None,
                              HostClock())  # fmt: skip
        go_on(adapter, framework.arrays, plan, rank, Path(directory))
        for step in range(job.kept.first_step, plan.spec.run.steps):
            adapter.begin(step)
            run_step(RankMachine(plan.graph, rank), step, adapter.carry_out)
            adapter.finish()
            save_step(own.step_file(f"rank{rank}", step), *adapter.outcome.saved)
    emit("step", step=plan.spec.run.steps - 1)
    world.channels.close()
    emit("finished")


if __name__ == "__main__":
    status = main(sys.argv[1:], go_on_from_all)
    sys.stdout.flush()
    os._exit(status)
