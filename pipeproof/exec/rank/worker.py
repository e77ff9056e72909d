"""Process of one rank: it joins the world, runs its program step after step, and writes results.

The launcher starts it as ``python -m pipeproof.exec.rank.worker DIRECTORY EVENT_FD LAUNCHER`` with its
framework's environment
of the rank; under an external launcher ``run_rank`` is called in the launched process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pipeproof.exec.compare.reference_kind import is_checked_by_bound
from pipeproof.exec.launch.custom_layers_check import require_same_start
from pipeproof.exec.launch.failures import event_of
from pipeproof.exec.launch.job_files import EventSink, Fault, Job, LogWriter, end_process, save_arrays, save_json
from pipeproof.exec.launch.rendezvous import environment_rank
from pipeproof.exec.measure.idle_messages import IdleMessageEnd, time_idle_messages
from pipeproof.exec.monitor.plan_ring import PlanRing
from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.exec.rank.checkpointing import restore_state, save_state
from pipeproof.exec.rank.framework_choice import (
    capture_graphs,
    paddle_writer,
    peak_of_products,
    start_framework,
    start_progress,
    start_replays,
    start_ring,
    timed,
    timing_of,
)
from pipeproof.exec.rank.framework_protocol import Framework
from pipeproof.exec.rank.op_log import HostClock, Timing
from pipeproof.exec.rank.rank_program import RankProgram
from pipeproof.exec.rank.step_replay import ReplayedSteps, follow_device, num_logged_steps
from pipeproof.exec.rehearse.rehearsal_framework import RehearsalFramework
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.ops import Op
from pipeproof.signals import die_with_parent
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.system_calls import kill
from pipeproof.verify.certificate import Certificate, Verdict, certificate_of, graph_digest
from pipeproof.verify.subject import Subject, make_subject

Emit = Callable[..., None]
"""Sends one event to the launcher: its kind, then its content by keyword."""


def run_rank(job: Job, rank: int, emit: Emit, framework: Framework | None = None) -> None:
    """Run or rehearse every step of one rank's program; write its results and the op log to the job's directory.

    ``framework`` is the plan's if it was started before.

    Raises:
        RuntimeError: this process derives another plan than the verified one, a peer died, or the backend failed.
    """
    with ExitStack() as stack:
        _run_steps(job, rank, emit, framework, stack)


def _run_steps(job: Job, rank: int, emit: Emit, framework: Framework | None, stack: ExitStack) -> None:
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.certificate)
    plan = subject.plan
    options, run = job.options, plan.spec.run
    if framework is None:
        framework = start_framework(run, computes=not options.rehearses, share_gpus=options.share_gpus)
    rehearsal = RehearsalFramework(framework, subject, rank) if options.rehearses else None

    def report_phase(phase: str) -> None:
        emit("setup", what=phase)

    world = framework.connect(rank, plan, report_phase)
    fault = FaultInjector(options.fault, rank)

    def report_operation(step: int, op_id: int) -> None:
        emit("at", step=step, op=op_id)

    def enter(step: int, op_id: int) -> None:
        report_operation(step, op_id)
        if ring is not None:
            ring.enter(op_id)
        if replayed is not None:
            replayed.enter(op_id, plan.graph.ops[op_id].kind)
        elif progress is not None and plan.graph.parent[op_id] == NONE:
            progress.write(op_id)
        fault.inject(plan.graph.ops[op_id])

    replayed: ReplayedSteps | None = None
    # Neither a profile nor a replay nor a rehearsal may spend time on progress.
    without = options.profile or options.rehearses or run.replay
    progress = None if without else start_progress(run)

    watch = LayerWatch() if job.layers else None
    timed_world, clock = timed(run, world) if options.profile else (world, HostClock())
    ring = None
    if options.watch is not None and rehearsal is None:
        num_ranks, backend = plan.mesh.num_ranks, "nccl" if run.device == "gpu" else "gloo"
        recorder = start_ring(run, options.watch, rank, num_ranks)
        ring = PlanRing(recorder, plan.graph, rank, range(num_ranks), backend, framework.arrays)
        stack.enter_context(ring.recording())
        timed_world = ring.world(timed_world)
    if rehearsal is not None:
        adapter = RankAdapter(plan, rank, rehearsal, rehearsal.world(world), enter)
    else:
        adapter = RankAdapter(plan, rank, framework, timed_world, enter, watch, clock)
        if plan.spec.is_custom:
            require_same_start(job, adapter.weights())
    program = RankProgram(plan.graph, rank, adapter, is_proved=job.certificate.verdict is Verdict.PROVED)
    if run.compiler is not None and rehearsal is None:
        reasons = (
            dict.fromkeys(adapter.stages, "the tensors between its layers are recorded")
            if watch
            else (capture_graphs(adapter.stages, lambda stage: report_phase(f"making the graphs of stage {stage}")))
        )
        save_json(job.rank_file(rank, "graphs"), reasons, dict[int, str])
    peak_flops = 0.0
    if options.profile:
        emit("setup", what="timing products")
        peak_flops = peak_of_products(run, framework.arrays)
        emit("setup", what="timing idle messages")
        times = time_idle_messages(world, framework.arrays, plan.graph, on_device=run.device == "gpu")
        save_json(job.rank_file(rank, "bare"), times, list[IdleMessageEnd])
    if job.checkpoint.resume is not None:
        emit("setup", what="loading the state")
        restore_state(adapter, framework.arrays, plan, rank, job.checkpoint.resume)
    emit("ready", threads=framework.num_threads())
    log = LogWriter(job.rank_file(rank, "log"))
    first = job.checkpoint.first_step
    if num_logged_steps(run, layers=job.layers, first_step=first) < run.steps - first:
        replays = start_replays()
        replayed = ReplayedSteps(adapter, program.run, replays, report_operation)
    for step in range(first, run.steps):
        if ring is not None:
            ring.begin(step)
        if replayed is not None:
            replayed.run(step)
        else:
            if progress is not None:
                progress.begin(step)
            with follow_device(
                None if progress is None else progress.read, lambda step, op_id: emit("device", step=step, op=op_id)
            ):
                adapter.begin(step)
                program.run(step)
                adapter.finish()
        if ring is not None:
            ring.leave()
        log.write(adapter.log)
        adapter.log.clear()
        if watch is not None:
            save_arrays(job.layers_file(f"rank{rank}", step), watch.take())
        if rehearsal is None:
            adapter.outcome.save(job.step_file(f"rank{rank}", step))
        if rehearsal is None and is_checked_by_bound(plan) and step + 1 < run.steps:
            save_arrays(job.weights_file(rank, step + 1), {**adapter.weights(), **adapter.outcome.routers})
        if job.checkpoint.is_due(step, run.steps):
            write_by_paddle = paddle_writer() if job.checkpoint.by_paddle else None
            save_state(job, adapter, framework.arrays, world, plan, step + 1, emit, write_by_paddle)
        emit("step", step=step)
    if rehearsal is not None:
        rehearsal.finish(job, world, emit)
    timed_world.channels.close()
    if options.profile:
        timing = replace(timing_of(run, clock), peak_flops=peak_flops, peak_dtype=run.dtype)
        save_json(job.rank_file(rank, "timing"), timing, Timing)
    log.finish()
    emit("finished")


def require_same_plan(subject: Subject, certificate: Certificate) -> None:
    """Refuse to work on another graph than the one that was checked, or where the check would be another one.

    Raises:
        RuntimeError: this process derives another graph digest, rule set version or backend table version than the
            launcher's certificate has; the message names those that differ.
    """
    ours = certificate_of(subject, graph_digest(subject), certificate.verdict)
    compared = (
        ("graph digest", ours.graph_digest[:12], certificate.graph_digest[:12]),
        ("rule set version", ours.rule_set_version, certificate.rule_set_version),
        ("backend table version", ours.backend_table_version[:12], certificate.backend_table_version[:12]),
    )
    differ = [f"{name} {derived}, not {checked}" for name, derived, checked in compared if derived != checked]
    if differ:
        raise RuntimeError(
            f"this process derives another certificate than the launcher's: {', '.join(differ)}; install the same "
            "pipeproof, with the same custom layers and plan files, for every rank, and check the plan again"
        )


class FaultInjector:
    """Injector of a failure before the named operation of the named rank."""

    def __init__(self, fault: Fault | None, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank == rank else None

    def inject(self, op: Op) -> None:
        """Fail if the operation is the one of the fault."""
        if self._fault is None or str(op) != self._fault.op:
            return
        if self._fault.action == "raise":
            raise RuntimeError(f"injected failure at {op}")
        if self._fault.action == "die":
            kill(os.getpid())
        while True:  # hang
            time.sleep(1)


def main(arguments: list[str], work: Callable[[Job, int, Emit], None] = run_rank) -> int:
    """Do one rank's ``work`` under pipeproof's launcher; return exit status 0, or 3 if anything failed."""
    directory, events = Path(arguments[0]), EventSink(int(arguments[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    die_with_parent(int(arguments[2]))
    try:
        work(Job.load(directory), environment_rank(), events.send)
    except Exception as error:  # noqa: BLE001 - a framework may raise anything; the launcher reports it
        traceback.print_exc()
        events.send("error", **event_of(error))
        return ExitStatus.WORKER_FAILED
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
