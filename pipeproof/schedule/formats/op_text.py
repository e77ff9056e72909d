"""Operations as text: reading with suggestions, and the texts of a whole op table.

The reader takes the strict text form and suggests the operation that was probably meant. The writer makes the texts
of a whole op table without an object for each operation.

The texts of operations that only differ in micro-batch and split differ at one position. A large plan has thousands of
times as many operations as texts around that position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from pipeproof.diagnostics.problems import nearest_name, shortened
from pipeproof.schedule.columns import NONE, Columns, op_from_columns, work_item_text
from pipeproof.schedule.derive import packed
from pipeproof.schedule.formats.text_tokens import Findings, Placed
from pipeproof.schedule.ops import KINDS, TARGET_KINDS, Op, OpKind, parse_op
from pipeproof.specs.schedule import BAD_OPERATION

MAX_NUMBER = 10**6
"""Largest stage, micro-batch or index; a plan has no more micro-batches than that."""

_LOOSE = re.compile(r"(\d{1,7}) *([A-Za-z_]+) *(\d{0,7})(:[a-z]+)?(?!\d)", re.ASCII)
_LOOSE_TARGETED = re.compile(r"(wait|free)[( ]+(.*?)\)*", re.ASCII | re.IGNORECASE)


class OpReader:
    """Reads operations of one file; equal texts are read once."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._known: dict[str, Op] = {}

    def read(self, word: Placed) -> Op | None:
        """The operation, or None with a finding (PP132)."""
        op = self._known.get(word.text)
        if op is None:
            op = self._parse(word)
            if op is not None:
                self._known[word.text] = op
        return op

    def _parse(self, word: Placed) -> Op | None:
        try:
            op = parse_op(word.text)
        except ValueError:
            near = near_op(word.text)
            self._findings.add(
                BAD_OPERATION,
                word.location,
                f"`{shortened(word.text)}` is not an operation",
                help=f"did you mean `{near}`?" if near else "operations look like 2F0, 3SEND_B1 or WAIT(1RECV_F0)",
            )
            return None
        if _largest(op) > MAX_NUMBER:
            message = f"`{shortened(word.text)}` has a number above {MAX_NUMBER:,}"
            self._findings.add(BAD_OPERATION, word.location, message)
            return None
        return op


def _largest(op: Op) -> int:
    inner = 0 if op.target is None else _largest(op.target)
    return max(op.stage, op.micro_batch or 0, op.index or 0, inner)


def near_op(text: str) -> str | None:
    """The operation that was probably meant by the wrong ``text``; None without a similar one."""
    text = text.strip()
    if match := _LOOSE_TARGETED.fullmatch(text):
        inner = match[2] if _is_op(match[2]) else near_op(match[2])
        candidate = f"{match[1].upper()}({inner})"
        return candidate if inner and _is_op(candidate) else None
    match = _LOOSE.match(text)
    if match is None:
        return None
    kind = nearest_name(match[2], [str(kind) for kind in KINDS if kind not in TARGET_KINDS])
    stage, micro_batch, axis = str(int(match[1])), match[3] and str(int(match[3])), match[4] or ""
    candidates = (f"{stage}{kind}{micro_batch}{axis}", f"{stage}{kind}{micro_batch}", f"{stage}{kind}")
    return next((c for c in candidates if kind and c != text and _is_op(c)), None)


def _is_op(text: str) -> bool:
    try:
        parse_op(text)
    except ValueError:
        return False
    return True


_PROBE = 10**15
"""A micro-batch whose number no stage and no index has: it can be found in a text."""

_WITHOUT_DIGITS = MappingProxyType({ord(digit): None for digit in "0123456789"})


def op_texts(columns: Columns) -> list[str]:
    """``str(op)`` of each row, in order."""
    values = columns.values
    work_item = values["work_item"]
    around = (values["kind"], values["stage"], values["target_kind"], values["index"], values["axis"])
    key = packed(*around, (work_item != NONE).astype(np.int64))
    _, examples, sort = np.unique(key, return_index=True, return_inverse=True)
    halves = [_around_work_item(columns, row) for row in examples.tolist()]
    work_items = [work_item_text(number, columns.num_splits) for number in range(int(work_item.max(initial=NONE)) + 1)]
    work_items.append("")  # the last entry, which NONE indexes
    texts = []
    for i, number in zip(sort.tolist(), work_item.tolist(), strict=True):
        before, after = halves[i]
        texts.append(f"{before}{work_items[number]}{after}")
    for row, op in columns.unusual.items():
        texts[row] = str(op)
    return texts


def _around_work_item(columns: Columns, row: int) -> tuple[str, str]:
    """Return the text of a row before and after its work item; without a work item, the whole text and nothing."""
    kind, stage, work_item, target_kind, index, axis = (
        int(columns.values[name][row]) for name in ("kind", "stage", "work_item", "target_kind", "index", "axis")
    )
    op = op_from_columns(kind, stage, NONE if work_item == NONE else _PROBE, target_kind, index, axis, num_splits=0)
    before, _, after = str(op).partition(str(_PROBE))
    return before, after


def kinds_of(texts: Iterable[str]) -> list[OpKind]:
    """Return the kind of each operation from its text form, which without numbers depends on the kind alone.

    Raises:
        ValueError: the first of some texts that differ in numbers alone is not the text form of an operation.
    """
    by_form: dict[str, OpKind] = {}
    kinds = []
    for text in texts:
        form = text.translate(_WITHOUT_DIGITS)
        kind = by_form.get(form)
        if kind is None:
            kind = by_form[form] = parse_op(text).kind
        kinds.append(kind)
    return kinds
