"""Programs of all ranks as text: every row with its attributes, read strictly; written text reads back the same.

EBNF::

    file      = { line } ;
    line      = blank | comment | tensor | group | rank | more ;
    comment   = "#" , text ;
    tensor    = "tensor" , name , ":" , { key , "=" , value } ;
    group     = "group" , axis , ":" , { rank number } , [ "copies=" , number ] ;
    rank      = "rank" , number , ":" , { row } ;
    more      = space , { row } ;            (* continues the rank above *)
    row       = op , [ "{" , { key , "=" , value } , "}" ] ;

``op`` is the text form of ``pipeproof.schedule.ops``. Ranks are in order
from 0. Tensors and groups are numbered in the order of their lines, and rows
name them by number. The keys of a row are the fields of ``Row``:
``peer`` (of a transfer; of a broadcast, its root), ``tensor``, ``range=0..8``
(start and stop; without it all of the tensor), ``shift``, ``group``,
``batch``, ``queue``, ``communicator``, ``reduction``, ``scale``, and
``reads``, ``writes`` and ``frees`` with names joined by ``+``. The keys of a
tensor are ``shape=4x8`` and ``dtype``, which it must have, ``placement``
(invariant), ``dims`` (the first of ``sbh``), ``member`` and ``strides=8x1``.
A name with blanks, quotes or signs of this grammar is a JSON string.

A transfer without ``peer`` goes to, or comes from, the one rank that holds the
neighbouring stage.

Example::

    tensor hidden: shape=4x8 dtype=float32 dims=sh
    rank 0: 0F0{writes=out} 0SEND_F0{tensor=0 reads=out} WAIT(0SEND_F0)
    rank 1: 1RECV_F0{tensor=0} WAIT(1RECV_F0) 1F0
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import nearest_name, shortened
from pipeproof.diagnostics.source import LINE_BREAK
from pipeproof.foreign_text import decode_json
from pipeproof.schedule.columns import Row
from pipeproof.schedule.formats.op_text import OpReader
from pipeproof.schedule.formats.text_tokens import (
    ROW_KEYS,
    Findings,
    Placed,
    attributes,
    end_of,
    placed_line,
    quoted,
    row_attributes,
    shape_text,
    to_number,
    to_shape,
    unquoted,
    with_peers,
)
from pipeproof.schedule.op_parts import TensorPart
from pipeproof.schedule.op_table import Group, OpGraph, TensorSpec, build_graph
from pipeproof.schedule.ops import AXES, META_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.specs.axis_layout import parse_placement
from pipeproof.specs.schedule import BAD_LINE, NO_OPERATIONS

# --- The lines of the text form that declare tensors and groups, read and written ---


_BARE_TITLE = re.compile(r'[^\s":](?:[^":]*[^\s":])?')
_DIMS = "sbh"


def read_tensor(name: Placed, rest: Placed, findings: Findings) -> TensorSpec | None:
    """The tensor that ``tensor NAME: ...`` declares; None with a finding (PP133)."""

    def refuse(message: str) -> None:
        findings.add(BAD_LINE, name.location, message, "write it as in `tensor hidden: shape=4x8 dtype=float32`")

    num_found = len(findings.found)
    fields: dict[str, Any] = {key: value for key, value, _ in attributes(rest, _TENSOR_KEYS, findings)}
    if len(findings.found) > num_found:
        return None
    missing = [key for key in ("shape", "dtype") if key not in fields]
    if missing:
        refuse(f"tensor {shortened(name.text)} has no {' and no '.join(missing)}")
        return None
    shape = fields["shape"]
    fields.setdefault("placement", "invariant")
    fields.setdefault("dims", _DIMS[: len(shape)] if len(shape) <= len(_DIMS) else "")
    try:
        title = unquoted(name.text) if name.text.startswith('"') else name.text
    except ValueError:
        refuse(f"`{shortened(name.text)}` is not a name")
        return None
    tensor = TensorSpec(title, **fields)
    for what, entries in (("dims", tensor.dims), ("strides", tensor.strides)):
        if entries and len(entries) != len(shape):
            refuse(f"tensor {shortened(name.text)} has {len(shape)} dims in `shape` and {len(entries)} in `{what}`")
    return tensor


def tensor_line(tensor: TensorSpec) -> str:
    """The line from which ``read_tensor`` makes the same tensor."""
    bare = tensor.name.isprintable() and _BARE_TITLE.fullmatch(tensor.name) is not None
    texts = [
        f"shape={shape_text(tensor.shape)}",
        f"dtype={quoted(tensor.dtype)}",
        f"placement={tensor.placement}",
        f"dims={quoted(tensor.dims)}",
    ]
    if tensor.member:
        texts.append(f"member={quoted(tensor.member)}")
    if tensor.strides is not None:
        texts.append(f"strides={shape_text(tensor.strides)}")
    if tensor.parts:
        parts = [[p.member, p.dtype, p.placement, p.dims, shape_text(p.shape)] for p in tensor.parts]
        texts.append(f"parts={json.dumps(json.dumps(parts))}")
    return f"tensor {tensor.name if bare else json.dumps(tensor.name)}: {' '.join(texts)}"


def _placement(text: str) -> str:
    if str(parse_placement(text)) != text:
        raise ValueError(f"{text!r} is not how a placement is written")
    return text


def _parts(text: str) -> tuple[TensorPart, ...]:
    """The parts of a packed message: a string with the JSON of their members, types, placements, dims and shapes."""
    parsed = decode_json(unquoted(text))
    if not isinstance(parsed, list) or not all(isinstance(part, list) and len(part) == _NUM_FIELDS for part in parsed):
        raise ValueError(f"{shortened(text)} is not a list of parts")
    if not all(isinstance(value, str) for part in parsed for value in part):
        raise ValueError(f"{shortened(text)} has a value that is not a string")
    return tuple(
        TensorPart(member, to_shape(shape), dtype, _placement(placement), dims, index)
        for index, (member, dtype, placement, dims, shape) in enumerate(parsed)
    )


_NUM_FIELDS = 5
_TENSOR_KEYS = {
    "shape": (to_shape, "4x8"),
    "dtype": (unquoted, "float32"),
    "placement": (_placement, "sharded(0)"),
    "dims": (unquoted, "sbh"),
    "member": (unquoted, "mask"),
    "strides": (to_shape, "8x1"),
    "parts": (_parts, json.dumps('[["mask","bool","invariant","sb","4x8"]]')),
}


def read_group(axis: Placed, rest: Placed, findings: Findings) -> Group | None:
    """The group that ``group AXIS: ...`` declares; None with a finding (PP133). Its ranks are not checked here."""
    if axis.text not in AXES:
        near = nearest_name(axis.text, AXES)
        fix = f"did you mean `{near}`?" if near else f"axes are {', '.join(AXES)}"
        findings.add(BAD_LINE, axis.location, f"there is no mesh axis `{shortened(axis.text)}`", fix)
        return None
    ranks_text, mark, _ = rest.text.partition("copies=")
    copies = 1
    if mark:
        for _, value, _ in attributes(rest.part(len(ranks_text), len(rest.text)), _GROUP_KEYS, findings):
            copies = cast("int", value)
    try:
        ranks = tuple(map(to_number, ranks_text.split()))
    except ValueError as error:
        findings.add(BAD_LINE, rest.location, f"a group lists ranks, and {error}", "write it as in `group tp: 0 1`")
        return None
    return Group(axis.text, ranks, copies)


def group_line(group: Group) -> str:
    """The line from which ``read_group`` makes the same group."""
    copies = f" copies={group.copies}" if group.copies > 1 else ""
    return f"group {group.axis}: {' '.join(map(str, group.ranks))}{copies}"


def _copies(text: str) -> int:
    number = to_number(text)
    if number < 1:
        raise ValueError("a rank stands for itself at least")
    return number


_GROUP_KEYS = {"copies": (_copies, "4")}


_HEAD = re.compile(r'([A-Za-z]+)(?:[ \t]+("(?:[^"\\]|\\.)*"|[^:"]+?)[ \t]*:(?=\s|$))?')
_ROW = re.compile(r'\s*([^\s{}]+)(\{(?:"(?:[^"\\]|\\.)*"|[^"{}])*\})?(?=\s|$)')
_WORDS = ("tensor", "group", "rank")
_WITH_PEER = TRANSFER_KINDS | {OpKind.BROADCAST}


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """Programs read from a text: rows of each rank, whose ``origin`` is an index into ``origins``.

    ``ends`` has for each rank the place behind its last row.
    """

    rows_by_rank: tuple[tuple[Row, ...], ...]
    tensors: tuple[TensorSpec, ...]
    groups: tuple[Group, ...]
    origins: tuple[Location, ...]
    ends: tuple[Location, ...]

    def graph(self) -> OpGraph:
        """The op graph of these rows."""
        return build_graph(self.rows_by_rank, self.tensors, self.groups)


def looks_like_program(text: str) -> bool:
    """Return True if the first line after comments begins like a line of the text form."""
    first = next((words for line in LINE_BREAK.split(text) if (words := line.split()) and words[0][0] != "#"), None)
    return first is not None and first[0] in _WORDS


def parse_program(text: str, file: str = "<program>") -> ProgramFile:
    """Read a program text; ``file`` is its name in locations.

    Raises:
        ScheduleFileError: everything found wrong: PP131 (no ranks at all), PP132 (operations), PP133 (lines and
            attributes), PP138 (peers).
    """
    program = read_program(text, file)
    findings = Findings()
    rows = with_peers(program.rows_by_rank, program.origins, findings)
    findings.raise_any()
    return replace(program, rows_by_rank=rows)


def read_program(text: str, file: str) -> ProgramFile:
    """Read a program text, and keep transfers without a peer unchanged.

    Raises:
        ScheduleFileError: everything found wrong: PP131 (no ranks at all), PP132 (operations), PP133 (lines and
            attributes).
    """
    reader = _Reader(Location(file))
    for number, line in enumerate(LINE_BREAK.split(text), start=1):
        reader.line(placed_line(line, file, number))
    return reader.finish()


def format_program(graph: OpGraph) -> str:
    """A graph as text, one line per tensor, group and rank.

    ``parse_program`` reads the same rows, tensors and groups from it; rows of
    kinds that have no peer must have none, as in every graph that was lowered or read.

    Raises:
        ValueError: the ranks of the graph represent others, which the text cannot express.
    """
    if graph.global_rank != tuple(range(graph.num_ranks)):
        raise ValueError("a graph whose ranks stand for others has no text form: write the unfolded one")
    return format_rows(graph.rows(), graph.tensors, graph.groups)


def format_rows(
    rows_by_rank: Sequence[Sequence[Row]], tensors: Sequence[TensorSpec] = (), groups: Sequence[Group] = ()
) -> str:
    """The rows of each rank as text, one line per tensor, group and rank; ``read_program`` reads the same from it."""
    lines = [*map(tensor_line, tensors), *map(group_line, groups)]
    for rank, rows in enumerate(rows_by_rank):
        lines.append(" ".join([f"rank {rank}:", *(f"{row.op}{row_attributes(row)}" for row in rows)]))
    return "".join(f"{line}\n" for line in lines)


class _Reader:
    """Reads line by line; references to later lines are checked at the end."""

    def __init__(self, start: Location) -> None:
        self._start = start
        self._findings = Findings()
        self._ops = OpReader(self._findings)
        self._tensors: list[TensorSpec] = []
        self._groups: list[tuple[Group, Placed]] = []
        self._ranks: list[list[Row]] = []
        self._origins: list[Location] = []
        self._ends: list[Location] = []
        self._num_declared = dict.fromkeys(_WORDS, 0)
        self._references: list[tuple[str, int, Placed]] = []
        self._whole: list[tuple[int, int]] = []
        """Rank and place of the rows that name a tensor without a range."""

    def line(self, line: Placed) -> None:
        """One line of the file."""
        text = line.text.strip()
        if not text or text.startswith("#"):
            return
        start = line.text.index(text[0])
        head = _HEAD.match(line.text, start)
        word = head[1] if head else ""
        if head and word in _WORDS and head[2] is not None:
            self._declare(word, line.part(*head.span(2)), line.part(head.end(), len(line.text)))
        elif start and self._ranks and word not in _WORDS:
            self._rows(line)
        else:
            near = nearest_name(word, _WORDS)
            fix = f"did you mean `{near} ...:`?" if near else "lines begin with `rank 0:`, `tensor NAME:`, `group tp:`"
            whole = line.part(start, start + len(text))
            self._bad(whole, f"`{shortened(text)}` is not a line of a program", fix)

    def finish(self) -> ProgramFile:
        """The program that was read."""
        self._check_references()
        if not self._ranks and not self._findings.found:
            self._findings.add(NO_OPERATIONS, self._start, "the program has no ranks", "write `rank 0: 0F0 0B0`")
        self._findings.raise_any()
        for rank, position in self._whole:
            row = self._ranks[rank][position]
            self._ranks[rank][position] = replace(row, stop=self._tensors[row.tensor].numel)
        rows = tuple(map(tuple, self._ranks))
        groups = tuple(group for group, _ in self._groups)
        return ProgramFile(rows, tuple(self._tensors), groups, tuple(self._origins), tuple(self._ends))

    def _bad(self, text: Placed, message: str, help: str | None = None) -> None:
        self._findings.add(BAD_LINE, text.location, message, help)

    def _declare(self, word: str, name: Placed, rest: Placed) -> None:
        self._num_declared[word] += 1  # whether or not it can be read
        if word == "tensor":
            tensor = read_tensor(name, rest, self._findings)
            self._tensors += [] if tensor is None else [tensor]
        elif word == "group":
            group = read_group(name, rest, self._findings)
            self._groups += [] if group is None else [(group, name)]
        else:
            if name.text != str(len(self._ranks)):
                message = f"rank {shortened(name.text)} is in the place of rank {len(self._ranks)}"
                self._bad(name, message, "give each rank one line, in order from 0")
            self._ranks.append([])
            self._ends.append(end_of(rest))
            self._rows(rest)

    def _rows(self, text: Placed) -> None:
        self._ends[-1] = end_of(text)
        offset, stop = 0, len(text.text.rstrip())
        while offset < stop:
            match = _ROW.match(text.text, offset)
            if match is None:
                start = stop - len(text.text[offset:].strip())
                self._bad(text.part(start, stop), "attributes follow their operation in braces, without a blank")
                return
            offset = match.end()
            word = text.part(*match.span(1))
            op = self._ops.read(word)
            fields = self._fields(text.part(*match.span(2))) if match[2] else {}
            if op is not None:
                if "peer" in fields and op.kind not in _WITH_PEER:
                    self._bad(word, f"{op} has a peer, and is not a transfer or broadcast", "remove `peer`")
                if "tensor" in fields and "stop" not in fields and op.kind not in META_KINDS:
                    self._whole.append((len(self._ranks) - 1, len(self._ranks[-1])))
                self._ranks[-1].append(Row(op, origin=len(self._origins), **fields))
                self._origins.append(word.place)

    def _fields(self, braces: Placed) -> dict[str, Any]:
        """The fields of a row that its attributes give."""
        fields: dict[str, Any] = {}
        for key, value, word in attributes(braces.part(1, len(braces.text) - 1), ROW_KEYS, self._findings):
            fields[key] = value
            if key in ("peer", "tensor", "group"):
                self._references.append((key, fields[key], word))
        if "range" in fields:
            fields["start"], fields["stop"] = fields.pop("range")
        return fields

    def _check_references(self) -> None:
        """PP133 for unknown ranks, tensors and groups."""
        for key, value, word in self._references:
            what = "rank" if key == "peer" else key
            count = self._num_declared[what]
            if value >= count:
                last = f"the last is {count - 1}" if count else "there is none"
                self._bad(word, f"there is no {what} {value}: {last}")
        for group, name in self._groups:
            ranks = group.ranks
            if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= len(self._ranks):
                self._bad(name, f"a group has different ranks of 0..{len(self._ranks) - 1}, found {list(ranks)}")
