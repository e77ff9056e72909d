"""A file of statements: one a line, or YAML or JSON with the list ``aoa_statements``, as Paddle's ``aoa_config``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from pipeproof.specs.finding import Finding, Location
from pipeproof.specs.problems import describe_value, listed
from pipeproof.specs.source import LINE_BREAK, SourceMap, Span
from pipeproof.specs.yaml_tree import parse_text
from pipeproof.state.aoa.codes import NOT_READ, AoaError, fault
from pipeproof.state.aoa.lexer import Placing
from pipeproof.state.aoa.parser import parse_statement
from pipeproof.state.aoa.syntax import Program, Statement

KEY = "aoa_statements"
MAX_BYTES = 2**26
"""Largest file of statements."""
_IS_CONFIG = re.compile(rf"(?:\s|#.*|---)*(?:\{{|['\"]?{KEY}['\"]?\s*:)")
_CONFIGS = (".yaml", ".yml", ".json")
_REVERSED = "aoa_config_reverse"


def read_file(path: Path) -> Program:
    """All statements of a file, which has one at least: that there are to be none is said by an empty list.

    Raises:
        AoaError: PP180 and PP184; the file cannot be read, or a statement, or it has none.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            mend = "name a file of statements; $LAYER_ID and $EXPERT_ID stand for many"
            raise AoaError(fault(NOT_READ, f"{path} has more than {MAX_BYTES:,} bytes", None, mend))
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AoaError(fault(NOT_READ, f"{path} is not UTF-8 text", None, "name a file of statements")) from error
    except OSError as error:
        mend = "name a file of statements"
        raise AoaError(fault(NOT_READ, f"{path} cannot be read: {error.strerror}", None, mend)) from error
    program = read_statements(text, str(path))
    if not program.statements and not _is_config(text, program.file):  # forgotten, or a command that failed wrote it
        mend = f"write one a line, `A -> B`; `{KEY}: []` says that every tensor stays as it is"
        raise AoaError(fault(NOT_READ, f"{path} has no statement", None, mend))
    return program


def read_statements(text: str, file: str) -> Program:
    """All statements of a text; ``file`` is its name, for places.

    Raises:
        AoaError: PP180 and PP184, for each statement that cannot be read.
    """
    found: list[Finding] = []
    statements: list[Statement] = []
    for line, placing in _of_config(text, file) if _is_config(text, file) else _of_lines(text, file):
        try:
            statements.append(parse_statement(line, placing))
        except AoaError as error:
            found += error.findings
    if found:
        raise AoaError(*found)
    return Program(tuple(statements), file)


def _is_config(text: str, file: str) -> bool:
    return _IS_CONFIG.match(text) is not None or Path(file).suffix.lower() in _CONFIGS


def _of_lines(text: str, file: str) -> Iterator[tuple[str, Placing]]:
    for number, line in enumerate(LINE_BREAK.split(text), 1):
        content = line.partition("#")[0]
        if content.strip():
            yield content, partial(_on_line, file, number, 0)


def _of_config(text: str, file: str) -> Iterator[tuple[str, Placing]]:
    tree = parse_text(text, file)
    problems = [fault(NOT_READ, one.message, tree.source.at(one.span), one.help) for one in tree.problems]
    if problems or not isinstance(tree.data, Mapping) or KEY not in tree.data:
        keys = [f"`{key}`" for key in tree.data] if isinstance(tree.data, Mapping) else []
        message = f"{file} has no `{KEY}`" + (f", found {listed(keys, 'and')}" if keys else "")
        mend = f"write `{KEY}: [..]`; a file with a statement a line has another ending than {', '.join(_CONFIGS)}"
        raise AoaError(*problems or [fault(NOT_READ, message, None, mend)])
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
        mend = f"write `{KEY}: ['A -> B']`"
        raise AoaError(fault(NOT_READ, message, tree.source.locate((KEY,)), mend))
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
