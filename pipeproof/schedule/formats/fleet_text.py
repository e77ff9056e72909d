"""The strings of Paddle Fleet's static scheduler: what each rank computes, one line for each rank.

``get_static_scheduler`` of Paddle 3.3.1 (``PipelineParallel`` and
``PipelineParallelWithInterleave`` in
``paddle/distributed/fleet/meta_parallel/pipeline_parallel.py``) gives for one
rank the string ``f0;f1;b0;b1;``, or with several stages on each rank
``f0_vp0;f0_vp1;b0_vp1;b0_vp0;``.

EBNF::

    file  = { line } ;                       (* line r is rank r *)
    line  = step , { ";" , step } , [ ";" ] ;
    step  = ( "f" | "b" ) , micro_batch , [ "_vp" , chunk ] ;

Chunk ``c`` of rank ``r`` is stage ``c * p + r`` of the ``p`` ranks. Backwards are whole, nothing overlaps. Either all
steps of a file name their chunk, or none does. Blanks around a step are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import shortened
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.inexpressible import InexpressibleError, require_bare, require_computations
from pipeproof.schedule.formats.op_text import MAX_NUMBER
from pipeproof.schedule.formats.schedule_size_checks import RawSchedule
from pipeproof.schedule.formats.text_tokens import Findings, Placed, end_of, first_line, lines_of
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.specs.schedule import BAD_OPERATION

_FORM = "Fleet's static schedule"
_NUMBER = r"(0|[1-9][0-9]*)"
_STEP = re.compile(rf"([fb]){_NUMBER}(?:_vp{_NUMBER})?")
_LOOSE_STEP = re.compile(r"\s*([fb])[ _]?0*([0-9]+)(?:[ _]*v[a-z]*[ _]*0*([0-9]+))?\s*", re.IGNORECASE | re.ASCII)
_FIRST_STEP = re.compile(r"\s*[fb] ?[0-9]+ *(?:_|;|\Z)", re.IGNORECASE)
_KIND = {"f": OpKind.FORWARD, "b": OpKind.BACKWARD}
_LETTER = {kind: letter for letter, kind in _KIND.items()}


def looks_like_fleet(text: str) -> bool:
    """Return True if the first line that is not blank begins as in such a file."""
    return _FIRST_STEP.match(first_line(text)) is not None


def read_fleet(text: str, file: str, findings: Findings) -> RawSchedule:
    """Every line as the steps of a rank; blank lines at the end do not count.

    Findings: PP131 for a blank line between others, PP132 for steps.
    """
    lines = lines_of(text, file, findings)
    reader = _Reader(len(lines), findings)
    for rank, line in enumerate(lines):
        reader.rank(rank, line)
    return RawSchedule(reader.rows, reader.origins, [*map(end_of, lines)], Location(file))


class _Reader:
    def __init__(self, num_ranks: int, findings: Findings) -> None:
        self._num_ranks, self._findings = num_ranks, findings
        self._names_chunks: bool | None = None
        self.rows: list[list[Row]] = []
        self.origins: list[Location] = []

    def rank(self, rank: int, line: Placed) -> None:
        """The steps of the next rank."""
        self.rows.append([])
        stop = len(line.text.rstrip())
        offset = 0
        while offset < stop:
            behind = line.text.find(";", offset)
            behind = stop if behind < 0 else behind
            self._step(rank, _stripped(line, offset, behind))
            offset = behind + 1

    def _step(self, rank: int, word: Placed) -> None:
        match = _STEP.fullmatch(word.text)
        if match is None:
            near = _near(word.text)
            fix = f"did you mean `{near}`?" if near else "steps look like f0 and b0, or f0_vp1 and b0_vp1"
            text = f"`{shortened(word.text)}`" if word.text else "an empty place"
            self._bad(word, f"{text} is not a step of {_FORM}", fix)
            return
        letter, micro_batch, chunk = match.groups()
        if any(
            len(number) > len(str(MAX_NUMBER)) or int(number) > MAX_NUMBER for number in (micro_batch, chunk or "0")
        ):
            self._bad(word, f"`{shortened(word.text)}` has a number above {MAX_NUMBER:,}")
            return
        if self._names_chunks is None:
            self._names_chunks = chunk is not None
        if self._names_chunks != (chunk is not None):
            difference = (
                "no chunk, and the steps before it have one" if chunk is None else "a chunk, and those before it none"
            )
            self._bad(word, f"`{word.text}` has {difference}", "name the chunk of every step, or of none")
            return
        stage = int(chunk or 0) * self._num_ranks + rank
        self.rows[-1].append(Row(Op(_KIND[letter], stage, int(micro_batch)), origin=len(self.origins)))
        self.origins.append(word.place)

    def _bad(self, word: Placed, message: str, help: str | None = None) -> None:
        self._findings.add(BAD_OPERATION, word.location, message, help)


def _stripped(line: Placed, start: int, stop: int) -> Placed:
    text = line.text[start:stop]
    before = len(text) - len(text.lstrip())
    return line.part(start + before, start + before + len(text.strip()))


def _near(text: str) -> str | None:
    """The step that was probably meant; None without a similar one."""
    match = _LOOSE_STEP.fullmatch(text)
    if match is None:
        return None
    return f"{match[1].lower()}{match[2]}" + (f"_vp{match[3]}" if match[3] else "")


def fleet_text(rows_by_rank: Sequence[Sequence[Row]]) -> str:
    """A schedule as Fleet's static scheduler prints it; chunks are named if any rank has more than one stage.

    Raises:
        InexpressibleError: backwards in two parts, pairs, other operations, or stages not assigned round-robin.
    """
    num_ranks = len(rows_by_rank)
    for rank, rows in enumerate(rows_by_rank):
        require_computations(rows, _FORM, "leave it out with --only-computations")
        require_bare(rows, _FORM)
        for row in rows:
            _require_step(row, rank, num_ranks)
    named = any(row.op.stage >= num_ranks for rows in rows_by_rank for row in rows)
    lines = ("".join(_step_text(row.op, num_ranks, named=named) for row in rows) for rows in rows_by_rank)
    return "".join(f"{line}\n" for line in lines)


def _require_step(row: Row, rank: int, num_ranks: int) -> None:
    op = row.op
    if op.kind not in _LETTER:
        message = f"{op} is a part of a backward, and {_FORM} has only whole ones"
        raise InexpressibleError(message, row=row, help="PyTorch's CSV and our text form have both")
    if row.batch != NONE:
        message = f"{op} overlaps with another computation, and {_FORM} has no such pairs"
        raise InexpressibleError(message, row=row, help="PyTorch's CSV and our text form have such pairs")
    if op.stage % num_ranks != rank:
        message = (
            f"stage {op.stage} is on rank {rank}, and {_FORM} assigns stages round-robin: "
            f"rank r has r, {num_ranks} + r, .."
        )
        raise InexpressibleError(message, row=row)


def _step_text(op: Op, num_ranks: int, *, named: bool) -> str:
    chunk = f"_vp{op.stage // num_ranks}" if named else ""
    return f"{_LETTER[op.kind]}{op.micro_batch}{chunk};"
