"""Findings as text, like a compiler's diagnostics, and as JSON.

rich is not imported here: the caller passes a console, and JSON needs none.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any, assert_never

from pipeproof.diagnostics.finding import (
    CycleWitness,
    ElementRange,
    Finding,
    Location,
    OpsWitness,
    ProgramExcerpt,
    RangesWitness,
    Severity,
    Witness,
    by_cause,
)
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.source import Sources

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.diagnostics.source import SourceMap

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
_FRAME = "blue"


@dataclass(frozen=True, slots=True)
class Brevity:
    """Limits of output; ``None`` means no limit, and ``rest`` is the hint for the rest.

    With ``details``, findings that follow from others are shown too, and notes with their source lines, witness and
    help below; without it, consequences are only counted, and a note takes one line.
    """

    findings_of_a_code: int | None
    witness_lines: int | None
    rest: str
    details: bool = True


_PLACES = 3
"""Copies of a finding whose locations are named."""
BRIEF_WITNESSES = Brevity(None, 12, "`--format json` has them all")
"""All findings, and the first lines of long witnesses."""


def render_text(
    findings: Iterable[Finding], source: SourceMap | None, *, console: Console, brevity: Brevity = BRIEF_WITNESSES
) -> None:
    """Print each finding: its code and message, its source lines, its witness and the suggested fix.

    ``source`` is the text of the plan, if there is one; lines of other files are read from the files. Source lines are
    not wrapped: the carets stay below their characters.
    """
    printer, sources = _Printer(console), Sources(source)
    groups = by_cause(findings)
    copies: dict[Finding, list[Finding]] = {}
    if not brevity.details:
        groups, copies = _without_copies(groups)
    left = Counter(finding.code for finding, _ in groups)
    shown: Counter[str] = Counter()
    for finding, following in groups:
        code = finding.code
        if brevity.findings_of_a_code is None or shown[code] < brevity.findings_of_a_code:
            shown[code] += 1
            left[code] -= 1
            if finding.severity is Severity.NOTE and "\n" not in finding.message and not brevity.details:
                _render_note(finding, printer)
                continue
            _render(finding, sources, printer, brevity)
            if following and not brevity.details:
                _render_count(finding, following, printer, brevity)
            if finding in copies:
                _render_copies(finding, copies[finding], printer, brevity)
            printer.line()
            for consequence in following if brevity.details else ():
                _render(consequence, sources, printer, brevity)
                printer.line()
        elif left[code]:
            style = _STYLES[finding.severity]
            printer.line((f"{finding.severity}[{code}]", style), (f": and {left[code]} more; {brevity.rest}", "bold"))
            printer.line()
            left[code] = 0


def _render_note(finding: Finding, printer: _Printer) -> None:
    location_text = "" if finding.location is None else f" {finding.location}"
    fix = "" if finding.help is None else f"; help: {finding.help}"
    style = _STYLES[finding.severity]
    printer.line((f"{finding.severity}[{finding.code}]", style), (f"{location_text}: {finding.message}{fix}", ""))


def _without_copies(
    groups: Sequence[tuple[Finding, list[Finding]]],
) -> tuple[list[tuple[Finding, list[Finding]]], dict[Finding, list[Finding]]]:
    """The groups without copies of earlier findings (equal except for numbers), and the copies by their original."""
    faults = grouped((_fault(group[0]), group) for group in groups).values()
    copies = {first[0]: [finding for finding, _ in more] for first, *more in faults if more}
    return [first for first, *_ in faults], copies


def _fault(finding: Finding) -> tuple[object, ...]:
    """Facts that copies of one fault share: a setting breaks each boundary, or each rank, in the same way."""
    if finding.severity is Severity.NOTE or finding.location is None:
        return (id(finding),)
    texts = (finding.message, finding.help or "")
    return (finding.code, finding.location, *(re.sub(r"\d+", "#", text) for text in texts))


def _render_copies(finding: Finding, copies: Sequence[Finding], printer: _Printer, brevity: Brevity) -> None:
    places = [copy.message.partition(": ")[0] for copy in copies]
    text = f"the same {len(copies)} more time{'s' if copies[1:] else ''}"
    if finding.message.partition(": ")[0] not in places:
        text += f": {'; '.join(places[:_PLACES])}"
    if text.endswith(("time", "times")) or len(places) > _PLACES:
        text += f"; {brevity.rest}"
    printer.line((f"{_margin(finding)} = ", _FRAME), (text, ""))


def _render_count(finding: Finding, following: Sequence[Finding], printer: _Printer, brevity: Brevity) -> None:
    codes = Counter(consequence.code for consequence in following)
    named = ", ".join(f"{code} ({count})" if count > 1 else code for code, count in codes.items())
    verb = "follows" if len(following) == 1 else "follow"
    text = f"and {len(following)} that {verb} from it: {named}; {brevity.rest}"
    printer.line((f"{_margin(finding)} = ", _FRAME), (text, ""))


class _Printer:
    """Printer of lines of styled parts, without markup and control characters; the console wraps prose."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, *parts: tuple[str, str], whole: bool = False) -> None:
        """Print a line; a ``whole`` one is a drawing or a line of a file, which is never wrapped."""
        from rich.text import Text

        text = Text.assemble(*((printable(part), style) for part, style in parts))
        self._console.print(text, highlight=False, soft_wrap=True, no_wrap=whole or None)


