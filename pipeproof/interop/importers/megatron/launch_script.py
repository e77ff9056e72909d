"""Commands of a launch script with their arguments and the location of each; nothing is run.

It reads the usual syntax of training scripts: assignments, lists of words, ``$NAME``, ``${NAME}``,
``${NAME:-default}``, ``$((..))`` of numbers, and ``source`` of a file next to the script. Blocks (``if``, ``for``,
``case``, functions) are not evaluated: their assignments are unknown. The trace of ``bash -x`` has no blocks, and is
read, too.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError, read_text

MAX_EXPANDED: Final = 2**23
"""Most characters that all expansions of a script insert."""
_LEAST_COST, _MAX_SOURCED, _MAX_DEPTH = 16, 8, 32
BLOCKS: Final = "give the output of `bash -x SCRIPT`, or the block of arguments that Megatron-LM prints at its start"


class ScriptError(Exception):
    """A script that cannot be read, with the location and the alternative."""

    def __init__(self, message: str, location: Location, help: str | None = None) -> None:
        super().__init__(message)
        self.location, self.help = location, help


@dataclass(frozen=True, slots=True)
class Argument:
    """A word of a command; ``text`` is None if only a run determines it, and ``why`` is the reason.

    For a known one, ``why`` names the variable of the environment whose default is in it. ``start`` and ``end`` are the
    text before and after the unknown part. ``block`` is the line of the block that appends the word, which may run or
    not, or that assigns the variable of an unknown one; 0 outside of blocks.
    """

    text: str | None
    location: Location
    why: str = ""
    start: str = ""
    block: int = 0
    end: str = ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a word on one line; quoted text is not split at blanks."""

    text: str | None
    is_quoted: bool
    location: Location
    why: str = ""
    block: int = 0


_Word = tuple[_Piece, ...]


@dataclass
class Script:
    """Commands with the assignments before them (``NNODES=2 torchrun``), and the variables at the end.

    ``in_blocks`` are the commands of blocks, which may run or not. ``unread`` are sourced files that were not found.
    """

    commands: list[tuple[Argument, ...]] = field(default_factory=list)
    environments: list[Mapping[str, str | None]] = field(default_factory=list)
    in_blocks: list[tuple[Argument, ...]] = field(default_factory=list)
    unread: list[Argument] = field(default_factory=list)
    variables: dict[str, list[_Word]] = field(default_factory=dict)

    def words(self) -> list[Argument]:
        """The words of all variables, in the order of assignment."""
        return [word for items in self.variables.values() for item in items for word in _arguments(_unquoted(item))]

    def value(self, name: str) -> str | None:
        """The text of a variable; None if it is not set or not known."""
        items = self.variables.get(name, [])
        return _text(items[0]) if len(items) == 1 else None


def read_script(text: str, file: str, preset: Mapping[str, str] = MappingProxyType({})) -> Script:
    """Read a script; ``preset`` are variables of its environment. Sourced files are read as assignments.

    Raises:
        ScriptError: a quote, a list or an expansion is not closed, is nested too deeply, or inserts too much.
    """
    script = Script()
    if _TRACED.match(text.lstrip()):  # the heads of blocks are in a trace, their ends are not
        text = _HEAD.sub("", text)
    for name, value in preset.items():
        script.variables[name] = [(_Piece(value, is_quoted=True, location=Location(file)),)]
    _Reader(text, file, script, _Budget()).read()
    return script


@dataclass
class _Budget:
    """Characters that expansions may still insert, and files that may still be sourced."""

    characters: int = MAX_EXPANDED
    files: int = _MAX_SOURCED


