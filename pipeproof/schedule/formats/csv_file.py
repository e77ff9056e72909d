"""PyTorch's CSV of a pipeline schedule: both of its formats are read, and the compute-only one is written.

Files of releases before 2.7 are read, too: there ``BW`` is the whole backward, and ``B`` next to a ``W`` of the same
stage and micro-batch is ``I``.

``PipelineScheduleMulti._dump_csv`` and ``_PipelineScheduleRuntime._dump_csv``
(torch 2.13, ``torch/distributed/pipelining/schedules.py``) write one line for
each rank and one cell for each ``_Action``. In the compute-only format a cell
is a time step and may be empty (the rank idles); in the format with
communication cells are in the order of issue, and none is empty. Cells are

- ``2F0``, ``2B0`` (a whole backward), ``2I0``, ``2W0``;
- ``(0F7;7B3)OVERLAP_F_B``: a forward and a backward that run side by side;
- with communication also ``2SEND_F0``, ``2RECV_F0``, ``2SEND_B0``,
  ``2RECV_B0``, and for sharded weights ``2UNSHARD``, ``2RESHARD``, ``2REDUCE_GRAD``.

Their reader matches the beginning of a cell and ignores the rest: ``2F0xyz`` passes there; here the whole cell must
match. Like theirs, this reader accepts blanks around an operation, and cells in double quotes.

PyTorch itself writes the format with communication, with the transfers that it adds (``_dump_csv``). The written cells
of a rank are in the order of its program. PyTorch's own files of the compute-only format also have an empty cell for
each time step at which a rank idles; its reader does not need them, and time steps have no meaning if computations
differ in length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import shortened
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.inexpressible import require_bare, require_computations, steps_of
from pipeproof.schedule.formats.op_text import OpReader
from pipeproof.schedule.formats.schedule_size_checks import RawSchedule
from pipeproof.schedule.formats.text_tokens import Findings, Placed, end_of, first_line, lines_of
from pipeproof.schedule.ops import COMPUTE_KINDS, META_KINDS, TRANSFER_KINDS, Op, OpKind
from pipeproof.specs.schedule import BAD_OPERATION

WEIGHT_KINDS = frozenset({OpKind.UNSHARD, OpKind.RESHARD, OpKind.REDUCE_GRAD})
CELL_KINDS = COMPUTE_KINDS | (TRANSFER_KINDS - META_KINDS) | WEIGHT_KINDS
"""The kinds of operations that PyTorch's CSV has."""

_OVERLAP = re.compile(r"\([ \t]*([^();]*?)[ \t]*;[ \t]*([^();]*?)[ \t]*\)OVERLAP_F_B")
_CELL = re.compile(r'[ \t]*("?)([^",]*?)\1[ \t]*(,|\Z)')
_OLD_WHOLE = re.compile(r"(\d+)BW(\d+)")
_SOME_CELL = re.compile(r'(?:^|,)[ \t"]*(?:\(?\d+_?[A-Za-z]|,)')


def looks_like_csv(text: str) -> bool:
    """Return True if a cell of the first line that is not blank is empty or begins as in such a file."""
    return _SOME_CELL.search(first_line(text)) is not None


def read_csv(text: str, file: str, findings: Findings) -> tuple[RawSchedule, Sequence[Location]]:
    """Each line as the cells of a rank, and the locations of empty cells; cells of an overlapped pair share a batch.

    Findings: PP131 for a blank line between others, PP132 for cells.
    """
    lines, reader = lines_of(text, file, findings, blank=" \t,"), _Reader(findings)
    for line in lines:
        reader.rank(_words(line))
    return RawSchedule(_current(reader.rows), reader.origins, [*map(end_of, lines)], Location(file)), reader.idle


