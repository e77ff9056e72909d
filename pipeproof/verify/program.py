"""Programs in text form as subjects: what a rank does line by line, judged without a plan."""

from __future__ import annotations

from pathlib import Path

from pipeproof.comm.capabilities import BackendTable
from pipeproof.schedule.formats.foreign_checks import RawSchedule, check_splits
from pipeproof.schedule.formats.placed import Findings
from pipeproof.schedule.formats.text_form import parse_program
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.schedule_file import NO_OPERATIONS, ScheduleFileError, read_schedule_text
from pipeproof.verify.facts import NO_FACTS, Facts
from pipeproof.verify.subject import Subject, graph_subject


def load_program(path: Path, *, backend: BackendTable | None = None) -> Subject:
    """The programs of a file, to be judged alone by every rule that needs no plan.

    Raises:
        ScheduleFileError: PP130 to PP133, PP136, PP138, the file cannot be read or is no program.
    """
    return program_subject(read_schedule_text(path), file=str(path), backend=backend)


def program_subject(
    text: str, *, file: str = "<program>", backend: BackendTable | None = None, facts: Facts = NO_FACTS
) -> Subject:
    """The programs of a text; ``file`` is the name for places, ``facts`` what is known beside them.

    Raises:
        ScheduleFileError: PP131 to PP133, PP136, PP138, the text is no program.
    """
    program = parse_program(text, file)
    findings = Findings()
    check_splits(RawSchedule(program.rows_by_rank, program.origins, program.ends, None), None, findings)
    findings.raise_any()
    if not any(program.rows_by_rank):
        message = "no rank of this program does anything: nothing could be wrong with it"
        raise ScheduleFileError(Finding(NO_OPERATIONS.code, Severity.ERROR, message, Location(file, 1, 1)))
    return graph_subject(program.graph(), backend=backend, origins=program.origins, facts=facts)
