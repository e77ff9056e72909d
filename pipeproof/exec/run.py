"""Running a verified plan: launch, compare each step as it comes, report."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeproof.comm.accumulation import accumulation_of
from pipeproof.exec.bare import read_bare
from pipeproof.exec.carried_out import require_carried_out
from pipeproof.exec.clock import Timing
from pipeproof.exec.codes import BACKEND_MISSING, NOT_CARRIED_OUT
from pipeproof.exec.compare import StepResult, compare_step
from pipeproof.exec.compare_routers import compare_routers
from pipeproof.exec.dp_shares import with_whole_gradients
from pipeproof.exec.exchanges import compare_exchanges
from pipeproof.exec.gpus import missing_gpus
from pipeproof.exec.jobs import Fault, Job, dump_plan, load_arrays, load_not_finite, load_routers, load_step
from pipeproof.exec.judged import is_by_bound, needs_ordered
from pipeproof.exec.kept import KeptState, prepared, remove_unfinished
from pipeproof.exec.launch import START_UP_TIMEOUT_S, Launcher, job_directory
from pipeproof.exec.not_finite import require_finite
from pipeproof.exec.oplog import LogEntry, compare_log
from pipeproof.exec.own_layers import require_own_layers
from pipeproof.exec.profile import measured_profile
from pipeproof.exec.record import RankStep, Recorder, RecordOptions, ReferenceStep
from pipeproof.exec.replay import num_logged_steps
from pipeproof.exec.report import RunReport, clock_of, measured_timeline
from pipeproof.exec.watchdog import JobState
from pipeproof.schedule.ops import COMPUTE_KINDS, TRANSFER_KINDS
from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.specs.plan import RunSpec
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.verify.check import Report
from pipeproof.verify.subject import Subject


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is: steps that every rank, and the reference, have finished; what set-up is at."""

    steps_done: int
    reference_steps: int
    phase: str


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run: the watchdog's seconds, where worker output is kept, a planted failure, whether times are wanted.

    ``record`` says where and how much to record, None for nothing. ``share_gpus`` allows fewer GPUs than ranks.
    ``kept`` says what state to go on from, as a person named it, and where to save.
    """

    timeout_s: float = 60.0
    logs: Path | None = None
    fault: Fault | None = None
    unsafe: bool = False
    profile: bool = False
    record: RecordOptions | None = None
    share_gpus: bool = False
    kept: KeptState = field(default_factory=KeptState)


class NotVerifiedError(PipeproofError):
    """The plan has errors, or its certificate is for another plan; it was not run."""


class BackendMissingError(PipeproofError):
    """The plan's backend is not installed, or its device is not there."""


def run(
    report: Report,
    options: RunOptions,
    on_progress: Callable[[Progress], None],
    on_step: Callable[[StepResult], None],
) -> RunReport:
    """Run the plan of a check report on real processes and hold every step against the reference.

    Raises:
        NotVerifiedError: the report has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed.
        PlanFileError: own layers cannot be built, or are not as declared.
        PipeproofError: the planted failure of the options would never strike.
        WorkerFailedError: a worker died, raised or hung.
        NotFiniteError: a step came to a loss or a gradient that is no number.
        StateError: the state to go on from is not one of this plan, or not whole.
    """
    require_runnable(report, options)
    with job_directory(options.logs) as directory:
        layers = options.record is not None and options.record.layers
        job = Job(directory, dump_plan(report.subject.loaded), report.digest, options.fault, options.profile, layers)
        job = replace(job, share_gpus=options.share_gpus, kept=prepared(options.kept, report.subject, report.digest))
        job.save()
        require_own_layers(job, report.subject.loaded, max(options.timeout_s, START_UP_TIMEOUT_S))
        collector = StepCollector(job, report.subject, options.record, needs_numbers=report.certificate is not None)
        state = JobState(report.subject)
        launcher = Launcher(job, state, options.timeout_s)

        def progressed() -> None:
            done = min(rank.steps_done for rank in state.ranks)
            phase = next((rank.phase for rank in state.ranks if rank.phase != "running"), "running")
            on_progress(Progress(done, launcher.reference_steps, phase))
            for result in collector.collect(min(done, launcher.reference_steps)):
                on_step(result)

        try:
            launcher.run(progressed)
        finally:
            remove_unfinished(job.kept, job.directory.name)
        progressed()
        return finish_report(report, job, collector.results, state.threads)


