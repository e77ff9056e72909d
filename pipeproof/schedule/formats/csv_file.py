"""PyTorch's CSV of a pipeline schedule, in both of its formats.

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

Their reader matches the beginning of a cell and ignores the rest, so that
``2F0xyz`` passes there; here the whole cell must match. As theirs does, this
reader takes blanks around an operation, and cells in double quotes.

The written cells of a rank are in the order of its program. PyTorch's own files of
the compute-only format also have an empty cell for each time step at which a
rank idles; its reader does not need them, and time steps mean nothing once
computations differ in length.
"""

from __future__ import annotations

import re

# --- Sends and receives around computations, in the order in which PyTorch adds them ---
# ``_add_send_recv`` of torch 2.13 (``torch/distributed/pipelining/schedules.py``)
# visits the ranks round-robin; a rank takes its next operation, or overlapped
# pair, if its inputs have arrived. A send comes right after the computation of
# its tensor. Its receive goes at that moment to the end of what the receiving
# rank has got so far, so that the transfers between two ranks are in one order
# on both sides. Between two stages of one rank nothing is sent.
#
# Receives are therefore posted as early as their sends, and earlier than our
# own lowering posts them, which does it just before they are needed.
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import shortened
from pipeproof.diagnostics.source import LINE_BREAK
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.inexpressible import InexpressibleError, require_bare, require_computations, steps_of
from pipeproof.schedule.formats.op_text import OpReader
from pipeproof.schedule.formats.text_tokens import Findings, Placed, end_of, placed_line, row_attributes, with_peers
from pipeproof.schedule.formats.torch_runtime import runtime_rows
from pipeproof.schedule.ops import COMPUTE_KINDS, META_KINDS, TRANSFER_KINDS, Op, OpKind
from pipeproof.specs.schedule import BAD_OPERATION, NO_OPERATIONS

# Actions that PyTorch adds around computations for the weights: gathering, dropping, and finishing their gradients.
# ``_add_unshard_reshard`` and ``_add_reduce_grad`` of torch 2.13
# (``torch/distributed/pipelining/schedules.py``):
#
# - Before an operation, the stages among the next three of the rank that are
#   not there are gathered (UNSHARD), in the order in which they are needed, and
#   those that are there and not among the next three are dropped (RESHARD)
#   before that. At the end all are dropped.
# - Behind the last B or W of a stage its gradients are finished (REDUCE_GRAD):
#   reduced where weights are sharded, and divided by the number of
#   micro-batches. A file without it runs, and its gradients are that much too
#   large.
#
# Where several stages are dropped together, theirs go in the order of a hash
# table and ours in the order of their numbers; nothing depends on it.


NUM_AHEAD = 3
"""Stages whose weights are there at a time: one for a forward, one for a backward, one that is being gathered."""

_LAST_PARTS = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)


def with_weights(rows: Sequence[Row], num_micro_batches: int, form: str) -> Iterator[Row]:
    """The computations of a rank with UNSHARD, RESHARD and REDUCE_GRAD rows. Linear in operations times stages.

    ``form`` is the name of the format in messages.

    Raises:
        InexpressibleError: rows are one call that is no overlapped pair.
    """
    steps = list(steps_of(rows, form))
    gathered: set[int] = set()
    num_done: Counter[int] = Counter()
    for step, ahead in zip(steps, _stages_ahead(steps), strict=True):
        for stage in sorted(gathered.difference(ahead)):
            yield Row(Op(OpKind.RESHARD, stage))
        for stage in ahead:
            if stage not in gathered:
                yield Row(Op(OpKind.UNSHARD, stage))
        gathered = set(ahead)
        yield from step
        for op in (row.op for row in step):
            num_done[op.stage] += op.kind in _LAST_PARTS
            if op.kind in _LAST_PARTS and num_done[op.stage] == num_micro_batches:
                yield Row(Op(OpKind.REDUCE_GRAD, op.stage))
    for stage in sorted(gathered):
        yield Row(Op(OpKind.RESHARD, stage))


