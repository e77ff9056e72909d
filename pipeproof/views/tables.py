"""The style of all tables in a terminal: columns without lines, two spaces apart, at their full width.

No cell is wrapped or cut off, so that names can be searched and figures are
whole; a narrow terminal wraps the lines itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[Text]:
    """The lines of a table, the headings first; cells are text without markup.

    A heading that begins with ``>`` is that of a column of numbers, which are aligned at the right.
    """
    cells = [[Text(heading.removeprefix(">"), style="bold") for heading in headings]]
    cells += [[Text(cell) if isinstance(cell, str) else cell.copy() for cell in row] for row in rows]
    for heading, column in zip(headings, zip(*cells, strict=True), strict=True):
        width = max(cell.cell_len for cell in column)
        for cell in column:
            cell.align("right" if heading.startswith(">") else "left", width)
    lines = [Text("  ").join(row) for row in cells]
    for line in lines:
        line.rstrip()
    return lines


def print_lines(lines: Iterable[Text], console: Console) -> None:
    """Print lines that only the terminal may wrap."""
    for line in lines:
        console.print(line, soft_wrap=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], console: Console) -> None:
    """Print the lines of ``table_lines``."""
    print_lines(table_lines(headings, rows), console)
