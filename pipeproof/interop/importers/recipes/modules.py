"""Modules of Python code by file: their definitions, read with ``ast``; nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import LINE_BREAK, PlanFileError, SourceMap, read_text
from pipeproof.interop.importers.import_codes import UNREADABLE

_MOST_CHARACTERS = 2**22


@dataclass(frozen=True)
class Module:
    """A module: its definitions and assignments at the top level, and the origins of imported names."""

    file: str
    lines: tuple[str, ...]
    definitions: dict[str, ast.FunctionDef | ast.ClassDef] = field(default_factory=dict)
    assignments: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Imported names, with the module (dots in front of a relative one) and the name in it ("" for the module)."""
    stars: list[str] = field(default_factory=list)
    """Modules all of whose names are imported."""

    def location(self, node: ast.AST) -> Location:
        """Return the location of a node; of one of several lines, that of its first line."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        end = getattr(node, "end_col_offset", None) if getattr(node, "end_lineno", line) == line else None
        text = self.lines[line - 1].encode("utf-8") if line <= len(self.lines) else b""
        start = len(text[:column].decode("utf-8", errors="replace"))
        end = len(self.lines[line - 1]) if end is None else len(text[:end].decode("utf-8", errors="replace"))
        return Location(self.file, line).part(start, max(end, start + 1))


class Modules:
    """Reader of modules that keeps each."""

    def __init__(self) -> None:
        self._known: dict[str, Module] = {}

    def read(self, file: Path) -> Module:
        """Read a file.

        Raises:
            PlanFileError: PP100 if it cannot be read, PP170 if it is no Python.
        """
        name = str(file)
        if name not in self._known:
            self._known[name] = _module(name)
        return self._known[name]

    def refuse(self, message: str, location: Location, help: str | None = None) -> NoReturn:
        """End the import at a location in one of the files.

        Raises:
            PlanFileError: always.
        """
        lines = self.read(Path(location.file)).lines
        raise PlanFileError(UNREADABLE.finding(message, location, help), source=SourceMap(location.file, lines))

    def find(self, name: str, importer: str) -> Module | None:
        """Return a module by the name in an import statement of a file; None if it is not found.

        A relative name is looked up from the file; others below the directories above the file, then in ``sys.path``.
        """
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        above = Path(importer).resolve().parents
        roots = above[dots - 1 : dots] if dots else [*above, *map(Path, sys.path)]
        for root in roots:
            base = root.joinpath(*parts)
            for file in (base.with_suffix(".py") if parts else base / "__init__.py", base / "__init__.py"):
                if file.is_file() and str(file) != importer:
                    return self.read(file)
        return None


def _module(name: str) -> Module:
    text = read_text(name)
    lines = tuple(LINE_BREAK.split(text))
    if len(text) > _MOST_CHARACTERS:
        finding = UNREADABLE.finding(f"a module of more than {_MOST_CHARACTERS} characters", Location(name))
        raise PlanFileError(finding, source=SourceMap(name, lines))
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        location = Location(name, error.lineno or 1, error.offset or 1)
        finding = UNREADABLE.finding(f"no valid Python: {error.msg}", location)
        raise PlanFileError(finding, source=SourceMap(name, lines)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        finding = UNREADABLE.finding(f"no valid Python: {error}", Location(name))
        raise PlanFileError(finding, source=SourceMap(name, lines)) from error
    module = Module(name, lines)
    for node in _top_level(tree.body):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                module.definitions[node.name] = node
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                module.assignments[target] = value
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value):
                module.assignments[target] = value
            case ast.ImportFrom():
                source = "." * node.level + (node.module or "")
                module.stars.extend(source for alias in node.names if alias.name == "*")
                module.imports.update({alias.asname or alias.name: (source, alias.name) for alias in node.names})
            case ast.Import():
                module.imports.update({(alias.asname or alias.name): (alias.name, "") for alias in node.names})
    return module


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those inside of ``try`` and ``if``."""
    for node in body:
        yield node
        if isinstance(node, ast.Try | ast.If):
            yield from _top_level([*node.body, *node.orelse])
