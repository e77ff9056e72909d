"""Schedules in files: read from a file, or as programs in the plan, and written.

A schedule in any format becomes rows of each pipeline rank with their source locations. A schedule of computations only
is lowered like a generated one; a schedule with communication is used unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import LINE_BREAK
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.csv_file import csv_text, looks_like_csv, read_csv
from pipeproof.schedule.formats.fleet_text import fleet_text, looks_like_fleet, read_fleet
from pipeproof.schedule.formats.inexpressible import INEXPRESSIBLE, InexpressibleError, computations_of
from pipeproof.schedule.formats.op_text import OpReader
from pipeproof.schedule.formats.schedule_size_checks import Expected, RawSchedule, check_fit
from pipeproof.schedule.formats.text_form import format_rows, looks_like_program, read_program
from pipeproof.schedule.formats.text_tokens import ROW_KEYS, Findings, Placed, attribute_text, with_peers
from pipeproof.schedule.formats.torch_runtime import runtime_rows
from pipeproof.schedule.op_table import Group, TensorSpec
from pipeproof.schedule.ops import COMPUTE_KINDS, META_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.programs import Programs, Schedule, stages_of
from pipeproof.specs.schedule import BAD_LINE, BAD_OPERATION, WRONG_FORMAT, ScheduleFileError, read_schedule_text


class ScheduleFormat(StrEnum):
    """The forms of a schedule file; ``AUTO`` looks at the content."""

    AUTO = "auto"
    TEXT = "text"
    CSV = "csv"
    CSV_COMMS = "csv-comms"
    FLEET = "fleet"


@dataclass(frozen=True)
class ForeignSchedule:
    """A schedule with the source locations of its rows.

    ``rows`` are by pipeline rank; a row's ``origin`` is an index into ``origins``, and overlapped computations share a
    ``batch``. If ``computes_only`` is true, all rows are computations, and lowering adds the rest; otherwise the rows
    are everything that the ranks do, with peers and waits. ``tensors`` and ``groups`` are declared in the program text.
    ``ends`` has for each rank the location behind its last operation; None for programs that were made in Python.
    """

    rows: tuple[tuple[Row, ...], ...]
    computes_only: bool
    origins: tuple[Location, ...]
    ends: tuple[Location | None, ...]
    tensors: tuple[TensorSpec, ...] = ()
    groups: tuple[Group, ...] = ()

    @cached_property
    def schedule(self) -> Schedule:
        """The computations of each pipeline rank, in order, and the overlapped pairs."""
        computations = [[row for row in rows if row.op.kind in COMPUTE_KINDS] for rows in self.rows]
        pairs = tuple(
            frozenset(
                position
                for position, (row, after) in enumerate(pairwise(rows))
                if row.batch != NONE and row.batch == after.batch
            )
            for rows in computations
        )
        programs = tuple(tuple(row.op for row in rows) for rows in computations)
        return Schedule(programs, pairs if any(pairs) else ())

    @property
    def programs(self) -> Programs:
        """The computations of each pipeline rank, in order."""
        return self.schedule.programs

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each pipeline rank computes, in order of their numbers."""
        return stages_of(self.programs)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step: one more than the largest micro-batch number."""
        return 1 + max((op.micro_batch or 0 for program in self.programs for op in program), default=-1)

    def missing_place(self, rank: int) -> Location | None:
        """Location for an operation that a pipeline rank lacks: the end of its program."""
        return self.ends[rank]


def load_schedule_file(path: Path, expected: Expected, *, format: str = ScheduleFormat.AUTO) -> ForeignSchedule:
    """Read a schedule file and check it against its plan; ``format`` is a ``ScheduleFormat``.

    Raises:
        ScheduleFileError: everything found wrong, PP130 to PP139.
    """
    return read_schedule(read_schedule_text(path), str(path), expected, format=format)


def read_schedule(text: str, file: str, expected: Expected, *, format: str = ScheduleFormat.AUTO) -> ForeignSchedule:
    """Read the text of a schedule file; ``file`` is its name in findings.

    Raises:
        ScheduleFileError: everything found wrong, PP131 to PP139.
    """
    findings = Findings()
    form = ScheduleFormat(format)
    if form is ScheduleFormat.TEXT or (form is ScheduleFormat.AUTO and looks_like_program(text)):
        return _from_text(text, file, expected, findings)
    if form is ScheduleFormat.FLEET or (form is ScheduleFormat.AUTO and looks_like_fleet(text)):
        steps = read_fleet(text, file, findings)
        findings.raise_any()
        return _as_given(steps, expected, findings)
    if form is ScheduleFormat.AUTO and text.strip() and not looks_like_csv(text):
        _refuse_unknown(text, file, findings)
    cells, idle = read_csv(text, file, findings)
    findings.raise_any()
    return _from_csv(cells, idle, form, expected, findings)


def require_attributes_kept(schedule: ForeignSchedule) -> None:
    """Refuse attributes of rows that lowering would replace by its own: no attribute is ignored.

    Raises:
        ScheduleFileError: PP133, at their rows.
    """
    findings = Findings()
    for row in (row for rows in schedule.rows for row in rows):
        attributes = {key for key in ROW_KEYS if attribute_text(row, key) is not None}
        if schedule.computes_only:
            lost, why = attributes - {"batch"}, "a plan adds the communication to a schedule of computations alone"
        elif row.op.kind in TRANSFER_KINDS - META_KINDS and row.tensor == NONE:
            lost, why = attributes & {"range", "shift"}, "without `tensor` they follow from the plan"
        elif row.op.kind is OpKind.REDUCE_GRAD and row.op.axis is None:
            lost, why = attributes, "without an axis the sums follow from the plan"
        else:
            continue
        location = row.place(schedule.origins)
        for key in sorted(lost):
            findings.add(BAD_LINE, location, f"`{key}` of {row.op} would be ignored: {why}", f"remove `{key}`")
    findings.raise_any()


def custom_schedule(
    programs: Sequence[Sequence[str]],
    expected: Expected,
    *,
    places: Sequence[Sequence[Location]] | None = None,
    ends: Sequence[Location] | None = None,
) -> ForeignSchedule:
    """Programs that are written in the plan: the texts of each pipeline rank's operations, and their places.

    Raises:
        ScheduleFileError: everything found wrong, PP131 to PP139.
    """
    findings = Findings()
    reader = OpReader(findings)
    origins: list[Location] = []
    rows: list[list[Row]] = []
    for rank, texts in enumerate(programs):
        rows.append([])
        for index, text in enumerate(texts):
            location = places[rank][index] if places is not None else None
            op = reader.read(Placed(text, location))
            if op is not None:
                rows[-1].append(Row(op, origin=NONE if location is None else len(origins)))
            if location is not None:
                origins.append(location)
    findings.raise_any()
    raw = RawSchedule(rows, origins, ends if ends is not None else [None] * len(rows), None)
    return _as_given(raw, expected, findings)


def _from_text(text: str, file: str, expected: Expected, findings: Findings) -> ForeignSchedule:
    program = read_program(text, file)
    raw = RawSchedule(program.rows_by_rank, program.origins, program.ends, Location(file))
    return _as_given(raw, expected, findings, program.tensors, program.groups)


def _as_given(
    raw: RawSchedule,
    expected: Expected,
    findings: Findings,
    tensors: tuple[TensorSpec, ...] = (),
    groups: tuple[Group, ...] = (),
) -> ForeignSchedule:
    """The schedule whose rows are complete except for peers."""
    check_fit(raw, expected, findings)
    findings.raise_any()
    rows = with_peers(raw.rows, raw.origins, findings)
    findings.raise_any()
    computes_only = all(row.op.kind in COMPUTE_KINDS for mine in rows for row in mine)
    return ForeignSchedule(rows, computes_only, tuple(raw.origins), tuple(raw.ends), tensors, groups)


def _from_csv(
    raw: RawSchedule, idle: Sequence[Location], form: ScheduleFormat, expected: Expected, findings: Findings
) -> ForeignSchedule:
    other = next((row for rows in raw.rows for row in rows if row.op.kind not in COMPUTE_KINDS), None)
    if other is not None and form is ScheduleFormat.CSV:
        message = f"{other.op} is not a computation, and `format: csv` has only computations"
        findings.add(WRONG_FORMAT, raw.place(other), message, "use `format: csv-comms`")
    computes_only = other is None and form is not ScheduleFormat.CSV_COMMS
    for location in () if computes_only else idle:
        message = "an empty cell, which PyTorch refuses where communication is given"
        findings.add(BAD_OPERATION, location, message, "remove it: cells are in the order of issue, not time steps")
    findings.raise_any()
    check_fit(raw, expected, findings)
    findings.raise_any()
    schedule = ForeignSchedule(tuple(map(tuple, raw.rows)), computes_only, tuple(raw.origins), tuple(raw.ends))
    if computes_only:
        return schedule
    placement = schedule.placement
    num_stages = sum(map(len, placement))
    actions = zip(schedule.rows, placement, strict=True)
    rows = with_peers([[*runtime_rows(mine, stages, num_stages)] for mine, stages in actions], raw.origins, findings)
    findings.raise_any()
    return replace(schedule, rows=rows)


def _refuse_unknown(text: str, file: str, findings: Findings) -> None:
    """PP137 for a text of an unknown format."""
    lines = enumerate(LINE_BREAK.split(text), start=1)
    number, line = next((number, line) for number, line in lines if line.strip())
    location = Location(file, number, 1, len(line))
    fix = (
        "a CSV has a line for each rank, such as `0F0,0F1,0B0,0B1`; a text `rank 0: 0F0 0F1 0B0 0B1`; Fleet's static "
        "scheduler prints `f0;f1;b0;b1;`"
    )
    message = "PyTorch's CSV, the strings of Fleet and our text form all begin differently"
    findings.add(WRONG_FORMAT, location, message, fix)
    findings.raise_any()


_WRITERS: Mapping[ScheduleFormat, Callable[[Sequence[Sequence[Row]]], str]] = MappingProxyType(
    {
        ScheduleFormat.TEXT: format_rows,
        ScheduleFormat.CSV: csv_text,
        ScheduleFormat.FLEET: fleet_text,
    }
)

WRITTEN_FORMATS: tuple[str, ...] = tuple(_WRITERS)
"""The formats that can be written."""


def write_schedule(schedule: Schedule, format: str) -> str:
    """The computations of a schedule as a file.

    Raises:
        InexpressibleError: the format cannot express a part of the schedule.
    """
    rows = [_numbered(schedule.rows(rank)) for rank in range(len(schedule.programs))]
    return _WRITERS[ScheduleFormat(format)](rows)


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """The rows with their batches numbered from 0, as the readers of other formats number them."""
    numbers = {NONE: NONE}
    for row in rows:
        numbers.setdefault(row.batch, len(numbers) - 1)
    return [replace(row, batch=numbers[row.batch]) for row in rows]


def convert_schedule(foreign: ForeignSchedule, format: str, *, only_computations: bool = False) -> str:
    """A schedule that was read, in another format or the same; ``only_computations`` leaves everything else out.

    Raises:
        ScheduleFileError: PP141 at its location, the format cannot express a part of the schedule.
    """
    try:
        return _converted(foreign, ScheduleFormat(format), only_computations=only_computations)
    except InexpressibleError as error:
        location = None if error.row is None else error.row.place(foreign.origins)
        raise ScheduleFileError(INEXPRESSIBLE.finding(str(error), location, error.help)) from None


def _converted(foreign: ForeignSchedule, form: ScheduleFormat, *, only_computations: bool) -> str:
    if only_computations:
        return _WRITERS[form](computations_of(foreign.rows))
    if form is ScheduleFormat.TEXT:
        return format_rows(foreign.rows, foreign.tensors, foreign.groups)
    for what, declared in (("tensor", foreign.tensors), ("group", foreign.groups)):
        if declared:
            raise InexpressibleError(
                f"the program declares {len(declared)} {what}{'s' if len(declared) > 1 else ''}, and only our text "
                "form has such declarations",
                help="leave them out with --only-computations",
            )
    return _WRITERS[form](foreign.rows)