def _render(finding: Finding, sources: Sources, printer: _Printer, brevity: Brevity) -> None:
    style = _STYLES[finding.severity]
    first, *more = finding.message.split("\n")
    printer.line((f"{finding.severity}[{finding.code}]", style), (f": {first}", "bold"))
    for line in more:
        printer.line((f"  {line}", "bold"))
    location, margin = finding.location, _margin(finding)
    if location is not None:
        printer.line((f"{margin}--> ", _FRAME), (str(location), ""))
        _render_excerpt(location, sources, printer, margin, style)
    if finding.witness is not None:
        for line in _shown_witness_lines(finding.witness, brevity):
            printer.line((f"{margin} = ", _FRAME), (line, ""))
        for line in cycle_drawing(finding.witness):
            printer.line((f"{margin} = ", _FRAME), (line, ""), whole=True)
    if finding.cause is not None:
        cause, *_ = finding.cause.message.split("\n")
        printer.line((f"{margin} = ", _FRAME), (f"follows from {finding.cause.code}: {cause}", ""))
    if finding.help is not None:
        first, *more = finding.help.split("\n")
        printer.line((f"{margin} = ", _FRAME), ("help: ", "bold green"), (first, ""))
        for line in more:
            printer.line((f"{margin}         {line}", ""))


def _margin(finding: Finding) -> str:
    return " " * (len(str(finding.location.line)) if finding.location is not None else 1)


def _render_excerpt(location: Location, sources: Sources, printer: _Printer, margin: str, style: str) -> None:
    excerpt = sources.excerpt(location)
    if excerpt is None:
        return
    printer.line((f"{margin} |", _FRAME))
    for number, text in excerpt.lines:
        printer.line((f"{number:>{len(margin)}} | ", _FRAME), (text, ""), whole=True)
    printer.line((f"{margin} | ", _FRAME), (f"{' ' * excerpt.indent}{'^' * excerpt.marked}", style), whole=True)


def _shown_witness_lines(witness: Witness, brevity: Brevity) -> Iterator[str]:
    lines = list(witness_lines(witness))
    most = len(lines) if brevity.witness_lines is None else brevity.witness_lines
    yield from lines[:most]
    if len(lines) > most:
        yield f"and {len(lines) - most} more; {brevity.rest}"


def witness_lines(witness: Witness) -> Iterator[str]:
    """Yield a witness as sentences, one for each range or operation."""
    match witness:
        case RangesWitness():
            for rank in dict.fromkeys(item.rank for item in (*witness.lost, *witness.foreign)):
                for verb, items in (("loses", witness.lost), ("gets ", witness.foreign)):
                    for item in items:
                        if item.rank == rank:
                            yield f"rank {rank} {verb} {_range_text(item)}"
        case CycleWitness():
            for op, next_op in zip(witness.ops, (*witness.ops[1:], *witness.ops[:1]), strict=True):
                yield f"rank {op.rank} {op.op} waits for rank {next_op.rank} {next_op.op}"
        case OpsWitness():
            for op in witness.ops:
                yield f"rank {op.rank}: {op.op}"
        case _:
            assert_never(witness)


def _range_text(item: ElementRange) -> str:
    covers = f" ({item.covers})" if item.covers else ""
    return f"elements {item.start}..{item.stop} of rank {item.source_rank}{covers}"


