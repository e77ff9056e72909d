"""The one place where prose is wrapped: between words, at the width of a terminal.

A terminal, or ``COLUMNS=80``, sets a width. Without one, as in a pipe or a file, every sentence stays on one line, so
that it can be searched. Words are never divided: a path or a digest that is longer than the width is a line of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import IO, Any

_LEAST = 20
"""A narrower terminal is written to as if it had so many columns."""

_MOST_DIGITS = 6
"""Digits of ``COLUMNS``: no terminal is wider, and tables would be padded to it."""

_WORD = re.compile(r"`[^`\n]{1,24}`[^\s]*|\S+")
"""Words; a short quotation in backquotes is one, so that what can be typed stays together."""

_LABEL = re.compile(r"\s+= (?:help: )?|(?P<code>\w+\[\w+\])?\s*")
"""Label of a finding, or spaces of an indented line, whose width continuation lines are indented by."""


def given_columns() -> int | None:
    """Return the columns that the environment sets; None without a positive number."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) or None if columns.isdecimal() and len(columns) <= _MOST_DIGITS else None


def prose_width(stream: IO[Any]) -> int | None:
    """Return the columns that prose on a stream is wrapped at; None where its lines stay whole."""
    columns = given_columns()
    if columns is not None:
        return max(columns, _LEAST)
    if not stream.isatty():
        return None
    return max(shutil.get_terminal_size().columns, _LEAST)


def line_parts(line: str, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a line: first and last column of the text, and spaces to put before it.

    Continuation lines are indented as the line is, those of a finding by its label. The parts hold all words in order.
    """
    label = _LABEL.match(line)
    assert label is not None  # it matches nothing, too
    hang = min(2 if label["code"] else label.end(), width // 2)
    start, end, indent = 0, 0, 0
    for word in _WORD.finditer(line):
        if end > start and indent + word.end() - start > width and line[start : word.start()].strip():
            yield start, end, indent
            start, indent = word.start(), hang
        end = word.end()
    yield start, end, indent


def wrapped_text(text: str, width: int | None) -> str:
    """Return text of one or more lines, wrapped where there is a width."""
    if width is None:
        return text
    lines = (line if len(line) <= width else _joined(line, width) for line in text.split("\n"))
    return "\n".join(lines)


def _joined(line: str, width: int) -> str:
    return "\n".join(" " * indent + line[start:end] for start, end, indent in line_parts(line, width))
