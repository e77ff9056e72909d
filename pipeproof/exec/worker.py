"""One rank's process: joins the world, runs its program step after step, leaves results.

Started by the launcher as ``python -m pipeproof.exec.worker DIRECTORY EVENT_FD``
with its framework's environment of its rank, or called in-process under an
existing launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeproof.exec.adapter import RankAdapter
from pipeproof.exec.bare_messages import bare_messages
from pipeproof.exec.clock import HostClock
from pipeproof.exec.failures import event_of
from pipeproof.exec.frameworks import paddle_writer, start_framework, start_progress, start_replays, timed, timing_of
from pipeproof.exec.jobs import EventSink, Fault, Job, save_arrays, save_step
from pipeproof.exec.judged import is_by_bound
from pipeproof.exec.kept import go_on, leave_state
from pipeproof.exec.machine import Begin, Finished, Instruction, RankMachine
from pipeproof.exec.own_layers import require_same_start
from pipeproof.exec.progress import followed
from pipeproof.exec.rendezvous import environment_rank
from pipeproof.exec.replay import ReplayedSteps, num_logged_steps
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.ops import Op
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.verify.certificate import plan_digest
from pipeproof.verify.subject import Subject, make_subject

Emit = Callable[..., None]
"""Tells the launcher one event: its kind, then its content by keyword."""


def run_rank(job: Job, rank: int, emit: Emit) -> None:
    """Run every step of one rank's program; leaves step files and the op log in the job's directory.

    Raises:
        RuntimeError: the plan that this process derives is not the one that was verified, a peer died, or the
            backend failed.
    """
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.digest)
    plan = subject.plan
    framework = start_framework(plan.spec.run, share_gpus=job.share_gpus)
    world = framework.connect(rank, plan, lambda what: emit("setup", what=what))
    fault = FaultPlan(job.fault, rank)

    def tell(step: int, op_id: int) -> None:
        emit("at", step=step, op=op_id)

    def enter(step: int, op_id: int) -> None:
        tell(step, op_id)
        if replayed is not None:
            replayed.enter(op_id, plan.graph.ops[op_id].kind)
        elif progress is not None and plan.graph.parent[op_id] == NONE:
            progress.write(op_id)
        fault.strike(plan.graph.ops[op_id])

    replayed: ReplayedSteps | None = None
    run = plan.spec.run
    progress = (
        None if job.profile or run.replay else start_progress(run, plan.graph.num_ops)
    )  # the first is to cost none

    watch = LayerWatch() if job.layers else None
    seen, clock = timed(plan.spec.run, world) if job.profile else (world, HostClock())
    adapter = RankAdapter(plan, rank, framework, seen, enter, watch, clock)
    if plan.spec.own_layers is not None:
        require_same_start(job, adapter.weights())
    machine = RankMachine(plan.graph, rank)
    if job.profile:
        emit("setup", what="timing bare messages")
        times = bare_messages(world, framework.arrays, plan.graph, on_device=plan.spec.run.device == "gpu")
        job.bare_file(rank).write_text(json.dumps([asdict(message) for message in times]))
    if job.kept.resume is not None:
        emit("setup", what="loading the state")
        go_on(adapter, framework.arrays, plan, rank, job.kept.resume)
    emit("ready", threads=framework.num_threads())
    first = job.kept.first_step
    if num_logged_steps(plan.spec.run, layers=job.layers, first_step=first) < plan.spec.run.steps - first:
        replays = start_replays(plan.graph.num_ops)
        replayed = ReplayedSteps(adapter, lambda step: run_step(machine, step, adapter.carry_out), replays, tell)
    for step in range(first, plan.spec.run.steps):
        if replayed is not None:
            replayed.run(step)
        else:
            if progress is not None:
                progress.begin(step)
            with followed(
                None if progress is None else progress.read, lambda step, op_id: emit("device", step=step, op=op_id)
            ):
                adapter.begin(step)
                run_step(machine, step, adapter.carry_out)
                adapter.finish()
        if watch is not None:
            save_arrays(job.layers_file(f"rank{rank}", step), watch.take())
        save_step(job.step_file(f"rank{rank}", step), *adapter.outcome.saved)
        if is_by_bound(plan) and step + 1 < plan.spec.run.steps:
            save_arrays(job.weights_file(rank, step + 1), adapter.weights() | adapter.outcome.routers)
        if job.kept.is_due(step, plan.spec.run.steps):
            write_by_paddle = paddle_writer() if job.kept.by_paddle else None
            leave_state(job, adapter, framework.arrays, world, plan, step + 1, emit, write_by_paddle)
        emit("step", step=step)
    seen.channels.close()
    if job.profile:
        timing_of(plan.spec.run, clock).save(job.timing_file(rank))
    job.log_file(rank).write_text(json.dumps([entry.to_json() for entry in adapter.log]))
    emit("finished")


def run_step(machine: RankMachine, step: int, carry_out: Callable[[Instruction], None]) -> None:
    """One step of a rank's program, operation by operation."""
    instructions = machine.handle(Begin(step))
    while instructions:
        for instruction in instructions:
            carry_out(instruction)
        instructions = machine.handle(Finished(instructions[-1].op_id))


def require_same_plan(subject: Subject, digest: str) -> None:
    """Refuse to work on another graph than the one that was judged.

    Raises:
        RuntimeError: the plan that this process derives is another one.
    """
    derived = plan_digest(subject)
    if derived != digest:
        raise RuntimeError(f"this process derives plan digest {derived[:12]}, the verified one is {digest[:12]}")


class FaultPlan:
    """Strikes once, when the named operation is about to run on the named rank."""

    def __init__(self, fault: Fault | None, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank == rank else None

    def strike(self, op: Op) -> None:
        """Fail as planned, if this is where."""
        if self._fault is None or str(op) != self._fault.op:
            return
        if self._fault.action == "raise":
            raise RuntimeError(f"planted failure at {op}")
        if self._fault.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # hang
            time.sleep(1)


def end_with_launcher(directory: Path) -> None:
    """From here on, end this process when the launcher does, however it ended; nothing of the job is left behind."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(ExitStatus.WORKER_FAILED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(arguments: list[str], work: Callable[[Job, int, Emit], None] = run_rank) -> int:
    """Do one rank's ``work`` under pipeproof's launcher; the exit status is 0, or 3 when anything failed."""
    directory, events = Path(arguments[0]), EventSink(int(arguments[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    end_with_launcher(directory)
    try:
        work(Job.load(directory), environment_rank(), events.send)
    except Exception as error:  # noqa: BLE001 - whatever a framework raises: the launcher tells the person
        traceback.print_exc()
        events.send("error", **event_of(error))
        return ExitStatus.WORKER_FAILED
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a framework's threads would hold a normal exit up when a peer is gone
