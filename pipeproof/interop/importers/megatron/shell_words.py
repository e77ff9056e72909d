"""Words of a shell script, each with its location; nothing is evaluated or run.

The lexer understands the syntax of launch scripts: words in any quotes,
``$`` expansions, lists in parentheses after ``NAME=``, comments, continued
lines, here-documents (left out) and the operators between commands (POSIX.1-2017,
Shell Command Language, section 2.3; arrays as in Bash).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pipeproof.diagnostics.finding import Location


class PartKind(Enum):
    """Kind of a part of a word."""

    TEXT = "text"
    PARAMETER = "parameter"
    """Text after ``$`` or between ``${`` and ``}``."""
    ARITHMETIC = "arithmetic"
    """Text between ``$((`` and ``))``."""
    COMMAND = "command"
    """Text between ``$(`` and ``)``, or between backquotes: only a run determines its value."""


@dataclass(frozen=True, slots=True)
class WordPart:
    """A part of a word on one line; ``quoted`` text is not split at blanks."""

    kind: PartKind
    text: str
    quoted: bool
    location: Location


@dataclass(frozen=True, slots=True)
class Word:
    """Pieces without a blank between them."""

    parts: tuple[WordPart, ...]
    location: Location


@dataclass(frozen=True, slots=True)
class Assignment:
    """``NAME=word``, ``NAME+=word`` or ``NAME=(words)``; ``items`` is None for the first two."""

    name: str
    append: bool
    word: Word
    items: tuple[Word, ...] | None


@dataclass(frozen=True, slots=True)
class Operator:
    """A token between words: a new line, ``;``, ``&&``, a redirection, a parenthesis."""

    text: str
    location: Location


Token = Word | Assignment | Operator


class ShellTextError(Exception):
    """A script that ends inside a quote, a list or an expansion, with the location of its begin."""

    def __init__(self, message: str, location: Location) -> None:
        super().__init__(message)
        self.location = location


_OPERATOR: Final = re.compile(r"\d*(?:>>|>&|<<<|<<-?|<&|<>|>\||[<>])|;;&?|;&|&&|\|\||&>>?|\|&|[;&|()]")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]", re.ASCII)
_ENDS_WORD: Final = frozenset(" \t\n;&|()<>")


def shell_tokens(text: str, file: str) -> tuple[Token, ...]:
    """Return the words and operators of a script, in order.

    Raises:
        ShellTextError: a quote, a list or an expansion is not closed.
    """
    return tuple(_Lexer(text, Location(file)).tokens())


def parse_default(text: str, location: Location) -> tuple[WordPart, ...]:
    """Return the parts of the word after ``:-`` in an expansion, which begins at ``location``."""
    return _Lexer(text, location).parts_to_end()


class _Lexer:
    """Reads characters and keeps the current line and column."""

    def __init__(self, text: str, location: Location) -> None:
        self._text = text.replace("\r\n", "\n")
        self._position = 0
        self._file = location.file
        self._line = location.line
        self._column = location.column
        self._here_documents: list[tuple[str, bool]] = []

    def tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while not self._at_end():
            c = self._peek()
            if c in " \t":
                self._step()
            elif self._text.startswith("\\\n", self._position):
                self._step(2)
            elif c == "#":
                self._skip_comment()
            elif c == "\n":
                tokens.append(Operator("\n", self._here()))
                self._step()
                self._skip_here_documents()
            elif operator := _OPERATOR.match(self._text, self._position):
                tokens.append(self._operator(operator.group()))
            else:
                tokens.append(self._assignment() or self._word())
        return tokens

    def parts_to_end(self) -> tuple[WordPart, ...]:
        parts: list[WordPart] = []
        while not self._at_end():
            self._part(parts)
        return tuple(parts)

    def _here(self, length: int | None = None) -> Location:
        """The current location, that of ``length`` characters on the line."""
        end = None if length is None else self._column + length - 1
        return Location(self._file, self._line, self._column, end)

    def _at_end(self) -> bool:
        return self._position >= len(self._text)

    def _peek(self) -> str:
        return self._text[self._position]

    def _step(self, count: int = 1) -> None:
        for _ in range(count):
            if self._text[self._position] == "\n":
                self._line, self._column = self._line + 1, 1
            else:
                self._column += 1
            self._position += 1

    def _skip_comment(self) -> None:
        while not self._at_end() and self._peek() != "\n":
            self._step()

    def _operator(self, text: str) -> Operator:
        operator = Operator(text, self._here())
        self._step(len(text))
        if text in ("<<", "<<-"):
            while not self._at_end() and self._peek() in " \t":
                self._step()
            end = "".join(part.text for part in self._word().parts)
            self._here_documents.append((end, text == "<<-"))
        return operator

    def _skip_here_documents(self) -> None:
        for end, tabs in self._here_documents:
            while not self._at_end():
                stop = self._text.find("\n", self._position)
                line = self._text[self._position : stop if stop >= 0 else len(self._text)]
                self._step(min(len(line) + 1, len(self._text) - self._position))
                if (line.lstrip("\t") if tabs else line) == end:
                    break
        self._here_documents.clear()

    def _assignment(self) -> Assignment | None:
        match = _ASSIGNMENT.match(self._text, self._position)
        if match is None:
            return None
        location = self._here()
        self._step(len(match.group()))
        append = match.group(2) == "+"
        if self._at_end() or self._peek() != "(":
            return Assignment(match.group(1), append, self._word(), None)
        self._step()
        return Assignment(match.group(1), append, Word((), location), self._items(location))

    def _items(self, opened: Location) -> tuple[Word, ...]:
        items: list[Word] = []
        while not self._at_end():
            c = self._peek()
            if c == ")":
                self._step()
                return tuple(items)
            if c in " \t\n":
                self._step()
            elif self._text.startswith("\\\n", self._position):
                self._step(2)
            elif c == "#":
                self._skip_comment()
            elif c in _ENDS_WORD:
                raise ShellTextError(f"`{c}` in a list", self._here(1))
            else:
                items.append(self._word())
        raise ShellTextError("the list that begins here is not closed with `)`", opened)

    def _word(self) -> Word:
        parts: list[WordPart] = []
        location = self._here()
        while not self._at_end() and self._peek() not in _ENDS_WORD:
            if self._text.startswith("\\\n", self._position):
                self._step(2)
            else:
                self._part(parts)
        return Word(tuple(parts), location)

    def _part(self, parts: list[WordPart]) -> None:
        """Read one part of a word, outside of quotes."""
        match self._peek():
            case "'":
                self._single_quoted(parts)
            case '"':
                self._double_quoted(parts)
            case "$" | "`":
                self._expansion(parts, quoted=False)
            case "\\":
                self._step()
                if not self._at_end():
                    self._text_part(parts, quoted=True)
            case _:
                self._text_part(parts, quoted=False)

    def _text_part(self, parts: list[WordPart], *, quoted: bool) -> None:
        """Read one character of text, joined to the text before it on the line."""
        c = self._peek()
        last = parts[-1] if parts else None
        joins = last is not None and (last.kind, last.quoted, last.location.line) == (PartKind.TEXT, quoted, self._line)
        if last is not None and joins and last.location.column + len(last.text) == self._column and c != "\n":
            parts[-1] = WordPart(PartKind.TEXT, last.text + c, quoted, last.location)
        else:
            parts.append(WordPart(PartKind.TEXT, c, quoted, self._here()))
        self._step()

    def _single_quoted(self, parts: list[WordPart]) -> None:
        opened = self._here(1)
        self._step()
        parts.append(WordPart(PartKind.TEXT, "", quoted=True, location=self._here()))
        while not self._at_end() and self._peek() != "'":
            self._text_part(parts, quoted=True)
        self._close("'", opened)

    def _double_quoted(self, parts: list[WordPart]) -> None:
        opened = self._here(1)
        self._step()
        parts.append(WordPart(PartKind.TEXT, "", quoted=True, location=self._here()))
        while not self._at_end() and self._peek() != '"':
            if self._text.startswith("\\\n", self._position):
                self._step(2)
            elif self._peek() == "\\" and self._text[self._position + 1 : self._position + 2] in ("$", "`", '"', "\\"):
                self._step()
                self._text_part(parts, quoted=True)
            elif self._peek() in "$`":
                self._expansion(parts, quoted=True)
            else:
                self._text_part(parts, quoted=True)
        self._close('"', opened)

    def _close(self, quote: str, opened: Location) -> None:
        if self._at_end():
            raise ShellTextError(f"the quote {quote} that begins here is not closed", opened)
        self._step()

    def _expansion(self, parts: list[WordPart], *, quoted: bool) -> None:
        location, text, at = self._here(1), self._text, self._position
        if text.startswith("$((", at) and (stop := _closing(text, at + 1)) and text[stop - 2 : stop] == "))":
            kind, inside = PartKind.ARITHMETIC, text[at + 3 : stop - 2]
        elif text.startswith("$(", at):
            stop = _closing(text, at + 1)
            kind, inside = PartKind.COMMAND, text[at + 2 : stop - 1]
        elif text.startswith("${", at):
            stop = _closing(text, at + 1)
            kind, inside = PartKind.PARAMETER, text[at + 2 : stop - 1]
        elif text[at] == "`":
            stop = text.find("`", at + 1) + 1
            kind, inside = PartKind.COMMAND, text[at + 1 : stop - 1]
        elif match := _NAME.match(text, at + 1):
            stop, kind, inside = match.end(), PartKind.PARAMETER, match.group()
        elif text[at + 1 : at + 2] in ("'", '"') and not quoted:
            self._step()  # $'..' and $".." are read as quotes
            return
        else:
            self._text_part(parts, quoted=quoted)
            return
        if not stop:
            raise ShellTextError("the expansion that begins here is not closed", location)
        parts.append(WordPart(kind, inside, quoted, location))
        self._step(stop - at)


def _closing(text: str, at: int) -> int:
    """Return the index after the bracket that closes the one at ``at``; 0 if none does, outside quotes and escapes."""
    pairs = {"(": ")", "{": "}"}
    open_, close = text[at], pairs[text[at]]
    depth, quote = 0, ""
    while at < len(text):
        c = text[at]
        if c == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in (open_, close):
            depth += 1 if c == open_ else -1
            if depth == 0:
                return at + 1
        at += 1
    return 0