_BLANKS: Final = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_BLANKS_AND_BREAKS: Final = re.compile(r"(?:[ \t\r\n]|\\\n|#[^\n]*)+")
_ENDS_OF_WORD: Final = " \t\r\n;&|()<>"
_UNQUOTED: Final = re.compile(
    rf"(?P<plain>[^{_ENDS_OF_WORD}'\"\\$`]+|[{_ENDS_OF_WORD}])|'(?P<single>[^']*)'|\\(?P<escaped>[^\n]?)"
)
_QUOTED: Final = re.compile(r'(?P<plain>[^"\\$`\n]+|\n|\\(?![$`"\\]))|\\(?P<escaped>[$`"\\])')
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]", re.ASCII)
_PARAMETER: Final = re.compile(
    r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[[@*]\])?(?:(:?-)(.*))?", re.ASCII | re.DOTALL
)  # fmt: skip
_REDIRECTION: Final = re.compile(r"\d*(?:>>|>&|<<<|<&|<>|>\||[<>])|&>>?")
_HERE_DOCUMENT: Final = re.compile(r"<<(-?)[ \t]*(['\"\\]?)(\w+)['\"]?")
_FUNCTION: Final = re.compile(r"(?:function[ \t]+[\w-]+[ \t]*(?:\(\s*\))?|[\w-]+[ \t]*\(\s*\))\s*\{")
_TRACED: Final = re.compile(r"\++[ \t]+")
_HEAD: Final = re.compile(r"^\++[ \t]+(?:case|for|select|if|while|until)\b.*$", re.MULTILINE)
_DECLARING: Final = frozenset({"export", "local", "declare", "typeset", "readonly"})
READ: Final = "is read while the script runs"
"""End of the reason why such a variable is not known."""
_READING: Final = frozenset({"read", "mapfile", "readarray"})
_OPENS: Final = frozenset({"if", "for", "while", "until", "select", "case", "{"})
_CLOSES: Final = frozenset({"fi", "done", "esac", "}"})
_CONTINUES: Final = frozenset({"then", "do", "else", "elif", "in", "time", "!"})


