"""``pipeproof job merge``: the report of a run from the directories that its hosts kept.

A directory has ``job.json``, ``part.json`` (see ``exec.host_part``) and the op logs and times of the host's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.exec.host_part import PART_FILE, HostPart, joined_records, merged_report, read_records
from pipeproof.exec.launch.job_files import Job
from pipeproof.exec.run_codes import PARTS_DO_NOT_FIT
from pipeproof.exec.run_report import RunReport
from pipeproof.verify.check_plan import Report, check


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
