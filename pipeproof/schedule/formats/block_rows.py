"""Rows of blocks, as papers draw schedules and as ``schedule show`` prints them: one line for each rank.

EBNF::

    file  = { other } , row , { row } , { other } ;      (* other: lines without a block, such as title and legend *)
    row   = [ "rank" , number , [ ":" ] ] , { block | idle } ;
    block = part , [ "+" , part ] , { fill } ;           (* two parts overlap *)
    part  = [ stage ] , ( "F" | "B" | "I" | "W" ) , micro_batch , [ "." , split ] ;
    fill  = "-" | "=" | "~" ;                            (* of a rank's first, second, third stage *)
    idle  = " " | "." | "," | ";" | "|" | "u" ;

Parts either all name their stage or none does. Without stages, a rank has as
many as there are forwards of one micro-batch on it: its forwards go through
them in order, its backwards in reverse. Several stages of a rank are placed in
a loop (rank ``r`` of ``p`` has ``r``, ``r + p``, ..) or, if there are two, in a
V (``r`` and ``2p - 1 - r``): in the one with which the rows end sooner.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import shortened
from pipeproof.diagnostics.source import LINE_BREAK
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.op_text import MAX_NUMBER
from pipeproof.schedule.formats.text_tokens import Findings, Placed, end_of, placed_line
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, asap, even_costs
from pipeproof.specs.schedule import BAD_OPERATION, WRONG_RANKS

_NUMBER = r"(?:0|[1-9][0-9]*)"
_PART = rf"(?:(?<![^\s,;|.:+])({_NUMBER}))?([FBIW])({_NUMBER})(?:\.s?({_NUMBER}))?(?![0-9])"
_BLOCK = re.compile(rf"{_PART}(?:\+{_PART})?(-+|=+|~+)?")
_IDLE = re.compile(r"[\s.,;|u]+")
_HEAD = re.compile(rf"\s*rank ({_NUMBER})(?:-{_NUMBER})?:?(?=\s)")
_PICTURE_ROW = re.compile(rf"rank {_NUMBER}(?:-{_NUMBER})? [.FBIW]")
_HAS_BLOCK = re.compile(r"(?<![\w.+-])[FBIW][0-9]")
_HAS_STAGES = re.compile(rf"\s*{_NUMBER}[FBIW][0-9]+(?:\s+{_NUMBER}[FBIW][0-9]+)+")
_LEGEND = re.compile(r"[FBIW] (?:forward|backward)")
"""The line below a picture; what follows has no rows."""
_FILLS = "-=~"
_NAME_STAGES = "name the stage of each block, as in `rank 0: 0F0 2F0`"


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """Rows of each rank; a row's ``origin`` is a place in ``origins``. ``ends`` are the places behind each rank's last.

    ``placement`` names the placement that was inferred: ``loop`` or ``V``; empty where there was no choice.
    """

    rows_by_rank: tuple[tuple[Row, ...], ...]
    origins: tuple[Location, ...]
    ends: tuple[Location, ...]
    placement: str


@dataclass(slots=True)
class _Part:
    kind: OpKind
    stage: int | None
    micro_batch: int
    split: int | None
    place: Location | None
    batch: int = NONE
    chunk: int | None = None


@dataclass(slots=True)
class _Rank:
    line: Placed
    parts: list[_Part] = field(default_factory=list)


def looks_like_blocks(text: str) -> bool:
    """Return True if a line is wholly a row of blocks, and blocks name no stage or are separated by blanks."""
    for line in LINE_BREAK.split(text):
        if line.lstrip().startswith("#"):
            continue
        if _HAS_STAGES.fullmatch(line) or _PICTURE_ROW.match(line):
            return True
        if _HAS_BLOCK.search(line):
            head = _HEAD.match(line)
            return not _BLOCK.sub("", _IDLE.sub(" ", line[head.end() if head else 0 :])).strip()
    return False


def read_blocks(text: str, file: str, findings: Findings) -> BlockSchedule:
    """Read every row of blocks; lines before and behind them are left out.

    Findings: PP132 for what is no block, and for rows that fit no placement; PP134 for ranks that are not in order.
    """
    lines = [placed_line(line, file, number) for number, line in enumerate(LINE_BREAK.split(text), start=1)]
    ranks: list[_Rank] = []
    for line in lines:
        if _LEGEND.match(line.text):
            break
        head = _HEAD.match(line.text)
        if line.text.lstrip().startswith("#") or not (
            head or _HAS_BLOCK.search(line.text) or _HAS_STAGES.match(line.text)
        ):
            continue
        if head and int(head[1]) != len(ranks):
            fix = "show it without tp, cp, ep and dp: a row for each pipeline rank"
            message = f"this row is rank {shortened(head[1])}, and rank {len(ranks)} comes next"
            findings.add(WRONG_RANKS, line.part(*head.span(1)).location, message, fix)
        ranks.append(_Rank(line))
        _read_row(ranks[-1], head.end() if head else 0, findings)
    findings.raise_any()
    placement = _set_stages(ranks, Location(file), findings)
    findings.raise_any()
    origins = tuple(part.place or Location(file) for rank in ranks for part in rank.parts)
    number = iter(range(len(origins)))
    rows = tuple(tuple(Row(_op(part), origin=next(number), batch=part.batch) for part in rank.parts) for rank in ranks)
    return BlockSchedule(rows, origins, tuple(end_of(rank.line) for rank in ranks), placement)


def _op(part: _Part) -> Op:
    assert part.stage is not None
    return Op(part.kind, part.stage, part.micro_batch, split=part.split)


def _read_row(rank: _Rank, start: int, findings: Findings) -> None:
    text, num_pairs = rank.line.text, 0
    while start < len(text):
        if idle := _IDLE.match(text, start):
            start = idle.end()
            continue
        block = _BLOCK.match(text, start)
        if block is None:
            word = rank.line.part(start, start + len(text[start:].split()[0]))
            message = f"`{shortened(word.text)}` is not a block"
            findings.add(BAD_OPERATION, word.location, message, _block_help(word.text))
            return
        where = rank.line.part(*block.span()).location
        groups = [block.groups()[:4], block.groups()[4:8]]
        pair = groups[1][1] is not None
        for index, (stage, kind, micro_batch, split) in enumerate(groups[: 1 + pair]):
            if any(number and int(number[:9]) > MAX_NUMBER for number in (stage, micro_batch, split)):
                findings.add(BAD_OPERATION, where, f"`{shortened(block[0])}` has a number above {MAX_NUMBER:,}")
                return
            rank.parts.append(
                _Part(
                    OpKind(kind), int(stage) if stage else None, int(micro_batch), int(split) if split else None, where,
                    num_pairs if pair else NONE, _FILLS.index(block[9][0]) if block[9] and not index else None,
                )
            )  # fmt: skip
        num_pairs += pair
        start = block.end()


def _block_help(text: str) -> str:
    if re.match(r"[FBIW](?![0-9A-Za-z])|[FBIW]{2}", text):
        return "a block without its micro-batch: the picture was too narrow, so print it wider (`COLUMNS=400`)"
    return "blocks look like F0, B0, I0, W0, or with their stage 1F0"


def _set_stages(ranks: Sequence[_Rank], start: Location, findings: Findings) -> str:
    """Give each part its stage, and return the name of the placement if one was chosen."""
    parts = [part for rank in ranks for part in rank.parts]
    named = next((part.stage is not None for part in parts), False)
    if other := next((part for part in parts if (part.stage is not None) != named), None):
        text = "no stage, and blocks before it name theirs" if named else "a stage, and blocks before it name none"
        fix = "name the stage of every block, or of none"
        findings.add(BAD_OPERATION, other.place, f"this block names {text}", fix)
    if named or findings.found:
        return ""
    num_chunks = max(Counter((id(rank), part.micro_batch, part.split) for rank in ranks for part in rank.parts
                             if part.kind is OpKind.FORWARD).values(), default=1)  # fmt: skip
    for number, rank in enumerate(ranks):
        _set_chunks(number, rank, num_chunks, findings)
    if findings.found:
        return ""
    num_ranks = len(ranks)
    placements: dict[str, Callable[[int, int], int]] = {"loop": lambda rank, chunk: chunk * num_ranks + rank}
    if num_chunks == 2:
        placements["V"] = lambda rank, chunk: 2 * num_ranks - 1 - rank if chunk else rank
    lengths = {name: _length(ranks, stage_of) for name, stage_of in placements.items()}
    possible = {name: length for name, length in lengths.items() if length is not None}
    if not possible or (len(possible) == 2 and len(set(possible.values())) == 1):
        what = "cannot run in this order" if not possible else "end at the same time"
        how = "with stage r on rank r" if num_chunks == 1 else "with stages " + " and ".join(
            f"in a {name}" for name in lengths
        )  # fmt: skip
        findings.add(BAD_OPERATION, start, f"the rows {what} {how}", _NAME_STAGES)
        return ""
    best = min(possible, key=lambda name: possible[name])
    for number, rank in enumerate(ranks):
        for part in rank.parts:
            assert part.chunk is not None
            part.stage = placements[best](number, part.chunk)
    return best if num_chunks > 1 else ""


def _set_chunks(number: int, rank: _Rank, num_chunks: int, findings: Findings) -> None:
    """Number the stages of a rank's parts: known from fills, else forwards in order and backwards in reverse."""
    groups: dict[tuple[str, int, int | None], list[_Part]] = defaultdict(list)
    for part in rank.parts:
        name = "W" if part.kind is OpKind.BACKWARD_WEIGHT else "F" if part.kind is OpKind.FORWARD else "B or I"
        groups[name, part.micro_batch, part.split].append(part)
    for (name, micro_batch, split), parts in sorted(groups.items(), key=lambda item: item[0][0]):
        chunks = [*range(num_chunks)]
        if name == "W":  # of those whose backward is in two parts
            halves = groups.get(("B or I", micro_batch, split), ())
            chunks = [half.chunk for half in halves if half.kind is OpKind.BACKWARD_INPUT and half.chunk is not None]
        known = [part.chunk for part in parts if part.chunk is not None]
        if len(parts) != len(chunks) or len(set(known)) < len(known) or not set(known) <= set(chunks):
            what = f"B{micro_batch} or I{micro_batch}" if name == "B or I" else f"{name}{micro_batch}"
            due = (
                f"I{micro_batch} {len(chunks)} times" if name == "W" else f"{num_chunks} of the stages by its forwards"
            )
            message = f"rank {number} has {what} {len(parts)} times, and {due}"
            if any(chunk >= num_chunks for chunk in known):
                message = f"rank {number} has a second stage by the sign of this block, and {what} on one stage"
            fix = f"write every block once for each stage of the rank, or {_NAME_STAGES}"
            findings.add(BAD_OPERATION, parts[-1].place, message, fix)
            return
        free = [chunk for chunk in sorted(chunks) if chunk not in known]
        ordered = iter(free if name == "F" else free[::-1])
        for part in parts:
            part.chunk = next(ordered) if part.chunk is None else part.chunk


def _length(ranks: Sequence[_Rank], stage_of: Callable[[int, int], int]) -> int | None:
    """The end of the rows if each part takes one unit (a whole backward two); None if they cannot run in this order."""
    programs = tuple(
        tuple(
            Op(part.kind, stage_of(number, part.chunk or 0), part.micro_batch, split=part.split) for part in rank.parts
        )
        for number, rank in enumerate(ranks)
    )
    pairs = tuple(
        frozenset(
            place for place, (part, other) in enumerate(pairwise(rank.parts)) if part.batch == other.batch != NONE
        )
        for rank in ranks
    )
    num_stages = 1 + max(op.stage for program in programs for op in program)
    try:
        timed = asap(Schedule(programs, pairs), even_costs(num_stages))
    except ValueError:
        return None
    return int(max(end for ends in timed.ends for end in ends))
