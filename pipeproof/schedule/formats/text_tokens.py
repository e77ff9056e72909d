"""The words of the text form: names, ``key=value`` attributes of rows and tensors, and peers that a text leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from pipeproof.diagnostics.finding import Finding, Location, RuleDoc, file_order
from pipeproof.diagnostics.problems import grouped, listed, nearest_name, shortened
from pipeproof.diagnostics.source import LINE_BREAK
from pipeproof.foreign_text import decode_json
from pipeproof.schedule.columns import NONE, REDUCTIONS, Row
from pipeproof.schedule.ops import COMPUTE_KINDS, KINDS, STEP_OF_TRANSFER, TARGET_KINDS, TRANSFER_KINDS, Op, OpKind
from pipeproof.specs.schedule import BAD_LINE, NO_OPERATIONS, NO_PEER, ScheduleFileError

_Key = TypeVar("_Key")

MAX_INTEGER = 2**62
"""Largest number of an attribute; columns are 64 bits wide."""

_BARE = re.compile(r"[A-Za-z0-9_.,:;/()\[\]<>|*@!?$%&~^-]+")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_RANGE = re.compile(r"(0|[1-9][0-9]*)\.\.(0|[1-9][0-9]*)")
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|[^"+]+')
_ATTRIBUTE = re.compile(r'([A-Za-z_]+)=((?:"(?:[^"\\]|\\.)*"|[^\s{}"])+)')


def quoted(name: str) -> str:
    """A name as it is written in a file: bare if this is unambiguous, else as a JSON string."""
    return name if _BARE.fullmatch(name) else json.dumps(name)


def unquoted(text: str) -> str:
    """The name that ``text`` represents.

    Raises:
        ValueError: ``text`` is neither bare nor one JSON string.
    """
    if _BARE.fullmatch(text):
        return text
    if text.startswith('"'):
        name = decode_json(text)  # whose error is a ValueError
        if isinstance(name, str):
            return name
    raise ValueError(f"{text!r} is not a name")


def to_number(text: str) -> int:
    """A decimal number without sign or leading zeros.

    Raises:
        ValueError: ``text`` is not a number, or above ``MAX_INTEGER``.
    """
    if not _NUMBER.fullmatch(text) or len(text) > len(str(MAX_INTEGER)) or int(text) > MAX_INTEGER:
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def to_names(text: str) -> tuple[str, ...]:
    """``a+b``: names joined by plus signs.

    Raises:
        ValueError: a name is missing or malformed.
    """
    names = _NAME.findall(text)
    if "+".join(names) != text:
        raise ValueError(f"{text!r} is not a list of names")
    return tuple(unquoted(name) for name in names)


def to_range(text: str) -> tuple[int, int]:
    """``0..8``: from the first to before the last.

    Raises:
        ValueError: ``text`` is not such a range.
    """
    match = _RANGE.fullmatch(text)
    if match is None or to_number(match[1]) > to_number(match[2]):
        raise ValueError(f"{text!r} is not a range")
    return int(match[1]), int(match[2])


def to_reduction(text: str) -> str:
    """A reduction that rows may have.

    Raises:
        ValueError: there is no such reduction.
    """
    if text not in REDUCTIONS[1:]:
        raise ValueError(f"{text!r} is not a reduction")
    return text


def attributes(
    text: Placed, readers: Mapping[str, tuple[Callable[[str], object], str]], findings: Findings
) -> Iterator[tuple[str, object, Placed]]:
    """Key, value and the place of each attribute in ``text``.

    ``readers`` has for each key the function that reads its value, and an example. Anything else, and a repeated key,
    is a finding (PP133).
    """
    seen: set[str] = set()
    offset = 0
    while rest := text.text[offset:].lstrip():
        offset = len(text.text) - len(rest)
        match = _ATTRIBUTE.match(text.text, offset)
        if match is None:
            word = text.part(offset, offset + len(rest.split()[0]))
            message = f"`{shortened(word.text)}` is not `key=value`"
            findings.add(BAD_LINE, word.location, message, f"keys here: {', '.join(readers)}")
            offset += len(word.text)
            continue
        offset = match.end()
        word, key = text.part(match.start(), offset), match[1]
        if key not in readers:
            near = nearest_name(key, readers)
            fix = f"did you mean `{near}`?" if near else f"keys here: {', '.join(readers)}"
            findings.add(BAD_LINE, word.location, f"there is no attribute `{shortened(key)}`", fix)
        elif key in seen:
            findings.add(BAD_LINE, word.location, f"`{key}` is given twice")
        else:
            seen.add(key)
            read, example = readers[key]
            try:
                yield key, read(match[2]), word
            except ValueError:
                message = f"`{key}` cannot be `{shortened(match[2])}`"
                findings.add(BAD_LINE, word.location, message, f"write it as in `{key}={example}`")


@dataclass(frozen=True, slots=True)
class _Form:
    read: Callable[[str], object]
    example: str
    write: Callable[[Row], str | None]


def _number(name: str, absent: int) -> Callable[[Row], str | None]:
    return lambda row: None if getattr(row, name) == absent else str(getattr(row, name))


def _name(name: str) -> Callable[[Row], str | None]:
    return lambda row: quoted(getattr(row, name)) if getattr(row, name) else None


def _names(name: str) -> Callable[[Row], str | None]:
    return lambda row: "+".join(map(quoted, getattr(row, name))) or None


def _range(row: Row) -> str | None:
    has_range = row.start or row.stop or row.tensor != NONE  # without a range, a tensor is meant whole
    return f"{row.start}..{row.stop}" if has_range else None


_ROW_FORMS: Mapping[str, _Form] = MappingProxyType(
    {
        "peer": _Form(to_number, "1", _number("peer", NONE)),
        "tensor": _Form(to_number, "0", _number("tensor", NONE)),
        "range": _Form(to_range, "0..8", _range),
        "shift": _Form(to_number, "8", _number("shift", 0)),
        "group": _Form(to_number, "0", _number("group", NONE)),
        "batch": _Form(to_number, "0", _number("batch", NONE)),
        "queue": _Form(unquoted, "side", _name("queue")),
        "communicator": _Form(unquoted, "pp", _name("communicator")),
        "reduction": _Form(to_reduction, "avg", _name("reduction")),
        "scale": _Form(unquoted, "1/2", _name("scale")),
        "reads": _Form(to_names, "a+b", _names("reads")),
        "writes": _Form(to_names, "a+b", _names("writes")),
        "frees": _Form(to_names, "a+b", _names("frees")),
    }
)
"""The attributes of a row, in the order in which they are written."""

ROW_KEYS: Mapping[str, tuple[Callable[[str], object], str]] = MappingProxyType(
    {key: (form.read, form.example) for key, form in _ROW_FORMS.items()}
)
"""The keys of a row for ``attributes``."""


def row_attributes(row: Row) -> str:
    """The text after the operation of a row: its attributes in braces, or nothing."""
    texts = [f"{key}={text}" for key, form in _ROW_FORMS.items() if (text := form.write(row)) is not None]
    return f"{{{' '.join(texts)}}}" if texts else ""


def attribute_text(row: Row, key: str) -> str | None:
    """One attribute of a row as it is written; None if the row does not have it."""
    return _ROW_FORMS[key].write(row)


def to_shape(text: str) -> tuple[int, ...]:
    """``4x8``; ``()`` is the shape of a scalar.

    Raises:
        ValueError: ``text`` is not a shape.
    """
    return () if text == "()" else tuple(to_number(size) for size in text.split("x"))


def shape_text(shape: Sequence[int]) -> str:
    """The form that ``to_shape`` reads."""
    return "x".join(map(str, shape)) or "()"


# Text with its place in a file, and the findings that are collected while a schedule is read. A reader continues after
# the first mistake and shows all mistakes at once; misread parts are left out.


MOST_FINDINGS = 50
"""Number of findings after which the rest of a file is not read."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a text; ``location`` is None for text that was made in Python."""

    text: str
    location: Location | None

    @property
    def place(self) -> Location:
        """The location of text that was read from a file."""
        assert self.location is not None, "every line of a file has a place"
        return self.location

    def part(self, start: int, stop: int) -> Placed:
        """The characters ``start : stop`` of this text, which is all on one line."""
        return Placed(self.text[start:stop], None if self.location is None else self.location.part(start, stop))


