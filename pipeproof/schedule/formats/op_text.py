"""Operations as people type them: the strict text form, with what was probably meant where it is not one."""

from __future__ import annotations

import re

from pipeproof.schedule.formats.placed import Findings, Placed
from pipeproof.schedule.ops import KINDS, TARGET_KINDS, Op, parse_op
from pipeproof.specs.problems import nearest_name, shortened
from pipeproof.specs.schedule_file import BAD_OPERATION

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
    """The largest number in an operation's text."""
    inner = 0 if op.target is None else _largest(op.target)
    return max(op.stage, op.micro_batch or 0, op.index or 0, inner)


def near_op(text: str) -> str | None:
    """The operation that was probably meant by ``text``, which is none; None where nothing is near."""
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
