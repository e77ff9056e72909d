"""Python expressions of lists in Megatron-LM's arguments, such as ``([0]*3+[1]*58)``, evaluated without ``eval``.

``moe_freq_type`` in megatron/training/arguments.py (commit d98e8a6).
"""

from __future__ import annotations

import ast
from typing import Final

MAX_ITEMS: Final = 100_000
"""Longest list, as many as a model has blocks in plans."""

_MAX_TEXT: Final = 10_000


class FrequencyError(ValueError):
    """An expression that is not a list of numbers, or too long a list."""


def layer_pattern(text: str, num_layers: int) -> list[int]:
    """Return 1 for each block with experts, else 0, of a value of ``--moe-layer-freq``.

    A number N, or -N, means experts in blocks 0, N, 2N and so on.

    Raises:
        FrequencyError: the value is neither a number nor a list with a 0 or 1 for each block.
    """
    number = text.strip().removeprefix("-")
    if number.isdecimal() and int(number) > 0:
        return [int(block % int(number) == 0) for block in range(num_layers)]
    pattern = literal_list(text)
    if pattern is None:
        raise FrequencyError(f"`{text}` is neither a number nor a list such as ([0]*3+[1]*58)")
    wrong = next((item for item in pattern if item not in (0, 1)), None)
    if wrong is not None:
        raise FrequencyError(f"the items are 0 for a block with an MLP and 1 for one with experts, found {wrong}")
    if len(pattern) != num_layers:
        raise FrequencyError(f"the list has {len(pattern)} items, and --num-layers is {num_layers}")
    return [int(item) for item in pattern]


def literal_list(text: str) -> list[int | float | str] | None:
    """Return the list of an expression of lists, ``+`` and ``*``; None for others, or too long a list."""
    if len(text) > _MAX_TEXT:
        return None
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list) else None


def _value(node: ast.expr) -> list[int | float | str] | int | float | str:
    match node:
        case ast.Constant(value=int() | float() | str() as value) if not isinstance(value, bool):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            values = [_value(element) for element in elements]
            flat = [value for value in values if not isinstance(value, list)]
            if len(flat) == len(values):
                return flat
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= MAX_ITEMS:
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            items, times = (first, second) if isinstance(first, list) else (second, first)
            if isinstance(items, list) and isinstance(times, int) and 0 <= times * len(items) <= MAX_ITEMS:
                return items * times
    raise ValueError
