"""Process of one rank: it joins the world, runs its program step after step, and writes results.

The launcher starts it as ``python -m pipeproof.exec.launch.worker DIRECTORY EVENT_FD LAUNCHER`` with its framework's
environment of the rank; under an external launcher ``run_rank`` is called in the launched process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.compare_gradients import is_checked_by_bound
from pipeproof.exec.monitor.plan_ring import PlanRing
from pipeproof.exec.monitor.ring_recorder import RingRecorder
from pipeproof.exec.rank.adapter import RankAdapter, RankProgram
from pipeproof.exec.rank.checkpointing import restore_state, save_state
from pipeproof.exec.rank.failures import event_of
from pipeproof.exec.rank.framework_choice import (
    paddle_writer,
    start_framework,
    start_ping_clock,
    start_progress,
    start_replays,
    timed,
    timing_of,
)
from pipeproof.exec.rank.framework_protocol import Framework
from pipeproof.exec.rank.idle_messages import EdgeTimes, ping_edges
from pipeproof.exec.rank.job_files import EventSink, Fault, Job, LogWriter, end_process, save_arrays, save_json
from pipeproof.exec.rank.op_log import HostClock, Timing
from pipeproof.exec.rank.step_replay import ReplayedSteps, follow_device, num_logged_steps
from pipeproof.exec.store.rendezvous import environment_rank
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.columns import NONE
from pipeproof.signals import die_with_parent
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.system_calls import kill
from pipeproof.verify.certificate import Certificate, Verdict, certificate_of, graph_digest
from pipeproof.verify.subject import Subject, make_subject

Emit = Callable[..., None]
"""Sends one event to the launcher: its kind, then its content by keyword."""


def run_rank(job: Job, rank: int, emit: Emit) -> None:
    """Run every step of one rank's program; write its results and the op log to the job's directory.

    Raises:
        RuntimeError: this process derives another plan than the verified one, a peer died, or the backend failed.
    """
    subject = verified_subject(job)
    run_steps(job, subject, rank, emit, start_framework(subject.plan.spec.run, share_gpus=job.options.share_gpus))


def verified_subject(job: Job) -> Subject:
    """The plan of a job, with one program for each rank.

    Raises:
        RuntimeError: this process derives another plan than the verified one.
    """
    subject = make_subject(job.loaded_plan()).unfolded()
    require_same_plan(subject, job.certificate)
    return subject


def run_steps(
    job: Job, subject: Subject, rank: int, emit: Emit, framework: Framework,
    after_steps: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Run every step of one rank's program with a framework that computes or rehearses, then ``after_steps``."""
    with ExitStack() as stack:
        steps = _RankSteps(job, subject.plan, rank, emit, framework, stack)
        steps.run()
        after_steps()
        steps.close()