def _stages_ahead(steps: Sequence[Sequence[Row]]) -> list[tuple[int, ...]]:
    """For each step the next three stages from it on, in order; both of a pair where it has the third.

    Goes from the last step to the first and keeps the stages in the order of their next use.
    """
    ahead: list[tuple[int, ...]] = []
    next_use: list[tuple[int, int]] = []  # (place of the step, stage), the nearest first
    for place in reversed(range(len(steps))):
        stages = list(dict.fromkeys(row.op.stage for row in steps[place]))
        next_use = [(place, stage) for stage in stages] + [use for use in next_use if use[1] not in stages]
        furthest = next_use[:NUM_AHEAD][-1][0]
        ahead.append(tuple(stage for use, (step, stage) in enumerate(next_use) if use < NUM_AHEAD or step == furthest))
    return ahead[::-1]


_Need = tuple[bool, int, int | None]
"""Forward or backward, stage and micro-batch: what a computation waits for."""


@dataclass
class _Rank:
    steps: list[tuple[Row, ...]]
    place: int = 0
    rows: list[Row] = field(default_factory=list)
    arrived: set[_Need] = field(default_factory=set)
    """The inputs that have arrived, or were computed on the rank."""

    @property
    def step(self) -> tuple[Row, ...]:
        """The next step."""
        return self.steps[self.place]


def with_transfers(rows_by_rank: Sequence[Sequence[Row]], form: str) -> tuple[tuple[Row, ...], ...]:
    """Computations, with what else their ranks do, and SEND and RECV rows, which have no peer yet.

    Linear in operations times ranks. ``form`` is the name of the format in messages.

    Raises:
        InexpressibleError: a stage is on two ranks, or the computations cannot run to their end in their order.
    """
    rank_of = _rank_of_stage(rows_by_rank, form)
    ranks = [_Rank(list(steps_of(rows, form))) for rows in rows_by_rank]
    last = max(rank_of, default=0)
    under_way = [rank for rank in ranks if rank.steps]
    while under_way:
        moved = False
        for rank in under_way:
            if all(_is_ready(row.op, rank, last) for row in rank.step):
                _take(rank, ranks, rank_of)
                moved = True
        if not moved:
            row = under_way[0].step[0]
            raise InexpressibleError(f"the computations cannot run in this order: {row.op} lacks its input", row=row)
        under_way = [rank for rank in under_way if rank.place < len(rank.steps)]
    return tuple(tuple(rank.rows) for rank in ranks)


def _rank_of_stage(rows_by_rank: Sequence[Sequence[Row]], form: str) -> Mapping[int, int]:
    rank_of: dict[int, int] = {}
    for rank, rows in enumerate(rows_by_rank):
        for row in (row for row in rows if row.op.kind in COMPUTE_KINDS):
            first = rank_of.setdefault(row.op.stage, rank)
            if first != rank:
                message = f"stage {row.op.stage} is on ranks {first} and {rank}, and in {form} a stage is on one rank"
                raise InexpressibleError(message, row=row)
    return rank_of


def _is_ready(op: Op, rank: _Rank, last: int) -> bool:
    """Return True if the rank has the input of an operation from another stage."""
    forward = op.kind is OpKind.FORWARD
    first = 0 if forward else last
    return op.kind not in _HAND_ON or op.stage == first or (forward, op.stage, op.micro_batch) in rank.arrived


def _take(rank: _Rank, ranks: Sequence[_Rank], rank_of: Mapping[int, int]) -> None:
    """The next step of a rank, with the sends behind it, and their receives on other ranks."""
    step = rank.step
    rank.place += 1
    rank.rows += step
    for row in step:
        op, forward = row.op, row.op.kind is OpKind.FORWARD
        stage = op.stage + (1 if forward else -1)
        if op.kind not in _HAND_ON or stage not in rank_of:
            continue
        receiver = ranks[rank_of[stage]]
        receiver.arrived.add((forward, stage, op.micro_batch))
        if receiver is not rank:
            send, receive = _FORWARD if forward else _BACKWARD
            rank.rows.append(Row(Op(send, op.stage, op.micro_batch)))
            receiver.rows.append(Row(Op(receive, stage, op.micro_batch)))


