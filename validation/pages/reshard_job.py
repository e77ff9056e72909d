"""Worker of ``make_reshard.py``'s jobs: a rank that resumes from many states, one after the other.

Started by pipeproof's launcher. ``states.json`` in the job's directory lists the
states; the losses and gradients of the k-th one are saved in folder ``k``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from pipeproof.exec.launch.worker import Emit, main, require_same_plan
from pipeproof.exec.rank.adapter import RankAdapter, RankProgram
from pipeproof.exec.rank.checkpointing import restore_state
from pipeproof.exec.rank.framework_choice import start_framework
from pipeproof.exec.rank.job_files import Job
from pipeproof.exec.rank.op_log import HostClock
from pipeproof.verify.subject import make_subject

STATES_FILE = "states.json"


def go_on_from_all(job: Job, rank: int, emit: Emit) -> None:
    """Execute the remaining steps once from each state."""
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.certificate)
    plan = subject.plan
    framework = start_framework(plan.spec.run)
    world = framework.connect(rank, plan, lambda what: emit("setup", what=what))
    states = json.loads((job.directory / STATES_FILE).read_text())
    emit("ready", threads=framework.num_threads())
    for number, directory in enumerate(states):
        own = replace(job, directory=job.directory / str(number))
        adapter = RankAdapter(plan, rank, framework, world, lambda step, op: emit("at", step=step, op=op), None,
                              HostClock())  # fmt: skip
        program = RankProgram(plan.graph, rank, adapter)
        restore_state(adapter, framework.arrays, plan, rank, Path(directory))
        for step in range(job.checkpoint.first_step, plan.spec.run.steps):
            adapter.begin(step)
            program.run(step)
            adapter.finish()
            adapter.outcome.save(own.step_file(f"rank{rank}", step))
    emit("step", step=plan.spec.run.steps - 1)
    world.channels.close()
    emit("finished")


if __name__ == "__main__":
    status = main(sys.argv[1:], go_on_from_all)
    sys.stdout.flush()
    os._exit(status)