class _Reader:
    """Reads a text once, statement by statement, into a script."""

    def __init__(self, text: str, file: str, script: Script, budget: _Budget) -> None:
        self._text, self._file, self._script, self._budget = text, file, script, budget
        self._at, self._origin, self._depth = 0, Location(file, 1, 1), 0
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._blocks: list[int] = []
        """Lines at which the open blocks begin."""
        self._documents: list[re.Match[str]] = []
        """Here-documents whose text begins at the next line."""

    def read(self) -> None:
        while self._at < len(self._text):
            self._skip(_BLANKS)
            if self._peek() in "\n;&|()":  # or nothing, at the end
                self._step()
            elif match := _FUNCTION.match(self._text, self._at):
                self._blocks.append(self._location().line)
                self._step(match.end() - self._at)
            else:
                self._statement()

    # --- position ---

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _location(self) -> Location:
        line = bisect_right(self._lines, self._at)
        column = self._at - self._lines[line - 1] + (self._origin.column if line == 1 else 1)
        return Location(self._file, self._origin.line + line - 1, column, column)

    def _step(self, count: int = 1) -> None:
        is_break = self._peek() == "\n"
        self._at += count
        if is_break:
            for document in self._documents:
                end = re.compile(rf"^{chr(9) + '*' if document[1] else ''}{document[3]}$", re.MULTILINE)
                match = end.search(self._text, self._at)
                self._at = len(self._text) if match is None else match.end()
            self._documents = []

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        self._at = self._at if match is None else match.end()

    # --- statements ---

    def _statement(self) -> None:
        if match := _TRACED.match(self._text, self._at):
            self._step(match.end() - self._at)
        words: list[_Word] = []
        assigned: dict[str, list[_Word]] = {}
        while self._at < len(self._text) and self._peek() not in "\n;&|()":
            if self._skip_redirection():
                continue
            match = _ASSIGNMENT.match(self._text, self._at)
            if match and (not words or (_text(words[0]) in _DECLARING)):
                self._assignment(match, assigned)
            else:
                words += self._word()
                if len(words) == 1 and self._is_keyword(_text(words[0])):
                    words = []
            self._skip(_BLANKS)
        if words and _text(words[0]) not in _DECLARING:
            self._command(words, assigned)
        else:
            self._script.variables.update(assigned)

    def _skip_redirection(self) -> bool:
        """Skip a redirection with its file, or note a here-document; False if there is none."""
        if match := _HERE_DOCUMENT.match(self._text, self._at):
            self._documents.append(match)
            self._step(match.end() - self._at)
        elif match := _REDIRECTION.match(self._text, self._at):
            self._step(match.end() - self._at)
            self._skip(_BLANKS)
            if self._at < len(self._text) and self._peek() not in "\n;|()":
                self._word()
        else:
            return False
        self._skip(_BLANKS)
        return True

    def _is_keyword(self, word: str | None) -> bool:
        if word in _OPENS:
            self._blocks.append(self._location().line)
        elif word in _CLOSES:
            del self._blocks[-1:]
        return word in _OPENS | _CLOSES | _CONTINUES

    def _assignment(self, match: re.Match[str], assigned: dict[str, list[_Word]]) -> None:
        """Read ``NAME=value`` or ``NAME=(words)``, also with ``+=``."""
        name, opened = match[1], self._location()
        self._step(match.end() - self._at)
        if self._peek() == "(":
            value = self._list(opened)
            is_list = True
        else:
            is_ended = self._at >= len(self._text) or self._peek() in " \t\r\n;&|()"
            value = [() if is_ended else tuple(piece for word in self._word(splits=False) for piece in word)]
            is_list = False
        old = assigned.get(name, self._script.variables.get(name)) if match[2] else None
        if self._blocks and match[2]:
            value = [tuple(replace(piece, block=self._blocks[0]) for piece in word) for word in value]
        elif self._blocks:
            why = f"assigned in the block at line {self._blocks[0]} of the script, which is not evaluated"
            value = [(_Piece(None, is_quoted=False, location=opened, why=why, block=self._blocks[0]),)]
        if old:
            value = [*old, *value] if is_list or len(old) > 1 else [(*old[0], *value[0])]
        assigned[name] = value

    def _list(self, opened: Location) -> list[_Word]:
        self._step()
        words: list[_Word] = []
        while True:
            self._skip(_BLANKS_AND_BREAKS)
            if self._at >= len(self._text):
                raise ScriptError("the list that begins here is not closed", opened)
            if self._peek() == ")":
                self._step()
                return words
            words += self._word() if self._peek() not in ";&|(" else []
            if self._peek() in (";", "&", "|", "("):
                self._step()

    def _command(self, words: Sequence[_Word], assigned: Mapping[str, list[_Word]]) -> None:
        first = _text(words[0])
        if first in _READING:
            for name in filter(_NAME.fullmatch, (_text(word) or "" for word in words[1:])):
                piece = _Piece(None, is_quoted=False, location=words[0][0].location, why=f"`{name}` {READ}")
                self._script.variables[name] = [(piece,)]
        elif self._blocks:
            self._script.in_blocks.append(tuple(_arguments_of(words)))
        elif first in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif first != ":":
            self._script.commands.append(tuple(_arguments_of(words)))
            texts = {name: _text(items[0]) for name, items in assigned.items() if items}
            self._script.environments.append(texts)

    def _source(self, word: _Word) -> None:
        """Read the assignments of a file next to the script; the directory may be one that only a run knows."""
        unknown = [index for index, piece in enumerate(word) if piece.text is None]
        tail = "".join(piece.text or "" for piece in word[unknown[-1] + 1 :]) if unknown else _text(word) or ""
        name = tail.lstrip("/") if unknown else tail
        shown = Argument(name or None, word[0].location, "another file")
        path = Path(self._file).parent / name
        if not name or Path(name).is_absolute() or not path.is_file() or not self._budget.files:
            self._script.unread.append(shown)
            return
        self._budget.files -= 1
        try:
            text = read_text(str(path))
        except PlanFileError as error:
            raise ScriptError(str(error), word[0].location) from None
        sourced = Script(variables=self._script.variables)
        _Reader(text, str(path), sourced, self._budget).read()
        self._script.unread += sourced.unread

    # --- words ---

    def _word(self, *, splits: bool = True, ends: str = _ENDS_OF_WORD) -> list[_Word]:
        """Read one word and expand it; it may become several."""
        words: list[list[_Piece]] = [[]]
        start, opened = self._at, None
        while self._at < len(self._text) and (opened or self._peek() not in ends):
            if self._text.startswith('"$@"', self._at) and not opened:  # no word at all without arguments
                self._step(len('"$@"'))
            elif self._peek() == '"':
                opened = None if opened else self._location()
                words[-1] += [] if opened is None else [_Piece("", is_quoted=True, location=opened)]
                self._step()
            elif self._peek() in "$`":
                _add(words, self._expansion(is_quoted=opened is not None), splits=splits)
            elif self._text.startswith("\\\n", self._at):
                self._step(2)
                if ends and not opened:
                    break
            else:
                words[-1].append(self._literal(_QUOTED if opened else _UNQUOTED, is_quoted=opened is not None))
        if opened:
            raise ScriptError('the quote " that begins here is not closed', opened)
        if self._at == start:
            self._step()
        return [tuple(word) for word in words if word]

    def _literal(self, pattern: re.Pattern[str], *, is_quoted: bool) -> _Piece:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ScriptError("the quote ' that begins here is not closed", self._location())
        kind = str(match.lastgroup)
        self._at = match.start(kind)
        location = self._location().part(0, max(1, len(match[kind].partition("\n")[0])))
        self._at = match.end()
        return _Piece(match[kind], is_quoted or kind != "plain", location)

    # --- expansions ---

    def _expansion(self, *, is_quoted: bool) -> list[_Word]:
        """The values of the expansion that begins here; several for a list."""
        location, text, at = self._location(), self._text, self._at
        arithmetic = text.startswith("$((", at)
        if arithmetic or text.startswith(("$(", "${"), at):
            stop = _closing(text, at + 1)
        elif text[at] == "`":
            stop = text.find("`", at + 1) + 1
        elif match := _NAME.match(text, at + 1):
            stop = match.end()
        else:
            self._step()
            is_quote = not is_quoted and self._peek() in ("'", '"')  # $'..' and $".." are read as quotes
            return [] if is_quote else [(_Piece("$", is_quoted, location),)]
        if not stop:
            raise ScriptError("the expansion that begins here is not closed", location)
        inside = text[at + 1 : stop]
        self._step(stop - at)
        if arithmetic and inside.endswith("))"):
            values = [self._arithmetic(inside[2:-2], location)]
        elif text[at] == "`" or inside[0] == "(":
            values = [(_unknown(f"`{text[at:stop]}`", location),)]
        else:
            values = self._parameter(inside[1:-1] if inside[0] == "{" else inside, location)
        values = [tuple(replace(piece, is_quoted=is_quoted) for piece in value) for value in values]
        self._budget.characters -= sum(_LEAST_COST + len(piece.text or "") for value in values for piece in value)
        if self._budget.characters < 0:
            raise ScriptError(f"expansions insert more than {MAX_EXPANDED:,} characters up to here", location)
        return values

    def _parameter(self, text: str, location: Location) -> list[_Word]:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return [(_unknown(f"`${{{text}}}`, an expansion that is not evaluated here", location),)]
        name, action, default = match[1], match[2], match[3]
        values = self._script.variables.get(name)
        is_empty = values is None or (action == ":-" and all(_text(value) == "" for value in values))
        if action and is_empty:
            pieces = self._default(default, location)
            return [tuple(replace(piece, why=piece.why or f"the default of `${name}`") for piece in pieces)]
        if values is not None:
            return values
        if name in "@*":
            return [()]
        if name == "#":
            return [(_Piece("0", is_quoted=False, location=location),)]
        return [(_unknown(f"`${name}`, which the script does not set", location),)]

    def _default(self, text: str, location: Location) -> _Word:
        """The value of the text after ``:-``, which may have quotes and expansions."""
        if self._depth >= _MAX_DEPTH:
            raise ScriptError("an expansion is nested too deeply", location)
        reader = _Reader(text, self._file, self._script, self._budget)
        reader._depth, reader._origin = self._depth + 1, location
        return tuple(piece for word in reader._word(splits=False, ends="") for piece in word)

    def _arithmetic(self, text: str, location: Location) -> _Word:
        numbers = text
        for name in re.findall(r"(?<!\w)[A-Za-z_]\w*", text, re.ASCII):
            value = self._script.value(name)
            if value is None or not re.fullmatch(r"\s*-?\d{1,18}\s*", value, re.ASCII):
                return (_unknown(f"`$(({text}))`, since `{name}` is not known", location),)
            numbers = re.sub(rf"\$\{{{name}\}}|\$?\b{name}\b", value, numbers)
        try:
            result = str(_evaluated(ast.parse(numbers.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return (_unknown(f"`$(({text}))`, which is not evaluated here", location),)
        return (_Piece(result, is_quoted=False, location=location),)


def _closing(text: str, at: int) -> int:
    """Return the index after the bracket that closes the one at ``at``, outside quotes and escapes; 0 if none does."""
    pairs = {"(": ")", "{": "}"}
    opens, closes = text[at], pairs[text[at]]
    depth, quote = 0, ""
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in (opens, closes):
            depth += 1 if char == opens else -1
            if depth == 0:
                return at + 1
        at += 1
    return 0


def _add(words: list[list[_Piece]], values: Sequence[_Word], *, splits: bool) -> None:
    """Append the values of an expansion to the current word; each value of a list after the first begins another."""
    for index, value in enumerate(values):
        if index and splits:
            words.append([])
        elif index:
            words[-1].append(_Piece(" ", is_quoted=True, location=value[0].location if value else Location("")))
        words[-1].extend(value)


def _unknown(why: str, location: Location) -> _Piece:
    return _Piece(None, is_quoted=False, location=location, why=why)


def _unquoted(word: _Word) -> _Word:
    return tuple(replace(piece, is_quoted=False) for piece in word)


def _text(word: _Word) -> str | None:
    texts = [piece.text for piece in word]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _arguments_of(words: Sequence[_Word]) -> Iterator[Argument]:
    """Yield the arguments of a command; the text after ``eval`` and ``-c`` is a command line itself."""
    is_line = _text(words[0]) == "eval"
    for word in words[is_line:]:
        yield from _arguments(_unquoted(word) if is_line else word)
        is_line = is_line or _text(word) in ("-c", "-lc")


def _arguments(word: _Word) -> Iterator[Argument]:
    """Yield the arguments of an expanded word: it is split at blanks outside of quotes."""
    current: list[_Piece] = []
    for piece in word:
        if piece.is_quoted or piece.text is None:
            current.append(piece)
            continue
        start = 0
        for run in re.split(r"(\s+)", piece.text):
            if run and not run.isspace():
                location = piece.location.part(start, start + len(run))
                current.append(replace(piece, text=run, location=location))
            elif run and current:
                yield _argument(current)
                current = []
            start += len(run)
    if current:
        yield _argument(current)


def _argument(pieces: list[_Piece]) -> Argument:
    text, texts = _text(tuple(pieces)), [piece.text or "" for piece in pieces]
    unknown = [index for index, piece in enumerate(pieces) if piece.text is None]
    first = next((piece for piece in pieces if piece.text), pieces[0])
    is_one_line = all(piece.location.line == first.location.line for piece in pieces)
    location = first.location.part(0, len(text) if text is not None and is_one_line else 1)
    start, end = ("".join(texts[: unknown[0]]), "".join(texts[unknown[-1] + 1 :])) if unknown else ("", "")
    why = pieces[unknown[0]].why if unknown else next((piece.why for piece in pieces if piece.why), "")
    return Argument(text, location, why, start, max(piece.block for piece in pieces), end)


# --- numbers ---

_MOST_NUMBER: Final = 2**63
_BINARY: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluated(node: ast.expr) -> int:
    """Return the value of ``+ - * / %`` of numbers; no part may be negative, as shells round quotients towards zero.

    Raises:
        ValueError: It is another expression, or a part is negative or has more than 64 bits.
    """
    match node:
        case ast.Constant(value=int() as result):
            return result
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_evaluated(left), _evaluated(right))
            if 0 <= result < _MOST_NUMBER:
                return result
    raise ValueError("not evaluated")
