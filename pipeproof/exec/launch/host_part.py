"""Part of a run that one host makes, and the report of all hosts, which is made from their parts.

The leader of each host compares its host's ranks (``StepCollector.collect_parts``) and makes a ``HostPart`` of that.
One process merges the parts of all hosts and gives the verdict. Times need the op logs, which are large and remain with
their hosts: the report has a timeline of the ranks whose logs are given.

The JSON of a part has the size of its steps (see ``step_part``), which is known before the run.
``pipeproof job merge`` reads the directories that the hosts kept: each has ``job.json``, ``part.json``, and the op logs
and times of the host's ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from pipeproof.comm.accumulation_order import accumulation_of
from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.exec.compare.compare_gradients import StepResult, merged_step, require_finite_step
from pipeproof.exec.compare.compare_log import compare_exchanges, compare_log, compare_times
from pipeproof.exec.compare.step_part import StepPart
from pipeproof.exec.launch.run_report import RunReport, clock_of, measured_timeline
from pipeproof.exec.measure.clock_correction import ClockCorrection, corrected, corrected_ends, largest_error_ns
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.idle_messages import IdleMessageEnd
from pipeproof.exec.rank.job_files import Job, LogFile, load_json, save_json
from pipeproof.exec.rank.op_log import LogEntry, Timing
from pipeproof.exec.rank.reference_kind import is_checked_by_bound, needs_ordered_reference
from pipeproof.exec.rank.step_replay import num_logged_steps
from pipeproof.exec.store.run_codes import PARTS_DO_NOT_FIT, REFERENCES_DIFFER
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.verify.certificate import Certificate
from pipeproof.verify.check_plan import Report, check
from pipeproof.verify.subject import Subject

PART_FILE = "part.json"


@dataclass(frozen=True, slots=True)
class HostPart:
    """Comparison of the ranks of one host; all hosts of a run have the same ``run`` token and certificate.

    No two hosts of a run have the same name ``host``.
    ``threads`` is the largest number of compute threads of a worker. ``clock`` corrects the host's monotonic clock to
    that of rank 0's host.
    """

    run: str
    host: str
    ranks: tuple[int, ...]
    certificate: Certificate
    steps: tuple[StepPart, ...]
    log_findings: Mapping[int, tuple[Finding, ...]]
    threads: int
    clock: ClockCorrection = field(default_factory=ClockCorrection)

    def save(self, directory: Path) -> None:
        """Write ``part.json`` into the directory of the host's job."""
        save_json(directory / PART_FILE, self, HostPart)

    @classmethod
    def load(cls, directory: Path) -> HostPart:
        """Read what ``save`` wrote."""
        return load_json(directory / PART_FILE, HostPart)


@dataclass(frozen=True, slots=True)
class RankRecords:
    """Op logs by rank; for a profile also the ends of the idle messages and the clocks."""

    logs: Mapping[int, Sequence[LogEntry]] = field(default_factory=dict)
    idle_messages: Mapping[int, Sequence[IdleMessageEnd]] = field(default_factory=dict)
    timings: Mapping[int, Timing] = field(default_factory=dict)
    without_graphs: Mapping[int, str] = field(default_factory=dict)
    """Stages that do not run as graphs, as ``run.compiler`` asks, each with the reason."""

    def corrected(self, parts: Sequence[HostPart]) -> RankRecords:
        """Return the records by the clock of rank 0's host; ``parts`` are those of all hosts in order."""
        host_of = {rank: index for index, part in enumerate(parts) for rank in part.ranks}
        clocks = {rank: parts[index].clock for rank, index in host_of.items()}
        return RankRecords(
            {rank: corrected(entries, clocks[rank]) for rank, entries in self.logs.items()},
            {rank: corrected_ends(ends, clocks[rank]) for rank, ends in self.idle_messages.items()},
            {
                rank: replace(
                    self.timings.get(rank, Timing()),
                    host=host_of[rank],
                    offset_error_ns=largest_error_ns([*entries, *self.idle_messages.get(rank, ())], clocks[rank]),
                )
                for rank, entries in self.logs.items()
            },
            self.without_graphs,
        )