def require_runnable(report: Report, options: RunOptions) -> None:
    """Refuse early and clearly what must not or cannot be run.

    Raises:
        NotVerifiedError: the report has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed.
        PipeproofError: the plan asks for what is not carried out yet, or the planted failure of the options would
            never strike.
    """
    if report.certificate is None and not options.unsafe:
        raise NotVerifiedError(*report.errors)
    require_carried_out(report.subject)
    require_environment(report.subject, share_gpus=options.share_gpus)
    require_fault_op(report.subject, options.fault)
    _require_times(report.subject, options)


def require_environment(subject: Subject, *, share_gpus: bool = False) -> None:
    """Refuse what lacks its framework, or its devices; with ``share_gpus`` one GPU is enough.

    Raises:
        BackendMissingError: the plan's backend is not installed, or its device is not there.
    """
    _require_backend(subject.plan.spec.run)
    if missing := missing_gpus(subject, share_gpus=share_gpus):
        raise BackendMissingError(missing)


def _require_backend(run: RunSpec) -> None:
    name, extra, package = _INSTALLED_BY[run.backend]
    if importlib.util.find_spec(run.backend) is None:
        raise BackendMissingError(
            Finding(
                BACKEND_MISSING.code,
                Severity.ERROR,
                f"the plan runs on {name}, which is not installed in this Python",
                help=f"pip install 'pipeproof[{extra}]'  (or {package})",
            )
        )


def _require_times(subject: Subject, options: RunOptions) -> None:
    """Refuse to measure what cannot be: of a replay only how far it has come is seen, of Paddle's GPUs nothing."""
    run = subject.plan.spec.run
    if options.profile and (run.backend, run.device) == ("paddle", "gpu"):
        raise PipeproofError(
            Finding(
                NOT_CARRIED_OUT.code,
                Severity.ERROR,
                "--profile needs the GPU's own clock, which is read with PyTorch alone",
                location=subject.locate("run", "device"),
                help="run without --profile, or with `backend: torch`",
            )
        )
    if options.profile and subject.plan.spec.run.replay:
        raise PipeproofError(
            Finding(
                NOT_CARRIED_OUT.code,
                Severity.ERROR,
                "--profile times operations one by one, and run.replay carries out whole steps",
                location=subject.locate("run", "replay"),
                help="measure it with `replay: false`: the operations are the same",
            )
        )


_INSTALLED_BY = {
    "paddle": ("Paddle", "cpu", "paddlepaddle==3.3.1"),
    "torch": ("PyTorch", "torch", "torch>=2.11"),
}
"""By backend its name, our extra that installs it, and the package."""


def require_fault_op(subject: Subject, fault: Fault | None) -> None:
    """Refuse a planted failure that would never strike: the host only posts transfers, and goes on.

    Raises:
        PipeproofError: it names no rank's operation.
    """
    if fault is None:
        return
    graph = subject.graph
    ops = [graph.ops[i] for i in graph.rank_ops(fault.rank)] if fault.rank < graph.num_ranks else []
    if fault.op not in {str(op) for op in ops if op.kind not in TRANSFER_KINDS}:
        example = next((str(op) for op in graph.ops if op.kind in COMPUTE_KINDS), "0F0")
        raise PipeproofError(
            Finding(
                "PP106",
                Severity.ERROR,
                f"--inject: rank {fault.rank} of {graph.num_ranks} never runs {fault.op}"
                + (" (it only posts it; name the WAIT for it)" if fault.op in map(str, ops) else ""),
                help=f"name a rank and one of its operations, such as 0:{example}:die; `pipeproof show --rank "
                f"{min(fault.rank, graph.num_ranks - 1)}` lists them",
            )
        )