def placed_line(text: str, file: str, line: int) -> Placed:
    """A whole line of a file; ``line`` counts from 1."""
    return Placed(text, Location(file, line).part(0, len(text)))


def first_line(text: str) -> str:
    """The first line that is not blank."""
    return next((line for line in LINE_BREAK.split(text) if line.strip()), "")


def lines_of(text: str, file: str, findings: Findings, blank: str | None = None) -> list[Placed]:
    """The lines of a file that has one for each rank. Blank lines at the end do not count; others are PP131."""
    lines = [placed_line(line, file, number) for number, line in enumerate(LINE_BREAK.split(text), start=1)]
    while lines and not lines[-1].text.strip():
        lines.pop()
    for rank, line in enumerate(lines):
        if not line.text.strip(blank):
            findings.add(NO_OPERATIONS, line.location, f"line {rank + 1} is rank {rank}, and has no operations")
    return lines


def end_of(line: Placed) -> Location:
    """The place just behind the last character of a line that is not blank: where something is missing."""
    return replace(line.place, column=line.place.column + len(line.text.rstrip()), end_column=None)


@dataclass
class Findings:
    """Findings of a schedule while it is read."""

    found: list[Finding] = field(default_factory=list)

    def add(self, doc: RuleDoc, location: Location | None, message: str, help: str | None = None) -> None:
        """One more.

        Raises:
            ScheduleFileError: these are ``MOST_FINDINGS``.
        """
        self.found.append(doc.finding(message, location, help))
        if len(self.found) == MOST_FINDINGS:
            self.raise_any()

    def raise_any(self) -> None:
        """Do nothing if nothing is wrong.

        Raises:
            ScheduleFileError: with all findings, in the order of the file.
        """
        if self.found:
            raise ScheduleFileError(*sorted(self.found, key=file_order))


