"""What shell variables hold, and what a word becomes, without running anything."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipeproof.interop.megatron.shell_words import Piece, PieceKind, Word, words_in


@dataclass(frozen=True, slots=True)
class Fragment:
    """A stretch of a value on one line.

    ``text`` is None where only a run can tell; ``why`` says what it depends
    on, and ``unset`` that it is a variable which the script does not set.
    """

    text: str | None
    quoted: bool
    line: int
    column: int
    why: str = ""
    unset: bool = False


Scalar = tuple[Fragment, ...]
"""The value of a variable, or a word after expansion."""

Value = Scalar | list[Scalar]
"""Of a variable, or of an array."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A word of a command as the program gets it; ``text`` is None where only a run can tell, and ``why`` says why."""

    text: str | None
    line: int
    column: int
    end_column: int
    why: str = ""


def known_text(value: Scalar) -> str | None:
    """The text of a value; None where a part is not known."""
    texts = [fragment.text for fragment in value]
    return None if None in texts else "".join(text for text in texts if text is not None)


class Variables:
    """The variables of a script as far as they can be known, and what was taken for granted about them.

    ``unset`` collects the names that the script reads and does not set: the
    environment is taken to have none of them. ``undecided`` has the names
    that are assigned where only a run decides whether, with the line.
    """

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self.unset: dict[str, int] = {}
        self.undecided: dict[str, int] = {}
        self.used: dict[str, None] = {}

    def assign(self, name: str, value: Value, *, append: bool) -> None:
        """``NAME=value`` or, with ``append``, ``NAME+=value``."""
        old = self._values.get(name) if append else None
        if old is None:
            self._values[name] = value
        elif isinstance(old, list):
            self._values[name] = [*old, *(value if isinstance(value, list) else [value])]
        elif isinstance(value, list):
            self._values[name] = [old, *value]
        else:
            self._values[name] = (*old, *value)

    def arrays(self) -> Iterator[tuple[str, list[Scalar]]]:
        """Every variable in the order of assignment, as the list of its items."""
        for name, value in self._values.items():
            yield name, value if isinstance(value, list) else [value]

    def scalar(self, word: Word) -> Scalar:
        """The value that an assignment of the word gives: expanded, and not split."""
        return tuple(fragment for scalar in self._expand(word.pieces, whole=True) for fragment in scalar)

    def text(self, word: Word) -> str | None:
        """The word as one text, as conditions and patterns take it; unset variables are empty."""
        return known_text(tuple(fragment for fragment in self.scalar(word) if not fragment.unset))

    def arguments(self, word: Word, *, split_quotes: bool = False) -> Iterator[Argument]:
        """What the word becomes on a command line: expanded, and split at blanks outside of quotes.

        With ``split_quotes`` it is a command line itself, as after ``eval`` and ``bash -c``.
        """
        for scalar in self._expand(word.pieces, whole=False):
            yield from words_of(scalar) if split_quotes else map(_argument, _split(scalar))

    def items(self, words: Sequence[Word]) -> list[Scalar]:
        """The items of a list in parentheses."""
        return [
            tuple(item)
            for word in words
            for scalar in self._expand(word.pieces, whole=False)
            for item in _split(scalar)
        ]

    def _expand(self, pieces: Sequence[Piece], *, whole: bool) -> Iterator[Scalar]:
        """Expand a word; it is several words where ``"${A[@]}"`` stands in it, unless ``whole``."""
        current: list[Fragment] = []
        for piece in pieces:
            if piece.kind is PieceKind.TEXT:
                current.append(Fragment(piece.text, piece.quoted, piece.line, piece.column))
                continue
            values = self._value(piece)
            for index, value in enumerate(values):
                if index and not whole:
                    yield tuple(current)
                    current = []
                elif index:
                    current.append(Fragment(" ", piece.quoted, piece.line, piece.column))
                current += [replace(fragment, quoted=piece.quoted) for fragment in value]
        if current:
            yield tuple(current)

    def _value(self, piece: Piece) -> list[Scalar]:
        match piece.kind:
            case PieceKind.ARITHMETIC:
                return [self._arithmetic(piece)]
            case PieceKind.COMMAND:
                return [_unknown(piece, f"`$({piece.text.strip()})`")]
            case _:
                return self._parameter(piece)

    def _parameter(self, piece: Piece) -> list[Scalar]:
        match = _PARAMETER.fullmatch(piece.text)
        if match is None:
            return [_unknown(piece, f"`${{{piece.text}}}`, whose form is not evaluated here")]
        name, index, action, rest = match.group("name", "index", "action", "rest")
        value = self._lookup(name, index)
        is_empty = value is None or ((action or "").startswith(":") and all(known_text(item) == "" for item in value))
        if not action:
            return self._plain(piece, name, value)
        word = words_in(rest, piece.line, piece.column + 2 + match.start("rest"))
        default = [tuple(fragment for part in self._expand(word, whole=True) for fragment in part)]
        match action[-1]:
            case "+":
                return [()] if is_empty else default
            case "?":
                return self._plain(piece, name, value)
            case "=" if is_empty:
                self.assign(name, default[0], append=False)
        if value is None or is_empty:
            self.unset.setdefault(name, piece.line)
            return default
        return value

    def _plain(self, piece: Piece, name: str, value: list[Scalar] | None) -> list[Scalar]:
        if value is not None:
            return value
        if name == "#":
            return [(Fragment("0", piece.quoted, piece.line, piece.column),)]
        if name in "@*":
            return [()]
        return [
            (
                Fragment(
                    None,
                    piece.quoted,
                    piece.line,
                    piece.column,
                    f"`${name}`, which the script does not set",
                    unset=True,
                ),
            )
        ]

    def _lookup(self, name: str, index: str | None) -> list[Scalar] | None:
        self.used[name] = None
        value = self._values.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if index in ("@", "*"):
            return items
        number = int(index) if index is not None and index.isdecimal() else 0
        return [items[number]] if number < len(items) else None

    def _arithmetic(self, piece: Piece) -> Scalar:
        names = {name: self._number(name) for name in _NUMBER_NAME.findall(piece.text)}
        lost = next((name for name, number in names.items() if number is None), None)
        if lost is not None:
            return _unknown(piece, f"`$(({piece.text}))`, since `{lost}` is not known")
        numbers = {name: number for name, number in names.items() if number is not None}
        result = evaluate(piece.text, numbers)
        if result is None:
            return _unknown(piece, f"`$(({piece.text}))`, which is not evaluated here")
        return (Fragment(str(result), piece.quoted, piece.line, piece.column),)

    def _number(self, name: str) -> int | None:
        value = self._lookup(name, None)
        text = None if value is None else known_text(value[0])
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text.strip(), re.ASCII) else None


