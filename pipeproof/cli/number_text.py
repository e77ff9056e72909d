"""Exact numbers of options."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[+-]?[0-9]{0,9}(/[0-9]{1,9}|(\.[0-9]{0,9})?([eE][+-]?[0-9]{1,2})?)")
"""A fraction or a decimal number; an exponent of eight digits would be a number of a hundred million digits."""


def fraction_of(text: str) -> Fraction | None:
    """Return the exact number of a text such as ``1/8`` or ``2.5e3``; None for other texts and for longer numbers."""
    try:
        return Fraction(text) if _NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None
