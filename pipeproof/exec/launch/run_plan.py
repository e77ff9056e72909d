"""Run of a verified plan: launch, compare each finished step with the reference, report."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import tempfile
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from pipeproof.comm.accumulation_order import accumulation_of
from pipeproof.diagnostics.finding import Finding, PipeproofError, Severity
from pipeproof.diagnostics.install_command import install_extra
from pipeproof.exec.compare.compare_gradients import (
    StepResult,
    compare_step,
    gather_sharded_gradients,
    is_checked_by_bound,
    needs_ordered_reference,
)
from pipeproof.exec.compare.compare_log import compare_exchanges, compare_log
from pipeproof.exec.compare.run_record import RankStep, Recorder, ReferenceStep
from pipeproof.exec.compare.step_losses import NotFiniteError, require_finite
from pipeproof.exec.launch.run_report import RunReport, clock_of, measured_timeline
from pipeproof.exec.launch.supervisor import Launcher, WorkerFailedError, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.measure.installed_backends import INSTALLED_BY
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.checkpointing import only_writer, prepare_checkpoint, remove_unfinished
from pipeproof.exec.rank.executor_support import require_executable, require_issuable
from pipeproof.exec.rank.gpu_assignment import missing_gpus
from pipeproof.exec.rank.idle_messages import EdgeTimes
from pipeproof.exec.rank.job_files import (
    Fault,
    Job,
    LogFile,
    RecordOptions,
    RunOptions,
    StepOutcome,
    dump_plan,
    load_arrays,
    load_json,
)
from pipeproof.exec.rank.op_log import LogEntry, Timing
from pipeproof.exec.rank.step_replay import num_logged_steps
from pipeproof.exec.store.run_codes import BACKEND_MISSING, NOT_EXECUTED
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.ops import COMPUTE_KINDS, TRANSFER_KINDS
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.system_calls import CAN_START_RANKS
from pipeproof.verify.check_plan import Report
from pipeproof.verify.subject import Subject


class NotVerifiedError(PipeproofError):
    """The plan has errors, or some rules did not check it; it was not run."""


class BackendMissingError(PipeproofError):
    """The plan's backend is not installed, or its device is missing."""


def status_of(error: PipeproofError) -> ExitStatus:
    """Exit status of a command that an error ends."""
    if isinstance(error, WorkerFailedError):
        return ExitStatus.WORKER_FAILED
    if isinstance(error, NotVerifiedError | NotFiniteError):
        return ExitStatus.FAILED
    return ExitStatus.BAD_INPUT


def run(
    report: Report,
    options: RunOptions,
    on_progress: Callable[[str, int, int], None],
    on_step: Callable[[StepResult], None],
    on_start: Callable[[], None] = lambda: None,
    on_note: Callable[[Finding], None] = lambda _: None,
) -> RunReport:
    """Run the plan of a check report on real processes and compare every step with the reference.

    ``on_progress`` is called with the phase of set-up and the numbers of steps that all ranks and the reference have
    finished; ``on_start`` when nothing refuses the plan, before any process starts; ``on_note`` with a note on the
    state to resume from.

    Raises:
        NotVerifiedError: the report has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed.
        PipeproofError: the injected failure of the options would never occur.
        WorkerFailedError: a worker died, raised or hung.
        NotFiniteError: a loss or a gradient of a step is not finite.
        StateError: the state to resume from does not fit the plan, or is incomplete; another run saves there.
    """
    require_runnable(report, options)
    on_start()
    with job_directory(options.logs) as directory:
        job = prepare_job(report, options, directory, on_note)
        collector = StepCollector(job, report.subject, options.record, requires_finite=report.certificate is not None)
        state = JobState(report.subject)
        launcher = Launcher(job, state, options.timeout_s)

        def progressed() -> None:
            done = min(rank.steps_done for rank in state.ranks)
            on_progress(state.phase, done, launcher.reference_steps)
            for result in collector.collect(min(done, launcher.reference_steps)):
                on_step(result)

        with only_writer(job.checkpoint):
            try:
                launcher.run(progressed)
            finally:
                remove_unfinished(job.checkpoint, job.name)
        progressed()
        return finish_report(report, job, collector.results, state.threads)


def prepare_job(
    report: Report, options: RunOptions, directory: Path, on_note: Callable[[Finding], None] = lambda _: None
) -> Job:
    """Write the job of a run into its directory, with the state to resume from.

    Raises:
        StateError: the state to resume from does not fit the plan, or is incomplete.
    """
    checkpoint = prepare_checkpoint(options.checkpoint, report.subject, report.digest, on_note)
    plan = dump_plan(report.subject.loaded)
    job = Job(directory, plan, report.conclusion, replace(options, checkpoint=checkpoint))
    job.save()
    return job