_HAND_ON = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT})
"""Kinds that need something of one neighbouring stage and make something for the other."""
_FORWARD = (OpKind.SEND_FORWARD, OpKind.RECV_FORWARD)
_BACKWARD = (OpKind.SEND_BACKWARD, OpKind.RECV_BACKWARD)


WEIGHT_KINDS = frozenset({OpKind.UNSHARD, OpKind.RESHARD, OpKind.REDUCE_GRAD})
CELL_KINDS = COMPUTE_KINDS | (TRANSFER_KINDS - META_KINDS) | WEIGHT_KINDS
"""The kinds of operations that PyTorch's CSV has."""

_OVERLAP = re.compile(r"\([ \t]*([^();]*?)[ \t]*;[ \t]*([^();]*?)[ \t]*\)OVERLAP_F_B")
_CELL = re.compile(r'[ \t]*("?)([^",]*?)\1[ \t]*(,|\Z)')
_OLD_WHOLE = re.compile(r"(\d+)BW(\d+)")
_SOME_CELL = re.compile(r'(?:^|,)[ \t"]*(?:\(?\d+_?[A-Za-z]|,)')


@dataclass(frozen=True, slots=True)
class CsvSchedule:
    """One row for each operation of each rank, in order; the two of an overlapped pair share a ``batch``.

    A row's ``origin`` is a place in ``origins``. ``ends`` are the places
    behind the last cell of each rank, ``idle`` those of empty cells.
    """

    rows_by_rank: tuple[tuple[Row, ...], ...]
    origins: tuple[Location, ...]
    ends: tuple[Location, ...]
    idle: tuple[Location, ...]

    def first_other_than_compute(self) -> Row | None:
        """The first row of the format with communication; None in a file of the compute-only format."""
        rows = (row for rows in self.rows_by_rank for row in rows)
        return next((row for row in rows if row.op.kind not in COMPUTE_KINDS), None)


def looks_like_csv(text: str) -> bool:
    """Return True if a cell of the first line that is not blank is empty or begins as in such a file."""
    first = next((line for line in LINE_BREAK.split(text) if line.strip()), "")
    return _SOME_CELL.search(first) is not None


def read_csv(text: str, file: str, findings: Findings) -> CsvSchedule:
    """Every line as the cells of a rank; blank lines at the end do not count.

    Findings: PP131 for a blank line between others, PP132 for cells.
    """
    lines = [placed_line(line, file, number) for number, line in enumerate(LINE_BREAK.split(text), start=1)]
    while lines and not lines[-1].text.strip():
        lines.pop()
    reader = _Reader(findings)
    for rank, line in enumerate(lines):
        reader.rank(_words(line))
        if not line.text.strip(" \t,"):
            findings.add(NO_OPERATIONS, line.location, f"line {rank + 1} is rank {rank}, and has no operations")
    return CsvSchedule(
        tuple(map(tuple, _current(reader.rows))), tuple(reader.origins), tuple(map(end_of, lines)), tuple(reader.idle)
    )


def _current(rows_by_rank: list[list[Row]]) -> list[list[Row]]:
    """The rows with a backward as ``I`` where an older release wrote ``B`` next to each ``W``, and no ``I`` at all."""
    found = {kind: _places(rows_by_rank, kind) for kind in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)}
    halves = found[OpKind.BACKWARD_WEIGHT]
    if found[OpKind.BACKWARD_INPUT] or not halves or not halves <= _places(rows_by_rank, OpKind.BACKWARD):
        return rows_by_rank
    return [
        [
            replace(row, op=row.op._replace(kind=OpKind.BACKWARD_INPUT))
            if row.op.kind is OpKind.BACKWARD and (rank, row.op.stage, row.op.micro_batch) in halves else row
            for row in rows
        ]
        for rank, rows in enumerate(rows_by_rank)
    ]  # fmt: skip


def _places(rows_by_rank: list[list[Row]], kind: OpKind) -> set[tuple[int, int, int | None]]:
    numbered = ((rank, row.op) for rank, rows in enumerate(rows_by_rank) for row in rows)
    return {(rank, op.stage, op.micro_batch) for rank, op in numbered if op.kind is kind}