def holders(rows_by_rank: Sequence[Sequence[Row]]) -> Mapping[int, tuple[int, ...]]:
    """The ranks that compute each stage; for a stage that no rank computes, the ranks with other operations of it."""
    others = _ranks_of(rows_by_rank, frozenset(KINDS) - TARGET_KINDS, lambda op: op.stage)
    return others | _ranks_of(rows_by_rank, COMPUTE_KINDS, lambda op: op.stage)


def _ranks_of(
    rows_by_rank: Sequence[Sequence[Row]], kinds: frozenset[OpKind], key: Callable[[Op], _Key]
) -> dict[_Key, tuple[int, ...]]:
    """The ranks with operations of some kinds, by the ``key`` of these."""
    ranks = grouped(
        (key(row.op), rank) for rank, rows in enumerate(rows_by_rank) for row in rows if row.op.kind in kinds
    )
    return {of_key: tuple(dict.fromkeys(of_ranks)) for of_key, of_ranks in ranks.items()}


def with_peers(
    rows_by_rank: Sequence[Sequence[Row]], origins: Sequence[Location], findings: Findings
) -> tuple[tuple[Row, ...], ...]:
    """The rows with a peer for every transfer without one; if that is not exactly one other rank, a finding (PP138)."""
    holders_of = holders(rows_by_rank)
    work = _ranks_of(rows_by_rank, COMPUTE_KINDS, lambda op: (op.stage, op.micro_batch, op.split))

    def with_peer(rank: int, row: Row) -> Row:
        if row.op.kind not in TRANSFER_KINDS or row.peer != NONE:
            return row
        stage = row.op.stage + STEP_OF_TRANSFER[row.op.kind]
        ranks = holders_of.get(stage, ())
        if len(ranks) > 1:  # copies: the one that has this micro-batch
            ranks = work.get((stage, row.op.micro_batch, row.op.split), ranks)
        if len(ranks) == 1 and ranks[0] != rank:
            return replace(row, peer=ranks[0])
        if not ranks:
            fault = f"no rank holds stage {stage}"
        elif len(ranks) > 1:
            fault = f"ranks {listed(ranks, 'and')} hold stage {stage}"
        else:
            fault = f"stage {stage} is on rank {rank} itself, where nothing has to travel"
        message = f"{row.op} on rank {rank} has no other end: {fault}"
        findings.add(NO_PEER, row.place(origins), message, _help(ranks, rank))
        return row

    return tuple(tuple(with_peer(rank, row) for row in rows) for rank, rows in enumerate(rows_by_rank))


def _help(ranks: tuple[int, ...], rank: int) -> str:
    if ranks == (rank,):
        return "remove it"
    return "correct its stage, or name the rank in the text form: `{peer=1}`"
