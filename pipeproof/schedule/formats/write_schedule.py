"""Writers of schedules in all formats that ``read_schedule`` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.csv_file import csv_comms_text, csv_text
from pipeproof.schedule.formats.fleet_text import fleet_text
from pipeproof.schedule.formats.inexpressible import INEXPRESSIBLE, InexpressibleError, computations_of
from pipeproof.schedule.formats.read_schedule import ForeignSchedule, ScheduleFormat
from pipeproof.schedule.formats.text_form import format_rows
from pipeproof.schedule.programs import Schedule
from pipeproof.specs.schedule import ScheduleFileError

_WRITERS: Mapping[ScheduleFormat, Callable[[Sequence[Sequence[Row]]], str]] = MappingProxyType(
    {
        ScheduleFormat.TEXT: format_rows,
        ScheduleFormat.CSV: csv_text,
        ScheduleFormat.CSV_COMMS: csv_comms_text,
        ScheduleFormat.FLEET: fleet_text,
    }
)

WRITTEN_FORMATS: tuple[str, ...] = tuple(_WRITERS)
"""The formats that can be written."""


def write_schedule(schedule: Schedule, format: str) -> str:
    """The computations of a schedule; ``csv-comms`` adds the transfers that PyTorch would.

    Raises:
        InexpressibleError: the format cannot express something that the schedule has.
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
        ScheduleFileError: PP141 at its place, the format cannot express something that the schedule has.
    """
    try:
        return _converted(foreign, ScheduleFormat(format), only_computations=only_computations)
    except InexpressibleError as error:
        place = foreign.origins[error.row.origin] if error.row is not None and error.row.origin != NONE else None
        raise ScheduleFileError(INEXPRESSIBLE.finding(str(error), place, error.help)) from error


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