def joined_records(records: Iterable[RankRecords]) -> RankRecords:
    """Join the records of different ranks."""
    joined = RankRecords()
    for of_host in records:
        joined = RankRecords(
            {**joined.logs, **of_host.logs},
            {**joined.idle_messages, **of_host.idle_messages},
            {**joined.timings, **of_host.timings},
            {**joined.without_graphs, **of_host.without_graphs},
        )
    return joined


def read_records(job: Job, ranks: Iterable[int]) -> RankRecords:
    """Read the records of those ranks whose op logs are in a job's directory."""
    present = [rank for rank in ranks if job.rank_file(rank, "log").exists()]
    profiled = present if job.options.profile else []
    captured = [file for file in (job.rank_file(rank, "graphs") for rank in present) if file.exists()]
    return RankRecords(
        {rank: [*LogFile(job.rank_file(rank, "log"))] for rank in present},
        {rank: load_json(job.rank_file(rank, "bare"), list[IdleMessageEnd]) for rank in profiled},
        {rank: load_json(job.rank_file(rank, "timing"), Timing) for rank in profiled},
        {stage: reason for file in captured for stage, reason in load_json(file, dict[int, str]).items()},
    )


def host_part(
    report: Report,
    job: Job,
    steps: Sequence[StepPart],
    ranks: Sequence[int],
    threads: int,
    *,
    run: str,
    host: str,
    clock: ClockCorrection | None = None,
) -> HostPart:
    """Compare the op logs of a host's ranks with the graph, and make the host's part of the run.

    ``steps`` are the parts that a ``StepCollector`` of these ranks has collected. ``run`` is a text that all hosts of
    this run, and no other run, have; ``host`` is the name of this host, and ``clock`` the correction of its clock.
    """
    findings = log_findings(report.subject, job, ranks)
    clock = clock or ClockCorrection()
    return HostPart(run, host, tuple(ranks), job.certificate, tuple(steps), findings, threads, clock)


def log_findings(subject: Subject, job: Job, ranks: Iterable[int]) -> dict[int, tuple[Finding, ...]]:
    """Find the ranks whose logs differ from the graph; if none do, whose exchanged rows differ from their counts.

    Ranks whose logs are not in the job's directory are left out.
    """
    run = subject.plan.spec.run
    found = {}
    for rank in ranks:
        entries = LogFile(job.rank_file(rank, "log"))
        if not entries.path.exists():
            continue
        findings = tuple(
            compare_log(
                subject.graph,
                rank,
                entries,
                num_steps=num_logged_steps(run, layers=job.layers, first_step=job.checkpoint.first_step),
                first_step=job.checkpoint.first_step,
                dtype=run.dtype,
                weight_dtype=run.weight_dtype,
            )
        )
        if findings := findings or tuple(compare_exchanges(subject.graph, rank, entries)):
            found[rank] = findings
    return found


def merged_report(report: Report, job: Job, parts: Sequence[HostPart], records: RankRecords | None = None) -> RunReport:
    """Merge the parts of all hosts into the report of the run; the report's subject must be unfolded.

    ``records`` are those of some ranks, by the clocks of their hosts: the timeline has these ranks only, and the report
    names the others. A profile needs the records of all ranks.

    Raises:
        NotFiniteError: a loss or a gradient of a step is not finite, and the plan passes check.
        ValueError: a rank is in no part or in several, or the parts have other steps.
    """
    steps = merged_steps(report, parts)
    findings = {rank: found for part in parts for rank, found in part.log_findings.items()}
    by_one_clock = (records or RankRecords()).corrected(parts)
    has_all = by_one_clock.logs.keys() >= {*range(report.subject.graph.num_ranks)}
    times = compare_times(report.subject.graph, by_one_clock.logs, by_one_clock.timings) if has_all else ()
    result = build_report(report, job, steps, findings, by_one_clock, max(part.threads for part in parts))
    errors = sorted((_error_ns(part) for part in parts), reverse=True)
    return replace(
        result,
        hosts={part.host: part.ranks for part in parts} if len(parts) > 1 else {},
        host_findings=(*reference_findings(report.subject, parts), *times),
        clock_error_ns=sum(errors[:2]),  # errors of two hosts may have different signs, so they add
    )