class _RankSteps:
    """All steps of one rank, with a framework that computes or rehearses; ``stack`` closes its resources."""

    def __init__(
        self, job: Job, plan: LoweredPlan, rank: int, emit: Emit, framework: Framework, stack: ExitStack
    ) -> None:
        self._job, self._plan, self._rank, self._emit, self._framework = job, plan, rank, emit, framework
        options, run = job.options, plan.spec.run
        self._world = framework.connect(rank, plan, self._report_phase)
        self._fault = options.fault if options.fault is not None and options.fault.rank == rank else None
        self._watch = LayerWatch() if job.layers else None
        self._timed_world, self._clock = timed(run, self._world) if options.profile else (self._world, HostClock())
        self._ring = self._watched_ring(stack)
        if self._ring is not None:
            self._timed_world = self._ring.world(self._timed_world)
        self._adapter = RankAdapter(plan, rank, framework, self._timed_world, self._enter, self._watch, self._clock)
        is_proved = job.certificate.verdict is Verdict.PROVED
        self._program = RankProgram(plan.graph, rank, self._adapter, is_proved=is_proved)
        # Neither a profile nor a replay nor a rehearsal may spend time on progress.
        without = options.profile or run.replay or not framework.has_values
        self._progress = None if without else start_progress(run)
        self._replayed: ReplayedSteps | None = None
        self._log = LogWriter(job.rank_file(rank, "log"))

    def run(self) -> None:
        """Prepare the first step, and run all."""
        job, run = self._job, self._plan.spec.run
        if job.options.profile:
            self._time_idle_messages()
        if job.checkpoint.resume is not None:
            self._report_phase("loading the state")
            restore_state(self._adapter, self._framework.arrays, self._plan, self._rank, job.checkpoint.resume)
        self._emit("ready", threads=self._framework.num_threads())
        first = job.checkpoint.first_step
        if num_logged_steps(run, layers=job.layers, first_step=first) < run.steps - first:
            self._replayed = ReplayedSteps(self._adapter, self._program.run, start_replays(), self._report_operation)
        for step in range(first, run.steps):
            self._run_step(step)
            self._write_step(step)
            self._emit("step", step=step)

    def close(self) -> None:
        """End the transfers, and finish this rank's files."""
        job, run = self._job, self._plan.spec.run
        self._timed_world.channels.close()
        if job.options.profile:
            save_json(job.rank_file(self._rank, "timing"), timing_of(run, self._clock), Timing)
        self._log.finish()
        self._emit("finished")

    def _run_step(self, step: int) -> None:
        if self._ring is not None:
            self._ring.begin(step)
        if self._replayed is not None:
            self._replayed.run(step)
        else:
            progress, emit = self._progress, self._emit
            if progress is not None:
                progress.begin(step)
            with follow_device(
                None if progress is None else progress.read, lambda step, op_id: emit("device", step=step, op=op_id)
            ):
                self._adapter.begin(step)
                self._program.run(step)
                self._adapter.finish()
        if self._ring is not None:
            self._ring.leave()

    def _write_step(self, step: int) -> None:
        job, adapter, rank, num_steps = self._job, self._adapter, self._rank, self._plan.spec.run.steps
        self._log.write(adapter.log)
        adapter.log.clear()
        if self._watch is not None:
            save_arrays(job.layers_file(f"rank{rank}", step), self._watch.take())
        if self._framework.has_values:
            adapter.outcome.save(job.step_file(f"rank{rank}", step))
            if is_checked_by_bound(self._plan) and step + 1 < num_steps:
                save_arrays(job.weights_file(rank, step + 1), {**adapter.weights(), **adapter.outcome.routers})
        if job.checkpoint.is_due(step, num_steps):
            write = paddle_writer() if job.checkpoint.by_paddle else None
            arrays = self._framework.arrays
            save_state(job, adapter, arrays, self._world, self._plan, step + 1, self._emit, write)

    def _watched_ring(self, stack: ExitStack) -> PlanRing | None:
        directory, plan = self._job.options.watch, self._plan
        if directory is None:
            return None
        num_ranks, backend = plan.mesh.num_ranks, "nccl" if plan.spec.run.device == "gpu" else "gloo"
        recorder = _start_ring(plan.spec.run, directory, self._rank, num_ranks)
        ring = PlanRing(recorder, plan.graph, self._rank, range(num_ranks), backend, self._framework.arrays)
        stack.enter_context(ring.recording())
        return ring

    def _time_idle_messages(self) -> None:
        run, arrays = self._plan.spec.run, self._framework.arrays
        clock, graph = start_ping_clock(run, arrays), self._plan.graph
        times = ping_edges(self._world, arrays, clock, graph, run.device, self._report_phase)
        save_json(self._job.rank_file(self._rank, "bare"), times, EdgeTimes)

    def _report_phase(self, phase: str) -> None:
        self._emit("setup", what=phase)

    def _report_operation(self, step: int, op_id: int) -> None:
        self._emit("at", step=step, op=op_id)

    def _enter(self, step: int, op_id: int) -> None:
        graph = self._plan.graph
        self._report_operation(step, op_id)
        if self._ring is not None:
            self._ring.enter(op_id)
        if self._replayed is not None:
            self._replayed.enter(op_id, graph.ops[op_id].kind)
        elif self._progress is not None and graph.parent[op_id] == NONE:
            self._progress.write(op_id)
        if self._fault is not None and str(graph.ops[op_id]) == self._fault.op:
            _fail(self._fault)


def _start_ring(run: RunSpec, directory: Path, rank: int, num_ranks: int) -> RingRecorder:
    """Start the ring of this rank, whose framework has been started, for ``pipeproof job hang``."""
    marker = None
    if run.backend == "torch":
        from pipeproof.exec.monitor.torch_watch import DeviceMarker

        marker = DeviceMarker()
    recorder = RingRecorder(directory, rank, num_ranks, run.backend, marker=marker)
    recorder.start()
    return recorder


def require_same_plan(subject: Subject, certificate: Certificate) -> None:
    """Refuse another graph than the checked one, and another version of the check.

    Raises:
        RuntimeError: this process derives another graph digest, rule set version or backend table version than the
            launcher's certificate has; the message names the differing values.
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
            "pipeproof, with the same plan files, for every rank, and check the plan again"
        )


def _fail(fault: Fault) -> None:
    if fault.action == "raise":
        raise RuntimeError(f"injected failure at {fault.op}")
    if fault.action == "die":
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