def require_runnable(report: Report, options: RunOptions) -> None:
    """Refuse a plan that must not or cannot be run or rehearsed, before any process starts.

    Raises:
        NotVerifiedError: the report has errors and ``options.unsafe`` is not set.
        BackendMissingError: the plan's backend is not installed.
        PipeproofError: the executor does not support a feature of the plan, or the injected failure would never occur.
    """
    if report.certificate is None and not options.unsafe:
        raise NotVerifiedError(*report.errors)
    (require_issuable if options.rehearses else require_executable)(report.subject)
    _require_environment(report.subject, share_gpus=options.share_gpus)
    _require_fault_op(report.subject, options.fault)
    _require_times(report.subject, options)


def _require_environment(subject: Subject, *, share_gpus: bool) -> None:
    """Refuse a plan if Linux, its framework or its devices are missing; with ``share_gpus`` one GPU is enough."""
    if not CAN_START_RANKS:
        raise BackendMissingError(
            BACKEND_MISSING.finding(
                f"plans run on Linux, and this system is {sys.platform}",
                help="run it on Linux; `check`, `simulate` and other commands that start no ranks work here",
            )
        )
    backend = subject.plan.spec.run.backend
    by = INSTALLED_BY[backend]
    if importlib.util.find_spec(backend) is None:
        raise BackendMissingError(
            BACKEND_MISSING.finding(
                f"the plan runs on {by.name}, which is not installed in this Python",
                help=f"{install_extra(by.extra)}  (or {by.requirement})",
            )
        )
    if missing := missing_gpus(subject, share_gpus=share_gpus):
        raise BackendMissingError(missing)


def _require_times(subject: Subject, options: RunOptions) -> None:
    """Refuse to profile a CUDA graph replay, which has no single operations, and Paddle on GPUs, which has no clock."""
    run = subject.plan.spec.run
    if options.profile and (run.backend, run.device) == ("paddle", "gpu"):
        raise PipeproofError(
            NOT_EXECUTED.finding(
                "--profile needs the GPU's clock, which only the PyTorch backend reads",
                location=subject.locate("run", "device"),
                help="run without --profile, or with `backend: torch`",
            )
        )
    if options.profile and subject.plan.spec.run.replay:
        raise PipeproofError(
            NOT_EXECUTED.finding(
                "--profile times single operations, and run.replay executes whole steps",
                location=subject.locate("run", "replay"),
                help="measure with `replay: false`: the operations are the same",
            )
        )


def _require_fault_op(subject: Subject, fault: Fault | None) -> None:
    """Refuse an injected failure that would never occur: at a transfer the host only posts and continues."""
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
                + (" (the rank only posts it; name its WAIT)" if fault.op in map(str, ops) else ""),
                help=f"name a rank and one of its operations, such as 0:{example}:die; `pipeproof show --rank "
                f"{min(fault.rank, graph.num_ranks - 1)}` lists them",
            )
        )


class StepCollector:
    """Comparison of steps in order, as soon as all files of a step exist; it records them and removes the files.

    ``results``, on disk, has the results of ``collect``. With ``requires_finite`` a loss or gradient that is not finite
    raises ``NotFiniteError``.
    """

    def __init__(
        self, job: Job, subject: Subject, record: RecordOptions | None = None, *, requires_finite: bool = True
    ) -> None:
        self._job, self._subject = job, subject
        self._ranks = range(subject.plan.mesh.num_ranks)
        self._recorder = None if record is None else Recorder(record, subject.plan, job.digest)
        self._requires_finite = requires_finite
        self.results = ResultsOnDisk(job.directory)

    def collect(self, num_steps: int) -> list[StepResult]:
        """Return the results of the steps before ``num_steps`` that were not yet collected."""
        collected = []
        for step in range(self._job.checkpoint.first_step + len(self.results), num_steps):
            result = self._compare(step)
            self.results.append(result)
            collected.append(result)
        return collected

    def _compare(self, step: int) -> StepResult:
        plan, job = self._subject.plan, self._job
        rank_files = [job.step_file(f"rank{rank}", step) for rank in self._ranks]
        own = [StepOutcome.load(file) for file in rank_files]
        unpartitioned_file = job.step_file("unpartitioned", step)
        has_ordered = needs_ordered_reference(plan) and not is_checked_by_bound(plan)
        ordered_file = job.step_file("ordered", step) if has_ordered else unpartitioned_file
        models = {file: StepOutcome.load(file) for file in {unpartitioned_file, ordered_file}}
        if self._requires_finite:
            require_finite(self._subject.graph, step, own, models[unpartitioned_file])
        result = compare_step(plan, step, own, models[ordered_file], models[unpartitioned_file])
        for file in {*rank_files, *models, *self._record(result, own, models[ordered_file])}:
            file.unlink()
        return result

    def _record(self, result: StepResult, own: Sequence[StepOutcome], reference: StepOutcome) -> set[Path]:
        """Record a step of all ranks, if a record is requested; return the files that only the record needs."""
        if self._recorder is None:
            return set()
        assert reference.loss is not None
        files = [
            self._job.layers_file(who, result.step) for who in (*(f"rank{rank}" for rank in self._ranks), "reference")
        ]
        *rank_layers, whole_layers = [load_arrays(file) for file in files] if self._job.layers else [{}] * len(files)
        gradients = gather_sharded_gradients(self._subject.plan, [outcome.gradients for outcome in own])
        self._recorder.put(
            result.step,
            result.loss,
            [RankStep(*values) for values in zip(gradients, rank_layers, strict=True)],
            ReferenceStep(reference.loss, reference.gradients, whole_layers),
            result.routers,
        )
        return set(files) if self._job.layers else set()


