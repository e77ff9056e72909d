"""The text forms of all operations of an op table, without an object for each.

Operations that differ in nothing but their micro-batch, and its split, differ
in one place of their text. A large plan has thousands of times as many
operations as texts around that place.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from pipeproof.schedule.columns import NONE, Columns, op_from_columns, work_of
from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import OpKind, parse_op

_PROBE = 10**15
"""A micro-batch whose number no stage and no index has, so that it is found in a text."""

_WITHOUT_DIGITS = MappingProxyType({ord(digit): None for digit in "0123456789"})


def op_texts(columns: Columns) -> list[str]:
    """``str(op)`` of each row, in order."""
    values = columns.values
    unit = values["unit"]
    around = (values["kind"], values["stage"], values["target_kind"], values["index"], values["axis"])
    key = packed(*around, (unit != NONE).astype(np.int64))
    _, examples, sort = np.unique(key, return_index=True, return_inverse=True)
    halves = [_around_unit(columns, row) for row in examples.tolist()]
    units = [_unit_text(number, columns.num_splits) for number in range(int(unit.max(initial=NONE)) + 1)]
    units.append("")  # the last, where NONE looks
    texts = []
    for i, number in zip(sort.tolist(), unit.tolist(), strict=True):
        before, after = halves[i]
        texts.append(f"{before}{units[number]}{after}")
    for row, op in columns.unusual.items():
        texts[row] = str(op)
    return texts


def _around_unit(columns: Columns, row: int) -> tuple[str, str]:
    """What stands before and after the unit of work in the text of a row; all of it before, where there is none."""
    kind, stage, unit, target_kind, index, axis = (
        int(columns.values[name][row]) for name in ("kind", "stage", "unit", "target_kind", "index", "axis")
    )
    op = op_from_columns(kind, stage, NONE if unit == NONE else _PROBE, target_kind, index, axis, num_splits=0)
    before, _, after = str(op).partition(str(_PROBE))
    return before, after


def _unit_text(unit: int, num_splits: int) -> str:
    """The micro-batch and, where sequences are cut, the split."""
    micro_batch, split = work_of(unit, num_splits)
    return f"{micro_batch}" if split is None else f"{micro_batch}.s{split}"


def kinds_of(texts: Iterable[str]) -> list[OpKind]:
    """The kind of each operation from its text form: what is left of a text without its numbers says it.

    Raises:
        ValueError: the first of some texts that differ in numbers alone is not the text form of an operation.
    """
    known: dict[str, OpKind] = {}
    kinds = []
    for text in texts:
        form = text.translate(_WITHOUT_DIGITS)
        kind = known.get(form)
        if kind is None:
            kind = known[form] = parse_op(text).kind
        kinds.append(kind)
    return kinds