_PARAMETER: Final = re.compile(
    r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[@*]|\d+)\])?(?:(?P<action>:?[-=+?])(?P<rest>.*))?",
    re.ASCII | re.DOTALL,
)
_NUMBER_NAME: Final = re.compile(r"(?<![\w])[A-Za-z_]\w*", re.ASCII)
_DOLLAR: Final = re.compile(r"\$\{?([A-Za-z_]\w*)\}?", re.ASCII)
_BINARY: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(text: str, numbers: Mapping[str, int]) -> int | None:
    """An arithmetic expression of ``+ - * / %`` and parentheses; None for anything else, and for what is negative.

    Shells round quotients towards zero; without negative numbers that is down.
    """
    try:
        tree = ast.parse(_DOLLAR.sub(r"\1", text.strip()), mode="eval")
        result = _evaluated(tree.body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError):
        return None
    return result if result >= 0 else None


def _evaluated(node: ast.expr, numbers: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return numbers[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            operands = _evaluated(left, numbers), _evaluated(right, numbers)
            if min(operands) < 0:
                raise ValueError("negative")
            return _BINARY[type(op)](*operands)
        case _:
            raise ValueError("not evaluated")


def _unknown(piece: Piece, why: str) -> Scalar:
    return (Fragment(None, piece.quoted, piece.line, piece.column, why),)


def words_of(scalar: Scalar) -> Iterator[Argument]:
    """The words of a value, as an expansion without quotes gives them."""
    yield from map(_argument, _split(tuple(replace(fragment, quoted=False) for fragment in scalar)))


def _split(scalar: Scalar) -> Iterator[list[Fragment]]:
    """Words of an expanded word: blanks that no quote holds part them."""
    current: list[Fragment] = []
    for fragment in scalar:
        if fragment.quoted or fragment.text is None:
            current.append(fragment)
            continue
        column = fragment.column
        for part in re.split(r"(\s+)", fragment.text):
            if part and not part.isspace():
                current.append(replace(fragment, text=part, column=column))
            elif part and current:
                yield current
                current = []
            column += len(part)
    if current:
        yield current


def _argument(fragments: list[Fragment]) -> Argument:
    first = fragments[0]
    text = known_text(tuple(fragments))
    why = next((fragment.why for fragment in fragments if fragment.text is None), "")
    named = next((fragment for fragment in fragments if fragment.text), first)
    length = len(text) if text is not None and all(f.line == named.line for f in fragments) else 1
    return Argument(text, named.line, named.column, named.column + max(length, 1) - 1, why)