def printable(text: str) -> str:
    """Return ``text`` on one line without terminal control characters; tabs count as one column."""
    if text.isprintable():
        return text
    return "".join(" " if c == "\t" else c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """Return ``text`` with each line `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON data.

    ``witness`` is null or tagged by ``kind``: ranges, cycle or ops. Only a finding that follows from another has a
    ``cause``: its code and message.
    """
    location, cause = finding.location, finding.cause
    return {
        "code": finding.code,
        "severity": str(finding.severity),
        "message": finding.message,
        "location": (
            {"file": location.file, "line": location.line, "column": location.column} if location is not None else None
        ),
        "help": finding.help,
        "witness": _witness_to_json(finding.witness) if finding.witness is not None else None,
        **({} if cause is None else {"cause": {"code": cause.code, "message": cause.message}}),
    }


_WITNESS_KINDS = {RangesWitness: "ranges", CycleWitness: "cycle", OpsWitness: "ops"}


def _witness_to_json(witness: Witness) -> dict[str, Any]:
    """The operations or ranges; the programs of a cycle are only drawn."""
    content = {name: [asdict(item) for item in getattr(witness, name)] for name in ("lost", "foreign", "ops")
               if hasattr(witness, name)}  # fmt: skip
    return {"kind": _WITNESS_KINDS[type(witness)], **content}


_MOST_RANKS = 6
"""Most ranks whose programs are drawn; the programs of a longer cycle are similar."""


def cycle_drawing(witness: Witness) -> Iterator[str]:
    """Yield each rank's program with the cycle's operations numbered below; nothing for other witnesses.

    ``^1`` waits for ``^2``, and the last for ``^1``.
    """
    if not isinstance(witness, CycleWitness) or not witness.programs:
        return
    drawn = witness.programs[:_MOST_RANKS]
    width = max(len(_label(program)) for program in drawn)
    for program in drawn:
        yield from _lines(program, width)
    if len(witness.programs) > len(drawn):
        yield f"and {len(witness.programs) - len(drawn)} more ranks"


def _label(program: ProgramExcerpt) -> str:
    return f"rank {program.rank}:"


def _lines(program: ProgramExcerpt, width: int) -> tuple[str, str]:
    """The program, and below it the numbers of the operations on the cycle."""
    above, below = _label(program).ljust(width), " " * width
    for op, number in zip(program.ops, program.numbers, strict=True):
        mark = f"^{number}" if number else ""
        column = max(len(op), len(mark))
        above += f" {op.ljust(column)}"
        below += f" {mark.ljust(column)}"
    return above.rstrip(), below.rstrip()


# The one place where prose is wrapped: between words, at the width of a terminal.
#
# A terminal, or ``COLUMNS=80``, sets a width. Without one, as in a pipe or a file, every sentence stays on one line
# and can be searched. Words are never divided: a path or a digest that is longer than the width is a line of its
# own.


_LEAST = 20
"""Narrower terminals are treated as this wide."""

_MOST_DIGITS = 6
"""Digits of ``COLUMNS``: no terminal is wider, and tables would be padded to it."""

_WORD = re.compile(r"`[^`\n]{1,24}`[^\s]*|\S+")
"""Words; a short quotation in backquotes is one word, and commands stay together."""

_LABEL = re.compile(r"\s+= (?:help: )?|(?P<code>\w+\[\w+\])?\s*")
"""Label of a finding, or spaces of an indented line, whose width continuation lines are indented by."""


def given_columns() -> int | None:
    """Return the columns that the environment sets; None without a positive number."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) or None if columns.isdecimal() and len(columns) <= _MOST_DIGITS else None


def prose_width(stream: IO[Any]) -> int | None:
    """Return the columns that prose on a stream is wrapped at; None if its lines stay whole."""
    columns = given_columns()
    if columns is not None:
        return max(columns, _LEAST)
    if not stream.isatty():
        return None
    return max(shutil.get_terminal_size().columns, _LEAST)


def line_parts(line: str, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a line: first and last column of the text, and spaces to put before it.

    Continuation lines are indented as their line, or by a finding's label. The parts hold all words in order.
    """
    label = _LABEL.match(line)
    assert label is not None  # it matches nothing, too
    hang = min(2 if label["code"] else label.end(), width // 2)
    start, end, indent = 0, 0, 0
    for word in _WORD.finditer(line):
        if end > start and indent + word.end() - start > width and line[start : word.start()].strip():
            yield start, end, indent
            start, indent = word.start(), hang
        end = word.end()
    yield start, end, indent


def wrapped_text(text: str, width: int | None) -> str:
    """Return text of one or more lines, wrapped if there is a width."""
    if width is None:
        return text
    lines = (line if len(line) <= width else _joined(line, width) for line in text.split("\n"))
    return "\n".join(lines)


def _joined(line: str, width: int) -> str:
    return "\n".join(" " * indent + line[start:end] for start, end, indent in line_parts(line, width))
