"""Text with its place in a file, and the findings that are collected while a schedule is read.

A reader continues after the first mistake, so that a person sees all of them
at once; misread parts are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeproof.diagnostics.finding import Finding, Location, Severity, file_order
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.specs.schedule_file import ScheduleFileError

MOST_FINDINGS = 50
"""Number of findings after which the rest of a file is not read."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a text; ``location`` is None for text that was made in Python."""

    text: str
    location: Location | None

    @property
    def place(self) -> Location:
        """The location of text that was read from a file."""
        assert self.location is not None, "every line of a file has a place"
        return self.location

    def part(self, start: int, stop: int) -> Placed:
        """The characters ``start : stop`` of this text, which is all on one line."""
        return Placed(self.text[start:stop], None if self.location is None else self.location.part(start, stop))


def placed_line(text: str, file: str, line: int) -> Placed:
    """A whole line of a file; ``line`` counts from 1."""
    return Placed(text, Location(file, line).part(0, len(text)))


def end_of(line: Placed) -> Location:
    """The place just behind the last character of a line that is not blank: where something is missing."""
    return replace(line.place, column=line.place.column + len(line.text.rstrip()), end_column=None)


@dataclass
class Findings:
    """Findings of a schedule while it is read."""

    found: list[Finding] = field(default_factory=list)

    def add(self, doc: RuleDoc, location: Location | None, message: str, help: str | None = None) -> None:
        """One more.

        Raises:
            ScheduleFileError: these are ``MOST_FINDINGS``.
        """
        self.found.append(Finding(doc.code, Severity(doc.severity), message, location, help))
        if len(self.found) == MOST_FINDINGS:
            self.raise_any()

    def raise_any(self) -> None:
        """Do nothing if nothing is wrong.

        Raises:
            ScheduleFileError: with all findings, in the order of the file.
        """
        if self.found:
            raise ScheduleFileError(*sorted(self.found, key=file_order))