def _current(rows_by_rank: list[list[Row]]) -> list[list[Row]]:
    """The rows, with ``I`` for each ``B`` next to a ``W`` from an older release, which writes no ``I``."""
    by_kind: dict[OpKind, set[tuple[int, int, int | None]]] = {kind: set() for kind in OpKind}
    for rank, rows in enumerate(rows_by_rank):
        for row in rows:
            by_kind[row.op.kind].add((rank, row.op.stage, row.op.micro_batch))
    halves = by_kind[OpKind.BACKWARD_WEIGHT]
    if by_kind[OpKind.BACKWARD_INPUT] or not halves or not halves <= by_kind[OpKind.BACKWARD]:
        return rows_by_rank
    return [
        [
            replace(row, op=row.op._replace(kind=OpKind.BACKWARD_INPUT))
            if row.op.kind is OpKind.BACKWARD and (rank, row.op.stage, row.op.micro_batch) in halves else row
            for row in rows
        ]
        for rank, rows in enumerate(rows_by_rank)
    ]  # fmt: skip


def _words(line: Placed) -> list[Placed]:
    """The cells of a line, stripped; a line that cannot be split is one cell."""
    words, offset, continues = [], 0, True
    while continues:
        match = _CELL.match(line.text, offset)
        start, stop = match.span(2) if match else (offset, len(line.text))
        words.append(line.part(start, stop))
        continues = match is not None and match[3] == ","
        offset = match.end() if match else stop
    return words


class _Reader:
    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._ops = OpReader(findings)
        self.rows: list[list[Row]] = []
        self.origins: list[Location] = []
        self.idle: list[Location] = []

    def rank(self, words: Iterable[Placed]) -> None:
        """The cells of the next rank."""
        self.rows.append([])
        num_pairs = 0
        for word in words:
            if not word.text:
                self.idle.append(word.place)
            elif "OVERLAP" in word.text or word.text.startswith("("):
                self._pair(word, num_pairs)
                num_pairs += 1
            elif (op := self._op(word)) is not None:
                self._append(op, word, NONE)

    def _append(self, op: Op, word: Placed, batch: int) -> None:
        self.rows[-1].append(Row(op, batch=batch, origin=len(self.origins)))
        self.origins.append(word.place)

    def _op(self, word: Placed) -> Op | None:
        whole = _OLD_WHOLE.fullmatch(word.text)
        op = self._ops.read(word if whole is None else replace(word, text=f"{whole[1]}B{whole[2]}"))
        if op is not None and (op.kind not in CELL_KINDS or op.axis is not None):
            message = f"{op} is an operation of our text form, which PyTorch's CSV does not have"
            self._bad(word, message, "write the schedule in the text form, one `rank N:` line for each rank")
            return None
        return op

    def _pair(self, word: Placed, batch: int) -> None:
        match = _OVERLAP.fullmatch(word.text)
        if match is None:
            message = f"`{shortened(word.text)}` is not an overlapped pair"
            self._bad(word, message, "write it as in (0F7;7B3)OVERLAP_F_B")
            return
        first, second = (word.part(*match.span(group)) for group in (1, 2))
        forward, backward = self._op(first), self._op(second)
        if forward is None or backward is None:
            return
        if forward.kind is not OpKind.FORWARD or backward.kind not in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
            self._bad(word, f"{forward} and {backward} are not a forward and a backward", "only such pairs overlap")
            return
        self._append(forward, first, batch)
        self._append(backward, second, batch)

    def _bad(self, word: Placed, message: str, help: str) -> None:
        self._findings.add(BAD_OPERATION, word.location, message, help)


_FORM = "PyTorch's compute-only CSV"


def csv_text(rows_by_rank: Sequence[Sequence[Row]]) -> str:
    """The compute-only format: a line for each rank, a cell for each computation or overlapped pair.

    Raises:
        InexpressibleError: there is more than computations and overlapped pairs.
    """
    for rows in rows_by_rank:
        require_computations(rows, _FORM, "leave it out with --only-computations: PyTorch adds its own")
        require_bare(rows, _FORM)
    return "".join(f"{','.join(map(_cell, steps_of(rows, _FORM)))}\n" for rows in rows_by_rank)


def _cell(step: Sequence[Row]) -> str:
    if len(step) == 1:
        return str(step[0].op)
    forward, backward = step
    return f"({forward.op};{backward.op})OVERLAP_F_B"
