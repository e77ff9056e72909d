"""Cells of CSV files for spreadsheets."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")


def no_formula(cell: Any) -> Any:
    """Return a cell that spreadsheets take for text: what begins with = + - or @ and is no number would be executed."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"
