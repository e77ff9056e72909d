"""The style of all tables in a terminal: columns without lines, two spaces apart, a row on one line.

If the width is known and the table is too wide, optional columns are left out, then texts are
shortened in their middle, and a line below the table names both. In a pipe no cell is cut: names can be
searched and figures are whole. Cells of CSV files are safe for spreadsheets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

_LEAST_TEXT = 12
"""Characters that are left of a text which is shortened."""


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[Text]:
    """The lines of a table, the headings first; cells are text without markup.

    A heading that begins with ``>`` marks a column of numbers, which are aligned at the right.
    """
    columns = _columns(headings, rows)
    for heading, column in zip(headings, columns, strict=True):
        width = _width(column)
        for cell in column:
            cell.align("right" if heading.startswith(">") else "left", width)
    lines = [Text("  ").join(row) for row in zip(*columns, strict=True)]
    for line in lines:
        line.rstrip()
    return lines


def print_lines(lines: Iterable[Text], console: Console) -> None:
    """Print lines that are never wrapped by us."""
    for line in lines:
        console.print(line, soft_wrap=True, no_wrap=True)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], console: Console, *, optional: Sequence[str] = ()
) -> None:
    """Print the lines of ``table_lines``, and below them the omissions for the width of the console.

    ``optional`` are headings of columns that may be left out, without ``>``, the first one first.
    """
    columns = dict(enumerate(_columns(headings, rows)))
    width: int | None = getattr(console, "prose_width", None)  # of the console of commands
    names = [heading.removeprefix(">") for heading in headings]
    left_out: list[str] = []
    shortened = ""
    if width is not None:
        for name in optional:
            if _total(columns.values()) > width and name in names:
                del columns[names.index(name)]
                left_out.append(name)
        excess = _total(columns.values()) - width
        texts = [number for number in columns if not headings[number].startswith(">")]
        if excess > 0 and texts:
            widest = max(texts, key=lambda number: _width(columns[number]))
            if _shorten(columns[widest][1:], max(_width(columns[widest]) - excess, _LEAST_TEXT)):
                shortened = names[widest]
    rows = list(zip(*(column[1:] for column in columns.values()), strict=True))
    print_lines(table_lines([headings[number] for number in columns], rows), console)
    notes = [f"left out: {', '.join(left_out)}"] if left_out else []
    if shortened:
        notes.append(f"shortened: {shortened}")
    if notes:
        note = f"({width} columns; {'; '.join(notes)}; a wider terminal or a pipe has all)"
        console.print(Text(note, style="dim"), soft_wrap=True)


def _columns(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[tuple[Text, ...]]:
    cells = [[Text(heading.removeprefix(">"), style="bold") for heading in headings]]
    cells += [[Text(cell) if isinstance(cell, str) else cell.copy() for cell in row] for row in rows]
    return list(zip(*cells, strict=True))


def _width(column: Sequence[Text]) -> int:
    return max(cell.cell_len for cell in column)


def _total(columns: Iterable[Sequence[Text]]) -> int:
    widths = [_width(column) for column in columns]
    return sum(widths) + 2 * (len(widths) - 1)


def _shorten(cells: Sequence[Text], width: int) -> bool:
    """Shorten cells in place in their middle, as names differ at their ends; return True if one was too long."""
    end = (width - 1) // 2
    long = [cell for cell in cells if cell.cell_len > width]
    for cell in long:
        cell.plain = f"{cell.plain[: width - 1 - end]}\N{HORIZONTAL ELLIPSIS}{cell.plain[len(cell.plain) - end :]}"
    return bool(long)