class StepCollector:
    """Compares steps in order, as soon as all their files are there, records them, and removes the files.

    What is no number ends it, with a ``NotFiniteError``, unless it may be (``needs_numbers``).
    """

    def __init__(
        self, job: Job, subject: Subject, record: RecordOptions | None = None, *, needs_numbers: bool = True
    ) -> None:
        self._job, self._subject = job, subject
        self._recorder = None if record is None else Recorder(record, subject.plan, job.digest)
        self._needs_numbers = needs_numbers
        self.results: list[StepResult] = []

    def collect(self, num_steps: int) -> list[StepResult]:
        """The results of the steps before ``num_steps`` that were not collected yet."""
        fresh = [self._compare(step) for step in range(self._job.kept.first_step + len(self.results), num_steps)]
        self.results += fresh
        return fresh

    def _compare(self, step: int) -> StepResult:
        plan = self._subject.plan
        uncut_file = self._job.step_file("uncut", step)
        has_ordered = needs_ordered(plan) and not is_by_bound(plan)
        ordered_file = self._job.step_file("ordered", step) if has_ordered else uncut_file
        rank_files = [self._job.step_file(f"rank{rank}", step) for rank in range(plan.mesh.num_ranks)]
        uncut, ordered = load_step(uncut_file), load_step(ordered_file)
        assert uncut[0] is not None
        assert ordered[0] is not None
        shares = [load_step(file) for file in rank_files]
        if self._needs_numbers:
            first_ops = [load_not_finite(file) for file in rank_files]
            require_finite(self._subject.graph, step, shares, first_ops, (uncut[0], uncut[1]))
        ranks = with_whole_gradients(plan, shares)
        result = compare_step(plan, step, ranks, (ordered[0], ordered[1]), (uncut[0], uncut[1]))
        of_routers = [load_routers(file) for file in rank_files]
        routers = compare_routers(plan, of_routers, load_routers(ordered_file), load_routers(uncut_file))
        result = replace(result, routers=routers)
        used = {uncut_file, ordered_file, *rank_files}
        if self._recorder is not None:
            files = [self._job.layers_file(f"rank{rank}", step) for rank in range(plan.mesh.num_ranks)]
            files.append(self._job.layers_file("reference", step))
            *of_ranks, of_reference = [load_arrays(file) for file in files] if self._job.layers else [{}] * len(files)
            self._recorder.put(
                step,
                result.loss,
                [RankStep(gradients, layers) for (_, gradients), layers in zip(ranks, of_ranks, strict=True)],
                ReferenceStep(ordered[0], ordered[1], of_reference),
                routers,
            )
            used.update(files if self._job.layers else ())
        for file in used:
            file.unlink()
        return result


def _log_findings(subject: Subject, rank: int, entries: Sequence[LogEntry], job: Job) -> tuple[Finding, ...]:
    """Where a rank's log is not the graph's; and if it is, where rows went otherwise than announced."""
    run = subject.plan.spec.run
    found = tuple(
        compare_log(
            subject.graph,
            rank,
            entries,
            num_steps=num_logged_steps(run, layers=job.layers, first_step=job.kept.first_step),
            first_step=job.kept.first_step,
            dtype=run.dtype,
            weight_dtype=run.weight_dtype,
        )
    )
    return found or tuple(compare_exchanges(subject.graph, rank, entries))


def finish_report(report: Report, job: Job, steps: list[StepResult], threads: int) -> RunReport:
    """Read the op logs of all ranks, hold them against the graph, and put the report together.

    ``threads`` is the largest count of compute threads that a worker measured.
    """
    subject, spec = report.subject, report.subject.plan.spec
    logs = {
        rank: [LogEntry.from_json(entry) for entry in json.loads(job.log_file(rank).read_text())]
        for rank in range(subject.graph.num_ranks)
    }
    findings = tuple(
        finding for rank, entries in logs.items() for finding in _log_findings(subject, rank, entries, job)
    )
    profile = None
    if job.profile and not findings:
        bare = {rank: read_bare(job.bare_file(rank)) for rank in logs}
        timings = {rank: Timing.load(job.timing_file(rank)) for rank in logs}
        profile = measured_profile(subject, report.digest, logs, bare, threads, timings)
    return RunReport(
        subject=subject,
        digest=report.digest,
        verified=report.certificate is not None,
        steps=tuple(steps),
        log_findings=findings,
        timeline=measured_timeline(subject, logs),
        parallel_bound=parallel_bound(spec) if needs_ordered(subject.plan) else 0.0,
        is_by_bound=is_by_bound(subject.plan),
        num_logged_steps=num_logged_steps(spec.run, layers=job.layers, first_step=job.kept.first_step),
        reference_from_state=job.kept.reference_from_state,
        threads=threads,
        accumulation=accumulation_of(subject.plan),
        profile=profile,
        clock=clock_of(spec.run, is_timed=job.profile),
    )