def finish_report(report: Report, job: Job, steps: Sequence[StepResult], threads: int) -> RunReport:
    """Compare the op logs of all ranks with the graph, and build the report.

    ``threads`` is the largest number of compute threads that a worker measured.
    """
    subject, spec = report.subject, report.subject.plan.spec
    findings = _log_findings(subject, job)
    ranks, options = range(subject.graph.num_ranks), job.options
    logs: dict[int, Sequence[LogEntry]] = {
        rank: [*LogFile(job.rank_file(rank, "log"))] if options.timeline else () for rank in ranks
    }
    profile = None
    if options.timeline and options.profile and not findings:
        of_ranks = [load_json(job.rank_file(rank, "bare"), EdgeTimes) for rank in ranks]
        idle_messages = {channel: times for own in of_ranks for channel, times in own.items()}
        timings = {rank: load_json(job.rank_file(rank, "timing"), Timing) for rank in ranks}
        profile = measured_profile(subject, report.digest, logs, idle_messages, threads, timings)
    return RunReport(
        subject=subject,
        digest=report.digest,
        verified=report.certificate is not None,
        steps=steps,
        log_findings=findings,
        timeline=measured_timeline(subject, logs),
        parallel_bound=parallel_bound(spec) if needs_ordered_reference(subject.plan) else 0.0,
        is_checked_by_bound=is_checked_by_bound(subject.plan),
        num_logged_steps=num_logged_steps(spec.run, layers=job.layers, first_step=job.checkpoint.first_step),
        reference_from_state=job.checkpoint.reference_from_state,
        threads=threads,
        accumulation=accumulation_of(subject.plan),
        profile=profile,
        clock=clock_of(spec.run, is_timed=options.profile),
    )


def _log_findings(subject: Subject, job: Job) -> tuple[Finding, ...]:
    """Differences of the logs from the graph; for ranks without any, exchanged rows that differ from their counts."""
    run, first_step = subject.plan.spec.run, job.checkpoint.first_step
    num_steps = num_logged_steps(run, layers=job.layers, first_step=first_step)
    findings: list[Finding] = []
    for rank in range(subject.graph.num_ranks):
        entries = LogFile(job.rank_file(rank, "log"))
        differences = tuple(
            compare_log(
                subject.graph, rank, entries, num_steps=num_steps, first_step=first_step, dtype=run.dtype,
                weight_dtype=run.weight_dtype,
            )
        )  # fmt: skip
        findings += differences or compare_exchanges(subject.graph, rank, entries)
    return tuple(findings)


class ResultsOnDisk(Sequence[StepResult]):
    """Results in the order in which they were appended; each access reads the result again.

    The file has no name: no other process can write into it, and it ends with this object. It is in ``directory``,
    which may be removed before the results are read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115 - it ends with this object
        self._ends = array("q", [0])
        weakref.finalize(self, self._file.close)

    def append(self, result: StepResult) -> None:
        """Add a result.

        Raises:
            OSError: the disk of the directory is full.
        """
        try:
            self._file.seek(self._ends[-1])
            content = memoryview(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
            while content:  # a disk that is nearly full takes a part
                content = content[self._file.write(content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._directory)) from error  # the file has no name
        self._ends.append(self._file.tell())

    def __len__(self) -> int:
        """Return the number of results."""
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> StepResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepResult]: ...

    def __getitem__(self, index: int | slice) -> StepResult | list[StepResult]:
        """Read a result, or a list of some."""
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        position = range(len(self))[index]
        self._file.seek(self._ends[position])
        content = self._file.read(self._ends[position + 1] - self._ends[position])
        result = pickle.loads(content)  # noqa: S301 - only this object can write into the file
        assert isinstance(result, StepResult)
        return result
