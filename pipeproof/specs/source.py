"""A plan's text: its lines, and the place of every key and value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pipeproof.specs.finding import Location
from pipeproof.specs.problems import KeyPath

LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Where PyYAML begins a new line; lines must be counted as its marks count them."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of text; lines and columns count from 1.

    ``end_column`` is the last column, inclusive; None where the text ends on
    another line.
    """

    line: int
    column: int
    end_column: int | None


_START = Span(1, 1, None)


@dataclass(frozen=True)
class SourceMap:
    """The file name as it was given, the text's lines, and spans by key path.

    ``values`` has every value, list items included; ``keys`` every key of a
    mapping. What stands below an alias has no span of its own: the alias has.
    """

    file: str
    lines: tuple[str, ...]
    values: dict[KeyPath, Span] = field(default_factory=dict)
    keys: dict[KeyPath, Span] = field(default_factory=dict)

    def locate(self, path: KeyPath, *, key: bool = False) -> Location:
        """The place of the value at ``path``, or with ``key`` of the key itself.

        What is not in the file (a missing key, a default) has the place of its
        nearest parent that is.
        """
        spans = self.keys if key else self.values
        if path in spans:
            return self.at(spans[path])
        if path in self.values:
            return self.at(self.values[path])
        return self.locate(path[:-1], key=key) if path else self.at(_START)

    def at(self, span: Span) -> Location:
        """A span as a finding shows it."""
        return Location(self.file, span.line, span.column, span.end_column)
