"""Base of all results: numbers as floats or exact, records, data frames, files, and their form in a notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeproof.atomic_write import write_output

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

Records = list[dict[str, Any]]

_MOST_ROWS = 20
"""Rows of a table in a notebook; ``to_records`` has them all."""

_STYLE = """\
body{font:14px system-ui,sans-serif;margin:24px;max-width:1200px;color:#24292f;background:#fff}
table{border-collapse:collapse;margin:8px 0}td,th{padding:2px 10px;text-align:left;border-bottom:1px solid #d8dee4}
pre{overflow-x:auto;background:#f6f8fa;padding:10px}img{max-width:100%}"""
_EXACT = "_exact"


class Result:
    """A result of a function of ``pipeproof``.

    ``to_dict`` has all of it; ``to_records`` and ``to_pandas`` one of its ``tables`` (by default the first).
    Numbers are floats, or with ``exact`` the fractions that were computed. ``save`` writes a page (``.html``) or JSON.
    In a notebook, the last expression of a cell shows the result.
    """

    def _dict(self) -> dict[str, Any]:
        """All of the result; exact numbers are fractions, or have a text under a key that ends with ``_exact``."""
        raise NotImplementedError

    def _tables(self) -> dict[str, Records]:
        """Tables by name, the main one first; numbers may be fractions."""
        raise NotImplementedError

    def _parts(self) -> Iterable[str]:
        """Parts of the page: HTML in the order in which they are read."""
        raise NotImplementedError

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(self._tables())

    def to_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """Return all of the result as plain data; with ``exact`` numbers are integers and fractions, never rounded."""
        plain: dict[str, Any] = plain_data(self._dict(), exact=exact)
        return plain

    def to_records(self, table: str | None = None, *, exact: bool = False) -> Records:
        """Return the rows of a table, a dict each.

        Raises:
            ValueError: there is no such table.
        """
        tables = self._tables()
        name = next(iter(tables)) if table is None else table
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(tables)}")
        rows: Records = plain_data(tables[name], exact=exact)
        return rows

    def to_pandas(self, table: str | None = None) -> pd.DataFrame:
        """Return a table as a data frame of pandas.

        Raises:
            ImportError: pandas is not installed.
            ValueError: there is no such table.
        """
        records = self.to_records(table)
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas (pip install pandas); to_records has the same rows") from error
        return pd.DataFrame(records)

    def to_html(self) -> str:
        """Return the result as one page, which loads nothing from elsewhere."""
        title = escape(repr(self))
        body = self._repr_html_()
        head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{body}\n</body></html>\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result, and return the path: a page (``.html``) or JSON.

        Raises:
            OSError: the file cannot be written.
            ValueError: the name has another ending.
        """
        target = Path(path)
        match target.suffix.lower():
            case ".html":
                write_output(target, self.to_html())
            case ".json":
                write_output(target, json.dumps(self.to_dict(), indent=2) + "\n")
            case _:
                raise ValueError(f"{str(path)!r} has another ending than .html or .json")
        return target

    def _repr_html_(self) -> str:
        """Return the form in a notebook."""
        return "\n".join(filter(None, self._parts()))


def plain_data(value: Any, *, exact: bool) -> Any:
    """Return data without enums and tuples, numbers as floats or exact.

    A key with the suffix ``_exact`` holds a fraction as text; the key without the suffix has the nearest float.
    """
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            name = key.value if isinstance(key, Enum) else key
            if isinstance(name, str) and name.endswith(_EXACT) and name.removesuffix(_EXACT) in value:
                continue
            text = value.get(f"{name}{_EXACT}") if exact else None
            plain[name] = plain_data(item, exact=exact) if text is None else Fraction(text)
        return plain
    if isinstance(value, Fraction):
        return value if exact else float(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [plain_data(item, exact=exact) for item in value]
    return value


def noted(note: str) -> str:
    """Return a note as the end of a ``repr``; an empty text if there is none."""
    return f"; {note}" if note else ""


def html_table(records: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Return the first rows of a table as HTML; nothing of an empty one."""
    if not records:
        return ""
    columns = list(dict.fromkeys(key for row in records for key in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(row.get(column)))}</td>' for column in columns)}</tr>"
        for row in records[:_MOST_ROWS]
    )
    more = len(records) - _MOST_ROWS
    below = f"<p>and {more} more rows: <code>to_records</code> has them</p>" if more > 0 else ""
    above = f"<p><b>{escape(title)}</b></p>" if title else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{below}"


def html_text(show: Callable[[Console], None], width: int = 110) -> str:
    """Return what ``show`` prints, without colours, as HTML; nothing of nothing."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    show(Console(file=text, width=width, highlight=False, color_system=None, force_jupyter=False))
    return f"<pre>{escape(text.getvalue().rstrip())}</pre>" if text.getvalue().strip() else ""


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float | Fraction):
        return f"{float(value):,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value)