def _error_ns(part: HostPart) -> int:
    """Largest error of a host's clock at its measurements and between them."""
    knots = part.clock.knots
    between = [(a.own_ns + b.own_ns) // 2 for a, b in pairwise(knots)]
    return max((part.clock.at(own_ns).error_ns for own_ns in (*(knot.own_ns for knot in knots), *between)), default=0)


def merged_steps(report: Report, parts: Sequence[HostPart]) -> list[StepResult]:
    """Merge the steps of all hosts.

    Raises:
        NotFiniteError: a loss or a gradient of a step is not finite, and the plan passes check.
        ValueError: a rank is in no part or in several, or the parts have other steps.
    """
    results = []
    for of_step in zip(*(part.steps for part in parts), strict=True):
        if report.certificate is not None:
            require_finite_step(report.subject, of_step)
        results.append(merged_step(report.subject.plan, of_step))
    return results


def reference_findings(subject: Subject, parts: Sequence[HostPart]) -> tuple[Finding, ...]:
    """Find hosts whose references have other bits than that of the first host, in the first step with such hosts.

    Where a bound decides, rounding is expected, and the finding is a warning.
    """
    for of_step in zip(*(part.steps for part in parts), strict=True):
        by_digest: dict[str, list[str]] = {}
        for part, step in zip(parts, of_step, strict=True):
            if step.reference is not None:
                by_digest.setdefault(step.reference.digest, []).append(part.host)
        if len(by_digest) > 1:
            groups = " and ".join(", ".join(hosts) for hosts in by_digest.values())
            return (
                Finding(
                    REFERENCES_DIFFER.code,
                    Severity.WARNING if is_checked_by_bound(subject.plan) else Severity.ERROR,
                    f"step {of_step[0].step}: the references of hosts {groups} differ: their processors or libraries "
                    "round differently; bits cannot be compared across them",
                    help="run on hosts with the same processors, framework and libraries",
                ),
            )
    return ()


def build_report(
    report: Report,
    job: Job,
    steps: Sequence[StepResult],
    findings: Mapping[int, tuple[Finding, ...]],
    records: RankRecords,
    threads: int,
) -> RunReport:
    """Build the report of all ranks; ``findings`` are those of their logs."""
    subject, spec = report.subject, report.subject.plan.spec
    ranks = range(subject.graph.num_ranks)
    has_all = records.logs.keys() >= {*ranks}
    profile = None
    if job.options.profile and has_all and not findings:
        profile = measured_profile(
            subject, report.digest, records.logs, records.idle_messages, threads, records.timings
        )
    return RunReport(
        subject=subject,
        digest=report.digest,
        verified=report.certificate is not None,
        steps=steps,
        log_findings=tuple(finding for _, found in sorted(findings.items()) for finding in found),
        timeline=measured_timeline(subject, records.logs),
        parallel_bound=parallel_bound(spec) if needs_ordered_reference(subject.plan) else 0.0,
        is_checked_by_bound=is_checked_by_bound(subject.plan),
        num_logged_steps=num_logged_steps(spec.run, layers=job.layers, first_step=job.checkpoint.first_step),
        reference_from_state=job.checkpoint.reference_from_state,
        threads=threads,
        accumulation=accumulation_of(subject.plan),
        profile=profile,
        clock=clock_of(spec.run, is_timed=job.options.profile),
        without_graphs=dict(sorted(records.without_graphs.items())),
        ranks_without_log=tuple(rank for rank in ranks if rank not in records.logs),
    )


@dataclass(frozen=True, slots=True)
class HostDirectory:
    """Directory that a host kept: its job, with the directory where it is now, and its part."""

    job: Job
    part: HostPart


def read_directories(paths: Sequence[Path]) -> tuple[Report, list[HostDirectory]]:
    """Read the directories of all hosts of a run, and check its plan again.

    The report's subject is unfolded. The directories are in the order of their lowest ranks.

    Raises:
        BadPlanError: PP939, a directory is not of a host of a run, or not of the same run as the first; ranks are
            missing or in several directories; this pipeproof gives the plan another certificate.
    """
    hosts = [_read(path) for path in paths]
    _refuse(_foreign(hosts))
    report = check(hosts[0].job.loaded_plan())
    if report.conclusion != hosts[0].part.certificate:
        _refuse(["this pipeproof gives the plan another certificate than the run had: merge with the run's version"])
    _refuse(_wrong_ranks(hosts, report.subject.plan.mesh.num_ranks))
    hosts.sort(key=lambda host: min(host.part.ranks))
    return replace(report, subject=report.subject.unfolded()), hosts


def merge_directories(report: Report, hosts: Sequence[HostDirectory]) -> RunReport:
    """Merge what ``read_directories`` returned.

    Raises:
        NotFiniteError: a loss or a gradient of a step is not finite, and the plan passes check.
    """
    records = joined_records(read_records(host.job, host.part.ranks) for host in hosts)
    return merged_report(report, hosts[0].job, [host.part for host in hosts], records)


def _read(path: Path) -> HostDirectory:
    try:
        return HostDirectory(replace(Job.load(path), directory=path), HostPart.load(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"it has no {Path(error.filename).name}"
    except ValidationError as error:
        reason = f"its job.json or {PART_FILE} cannot be read: {error.errors()[0]['msg']}"
    raise _error(f"{path} is not a directory that a host of a run kept: {reason}")


def _foreign(hosts: Sequence[HostDirectory]) -> Iterator[str]:
    """Yield how a directory is of another run than the first one."""
    first = hosts[0]
    for host in hosts:
        path, part = host.job.directory, host.part
        facts = (
            ("run", part.run, first.part.run),
            ("plan", part.certificate.graph_digest[:12], first.part.certificate.graph_digest[:12]),
            ("certificate", part.certificate, first.part.certificate),
            ("certificate", host.job.certificate, part.certificate),
            ("number of steps", len(part.steps), len(first.part.steps)),
        )
        for name, own, expected in facts:
            if own != expected:
                shown = f": {own}, and {expected} in {first.job.directory}" if name != "certificate" else ""
                yield f"{path} is of another run, by its {name}{shown}"
                break


def _wrong_ranks(hosts: Sequence[HostDirectory], num_ranks: int) -> Iterator[str]:
    """Yield the ranks that are in no directory, in several, or not of the plan."""
    for index, host in enumerate(hosts):
        for other in hosts[:index]:
            if double := {*host.part.ranks} & {*other.part.ranks}:
                yield f"{_ranks(double)} in {other.job.directory} and in {host.job.directory}"
        if beyond := {*host.part.ranks} - {*range(num_ranks)}:
            yield f"{_ranks(beyond)} in {host.job.directory}, and the plan has {num_ranks} ranks"
    if missing := {*range(num_ranks)} - {rank for host in hosts for rank in host.part.ranks}:
        yield f"{_ranks(missing)} in no directory; name those of all hosts"


def _ranks(ranks: set[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed} are"


def _refuse(facts: Sequence[str] | Iterator[str]) -> None:
    if found := list(facts):
        raise _error(*found)


def _error(*facts: str) -> BadPlanError:
    return BadPlanError(*(PARTS_DO_NOT_FIT.finding(fact) for fact in facts))
