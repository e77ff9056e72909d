"""Files of statements: one per line, or YAML or JSON with the list ``aoa_statements``, as Paddle's ``aoa_config``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.problems import describe_value, listed
from pipeproof.diagnostics.source import LINE_BREAK, SourceMap
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.state.aoa.aoa_codes import UNREADABLE, AoaError
from pipeproof.state.aoa.parser import Locator, parse_statement
from pipeproof.state.aoa.statements import Program, Statement

KEY = "aoa_statements"
MAX_BYTES = 2**26
"""Largest file of statements."""
_IS_CONFIG = re.compile(rf"(?:\s|#.*|---)*(?:\{{|['\"]?{KEY}['\"]?\s*:)")
_CONFIGS = (".yaml", ".yml", ".json")
_REVERSED = "aoa_config_reverse"


def read_file(path: Path) -> Program:
    """Return all statements of a file, at least one: only an empty list means that there are none.

    Raises:
        AoaError: PP180 and PP184; the file or a statement cannot be read, or there is no statement.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            fix = "name a file of statements; $LAYER_ID and $EXPERT_ID cover many tensors"
            raise AoaError(UNREADABLE.finding(f"{path} has more than {MAX_BYTES:,} bytes", None, fix))
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AoaError(UNREADABLE.finding(f"{path} is not UTF-8 text", None, "name a file of statements")) from error
    except OSError as error:
        fix = "name a file of statements"
        raise AoaError(UNREADABLE.finding(f"{path} cannot be read: {error.strerror}", None, fix)) from error
    program = read_statements(text, str(path))
    if not program.statements and not _is_config(text, program.file):  # forgotten, or a command that failed wrote it
        fix = f"write one per line, `A -> B`; `{KEY}: []` keeps every tensor unchanged"
        raise AoaError(UNREADABLE.finding(f"{path} has no statement", None, fix))
    return program


def read_statements(text: str, file: str) -> Program:
    """Return all statements of a text; ``file`` is its name, for locations.

    Raises:
        AoaError: PP180 and PP184, for each statement that cannot be read.
    """
    findings: list[Finding] = []
    statements: list[Statement] = []
    for line, locate in _from_config(text, file) if _is_config(text, file) else _from_lines(text, file):
        try:
            statements.append(parse_statement(line, locate))
        except AoaError as error:
            findings += error.findings
    if findings:
        raise AoaError(*findings)
    return Program(tuple(statements), file)


def _is_config(text: str, file: str) -> bool:
    return _IS_CONFIG.match(text) is not None or Path(file).suffix.lower() in _CONFIGS


def _from_lines(text: str, file: str) -> Iterator[tuple[str, Locator]]:
    for number, line in enumerate(LINE_BREAK.split(text), 1):
        content = line.partition("#")[0]
        if content.strip():
            yield content, Location(file, number).part


def _from_config(text: str, file: str) -> Iterator[tuple[str, Locator]]:
    tree = parse_text(text, file)
    problems = [UNREADABLE.finding(problem.message, problem.location, problem.help) for problem in tree.problems]
    if problems or not isinstance(tree.data, Mapping) or KEY not in tree.data:
        keys = [f"`{key}`" for key in tree.data] if isinstance(tree.data, Mapping) else []
        message = f"{file} has no `{KEY}`" + (f", found {listed(keys, 'and')}" if keys else "")
        fix = f"write `{KEY}: [..]`; a file with a statement a line has another ending than {', '.join(_CONFIGS)}"
        raise AoaError(*problems or [UNREADABLE.finding(message, None, fix)])
    for key in tree.data:
        if key != KEY:
            fix = "remove it; `pipeproof state aoa --inverse` writes the inverse" if key == _REVERSED else "remove it"
            raise AoaError(UNREADABLE.finding(f"unknown key `{key}`", tree.source.locate((key,), key=True), fix))
    lines = tree.data.get(KEY)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        wrong_type = describe_value(lines)
        if isinstance(lines, list):
            wrong_type = describe_value(next(line for line in lines if not isinstance(line, str)))
        message = f"`{KEY}` is a list of strings, found {wrong_type}"
        fix = f"write `{KEY}: ['A -> B']`"
        raise AoaError(UNREADABLE.finding(message, tree.source.locate((KEY,)), fix))
    for number, line in enumerate(lines):
        yield line, _in_scalar(tree.source, tree.source.values[(KEY, number)], line)


def _in_scalar(source: SourceMap, location: Location, text: str) -> Locator:
    """Return the locator for a YAML string, which may be quoted and have escapes."""
    column = source.lines[location.line - 1].find(text, location.column - 1)
    if column < 0:
        return partial(_in_all, location)
    return Location(source.file, location.line, column + 1).part


def _in_all(location: Location, _start: int, _stop: int) -> Location:
    return location
