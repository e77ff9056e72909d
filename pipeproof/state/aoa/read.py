"""A file of statements: one a line, or YAML or JSON with the list ``aoa_statements``, as Paddle's ``aoa_config``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from pipeproof.specs.finding import Finding, Location
from pipeproof.specs.problems import describe_value
from pipeproof.specs.source import LINE_BREAK, SourceMap, Span
from pipeproof.specs.yaml_tree import parse_text
from pipeproof.state.aoa.codes import NOT_READ, AoaError, fault
from pipeproof.state.aoa.lexer import Placing
from pipeproof.state.aoa.parser import parse_statement
from pipeproof.state.aoa.syntax import Program, Statement

KEY = "aoa_statements"
_IS_CONFIG = re.compile(rf"(?:\s|#.*|---)*(?:\{{|['\"]?{KEY}['\"]?\s*:)")
_REVERSED = "aoa_config_reverse"


def read_file(path: Path) -> Program:
    """All statements of a file.

    Raises:
        AoaError: PP180 and PP184; the file cannot be read, or a statement.
    """
    try:
        return read_statements(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise AoaError(fault(NOT_READ, f"{path} is not UTF-8 text", None, "name a file of statements")) from error
    except OSError as error:
        raise AoaError(fault(NOT_READ, f"{path} cannot be read: {error.strerror}", None)) from error


def read_statements(text: str, file: str) -> Program:
    """All statements of a text; ``file`` is its name, for places.

    Raises:
        AoaError: PP180 and PP184, for each statement that cannot be read.
    """
    found: list[Finding] = []
    statements: list[Statement] = []
    for line, placing in _of_config(text, file) if _IS_CONFIG.match(text) else _of_lines(text, file):
        try:
            statements.append(parse_statement(line, placing))
        except AoaError as error:
            found += error.findings
    if found:
        raise AoaError(*found)
    return Program(tuple(statements), file)


def _of_lines(text: str, file: str) -> Iterator[tuple[str, Placing]]:
    for number, line in enumerate(LINE_BREAK.split(text), 1):
        content = line.partition("#")[0]
        if content.strip():
            yield content, partial(_on_line, file, number, 0)


def _of_config(text: str, file: str) -> Iterator[tuple[str, Placing]]:
    tree = parse_text(text, file)
    problems = [fault(NOT_READ, one.message, tree.source.at(one.span), one.help) for one in tree.problems]
    if problems or not isinstance(tree.data, Mapping):
        raise AoaError(*problems or [fault(NOT_READ, f"`{KEY}` is missing", None)])
    for key in tree.data:
        if key != KEY:
            mend = "remove it; `pipeproof aoa --inverse` writes the inverse" if key == _REVERSED else "remove it"
            raise AoaError(fault(NOT_READ, f"unknown key `{key}`", tree.source.locate((key,), key=True), mend))
    lines = tree.data.get(KEY)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        wrong = describe_value(lines)
        if isinstance(lines, list):
            wrong = describe_value(next(line for line in lines if not isinstance(line, str)))
        message = f"`{KEY}` is a list of strings, found {wrong}"
        raise AoaError(fault(NOT_READ, message, tree.source.locate((KEY,))))
    for number, line in enumerate(lines):
        yield line, _in_scalar(tree.source, tree.source.values[(KEY, number)], line)


def _in_scalar(source: SourceMap, span: Span, text: str) -> Placing:
    """Where characters of a YAML string stand: it may be quoted, and then with escapes."""
    column = source.lines[span.line - 1].find(text, span.column - 1)
    if column < 0:
        return partial(_in_all, source.at(span))
    return partial(_on_line, source.file, span.line, column)


def _in_all(place: Location, _start: int, _stop: int) -> Location:
    return place


def _on_line(file: str, line: int, before: int, start: int, stop: int) -> Location:
    return Location(file, line, before + start + 1, before + max(stop, start + 1))