def _words(line: Placed) -> list[Placed]:
    """The cells of a line without what surrounds them; what cannot be split is one cell."""
    words, place, continues = [], 0, True
    while continues:
        match = _CELL.match(line.text, place)
        start, stop = match.span(2) if match else (place, len(line.text))
        words.append(line.part(start, stop))
        continues = match is not None and match[3] == ","
        place = match.end() if match else stop
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


_FORM = "PyTorch's CSV"
_COMPUTE_FORM = "PyTorch's compute-only CSV"


def csv_text(rows_by_rank: Sequence[Sequence[Row]]) -> str:
    """The compute-only format: a line for each rank, a cell for each computation or overlapped pair.

    Raises:
        InexpressibleError: there is more than computations and overlapped pairs.
    """
    for rows in rows_by_rank:
        require_computations(rows, _COMPUTE_FORM, "write csv-comms, or leave it out with --only-computations")
        require_bare(rows, _COMPUTE_FORM)
    return _lines(rows_by_rank, _COMPUTE_FORM)


def csv_comms_text(rows_by_rank: Sequence[Sequence[Row]]) -> str:
    """The format with communication.

    Computations alone get what PyTorch adds to its compute-only format: the
    handling of weights (``torch_weights``), then transfers in its order (``torch_transfers``).
    Rows that have communication must be what PyTorch's runtime makes of some
    cells (``torch_runtime``), waits and communicators included; these cells
    are written.

    Raises:
        InexpressibleError: the rows are something else.
    """
    rows = [row for rows in rows_by_rank for row in rows]
    if all(row.op.kind in COMPUTE_KINDS for row in rows):
        require_bare(rows, _FORM)
        num_micro_batches = 1 + max((row.op.micro_batch or 0 for row in rows), default=-1)
        weighted = [list(with_weights(mine, num_micro_batches, _FORM)) for mine in rows_by_rank]
        return _lines(with_transfers(weighted, _FORM), _FORM)
    return _lines(_actions(rows_by_rank), _FORM)


def _actions(rows_by_rank: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The actions of which PyTorch's runtime makes these rows."""
    actions: list[list[Row]] = []
    for rows in rows_by_rank:
        actions.append([])
        for row in rows:
            if row.op.kind in CELL_KINDS and row.op.axis is None and row.op.split is None:
                actions[-1].append(Row(row.op, batch=row.batch, origin=row.origin))
            elif row.op.kind is not OpKind.WAIT:
                raise InexpressibleError(f"{row.op} is no operation of {_FORM}", row=row)
    stages = [{row.op.stage for row in mine if row.op.kind in COMPUTE_KINDS} for mine in actions]
    num_stages = 1 + max((stage for mine in stages for stage in mine), default=-1)
    bare = [[replace(row, origin=NONE) for row in mine] for mine in actions]
    run = with_peers(
        [[*runtime_rows(mine, own, num_stages)] for mine, own in zip(bare, stages, strict=True)], (), Findings()
    )  # a transfer without a peer is left without: it differs then
    for done, given in zip(run, rows_by_rank, strict=True):
        _require_equal(done, given)
    return actions


def _require_equal(done: Sequence[Row], given: Sequence[Row]) -> None:
    """Refuse the first row that PyTorch's runtime would not do so."""
    last = given[-1] if given else None
    for expected, row in zip_longest(done, given):
        if expected is not None and row is not None and expected == replace(row, origin=NONE):
            continue
        actual = "ends" if row is None else f"has {_row_text(row)}"
        wanted = "would end" if expected is None else f"would run {_row_text(expected)}"
        message = f"the program {actual} where PyTorch's runtime {wanted}, and {_FORM} has only the operations of that"
        fix = "leave communication out with --only-computations: PyTorch adds its own"
        raise InexpressibleError(message, row=row or last, help=fix)


def _row_text(row: Row) -> str:
    return f"{row.op}{row_attributes(row)}"


def _lines(rows_by_rank: Sequence[Iterable[Row]], form: str) -> str:
    return "".join(f"{','.join(_cell(step) for step in steps_of([*rows], form))}\n" for rows in rows_by_rank)


def _cell(step: Sequence[Row]) -> str:
    if len(step) == 1:
        return str(step[0].op)
    forward, backward = step
    return f"({forward.op};{backward.op})OVERLAP_F_B"
