"""Values of shell variables, and expansion of words, without running anything."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.megatron.shell_words import PartKind, ShellTextError, Word, WordPart, parse_default


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a value on one line.

    ``text`` is None if only a run determines it; ``why`` names what it depends
    on, and ``unset`` marks a variable that the script does not set.
    """

    text: str | None
    quoted: bool
    location: Location
    why: str = ""
    unset: bool = False


Scalar = tuple[Fragment, ...]
"""The value of a variable, or a word after expansion."""

Value = Scalar | list[Scalar]
"""Value of a variable or of an array."""

MAX_EXPANDED: Final = 2**23
"""Most characters that all expansions of a script insert."""
_LEAST_COST: Final = 16
"""Characters that a fragment counts as, in addition to its own."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a command; ``text`` is None if only a run determines it, and ``why`` is the reason.

    ``start`` is then its text before the part that is not known.
    """

    text: str | None
    location: Location
    why: str = ""
    start: str = ""


def known_text(value: Scalar) -> str | None:
    """Return the text of a value; None if a part is not known."""
    texts = [fragment.text for fragment in value]
    return None if None in texts else "".join(text for text in texts if text is not None)


class Variables:
    """The variables of a script as far as they are known, and the assumptions about them.

    ``unset`` collects the names that the script reads and does not set: the
    environment is assumed to have none of them. ``undecided`` maps names whose
    assignment only a run decides to its location.
    """

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._expanded = 0
        self.unset: dict[str, Location] = {}
        self.undecided: dict[str, Location] = {}
        self.used: dict[str, None] = {}

    def assign(self, name: str, value: Value, *, append: bool) -> None:
        """Execute ``NAME=value`` or, with ``append``, ``NAME+=value``."""
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
        """Yield every variable in the order of assignment, as the list of its items."""
        for name, value in self._values.items():
            yield name, value if isinstance(value, list) else [value]

    def scalar(self, word: Word) -> Scalar:
        """Return the value of an assignment of the word: expanded, not split."""
        return tuple(fragment for scalar in self._expand(word.parts, whole=True) for fragment in scalar)

    def text(self, word: Word) -> str | None:
        """Return the word as one text, for conditions and patterns; unset variables are empty."""
        return known_text(tuple(fragment for fragment in self.scalar(word) if not fragment.unset))

    def arguments(self, word: Word, *, split_quotes: bool = False) -> Iterator[Argument]:
        """Yield the arguments of the word on a command line: expanded, and split at blanks outside of quotes.

        With ``split_quotes`` the word is a command line itself, as after ``eval`` and ``bash -c``.
        """
        for scalar in self._expand(word.parts, whole=False):
            yield from words_of(scalar) if split_quotes else map(_argument, _split(scalar))

    def items(self, words: Sequence[Word]) -> list[Scalar]:
        """Return the items of a list in parentheses."""
        return [
            tuple(item) for word in words for scalar in self._expand(word.parts, whole=False) for item in _split(scalar)
        ]

    def _expand(self, parts: Sequence[WordPart], *, whole: bool) -> Iterator[Scalar]:
        """Expand a word; ``"${A[@]}"`` in it gives several words, unless ``whole``."""
        current: list[Fragment] = []
        for part in parts:
            if part.kind is PartKind.TEXT:
                current.append(Fragment(part.text, part.quoted, part.location))
                continue
            values = self._value(part)
            for index, value in enumerate(values):
                if index and not whole:
                    yield tuple(current)
                    current = []
                elif index:
                    current.append(Fragment(" ", part.quoted, part.location))
                self._spend(part, value)
                current += [replace(fragment, quoted=part.quoted) for fragment in value]
        if current:
            yield tuple(current)

    def _spend(self, part: WordPart, value: Scalar) -> None:
        """Count what an expansion inserts: a variable that repeats another one doubles at each step."""
        self._expanded += sum(_LEAST_COST + len(fragment.text or "") for fragment in value)
        if self._expanded > MAX_EXPANDED:
            raise ShellTextError(f"expansions insert more than {MAX_EXPANDED:,} characters up to here", part.location)

    def _value(self, part: WordPart) -> list[Scalar]:
        match part.kind:
            case PartKind.ARITHMETIC:
                return [self._arithmetic(part)]
            case PartKind.COMMAND:
                return [_unknown(part, f"`$({part.text.strip()})`")]
            case _:
                return self._parameter(part)

    def _parameter(self, part: WordPart) -> list[Scalar]:
        match = _PARAMETER.fullmatch(part.text)
        if match is None:
            return [_unknown(part, f"`${{{part.text}}}`, an expansion that is not evaluated here")]
        name, index, action, rest = match.group("name", "index", "action", "rest")
        value = self._lookup(name, index)
        is_empty = value is None or ((action or "").startswith(":") and all(known_text(item) == "" for item in value))
        if not action:
            return self._plain(part, name, value)
        word = parse_default(rest, part.location.part(2 + match.start("rest"), 2 + match.end("rest")))
        default = [tuple(fragment for scalar in self._expand(word, whole=True) for fragment in scalar)]
        match action[-1]:
            case "+":
                return [()] if is_empty else default
            case "?":
                return self._plain(part, name, value)
            case "=" if is_empty:
                self.assign(name, default[0], append=False)
        if value is None or is_empty:
            self.unset.setdefault(name, part.location)
            return default
        return value

    def _plain(self, part: WordPart, name: str, value: list[Scalar] | None) -> list[Scalar]:
        if value is not None:
            return value
        if name == "#":
            return [(Fragment("0", part.quoted, part.location),)]
        if name in "@*":
            return [()]
        why = f"`${name}`, which the script does not set"
        return [(Fragment(None, part.quoted, part.location, why, unset=True),)]

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

    def _arithmetic(self, part: WordPart) -> Scalar:
        names = {name: self._number(name) for name in _NUMBER_NAME.findall(part.text)}
        unknown = next((name for name, number in names.items() if number is None), None)
        if unknown is not None:
            return _unknown(part, f"`$(({part.text}))`, since `{unknown}` is not known")
        numbers = {name: number for name, number in names.items() if number is not None}
        result = evaluate(part.text, numbers)
        if result is None:
            return _unknown(part, f"`$(({part.text}))`, which is not evaluated here")
        return (Fragment(str(result), part.quoted, part.location),)

    def _number(self, name: str) -> int | None:
        value = self._lookup(name, None)
        text = None if value is None else known_text(value[0])
        return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text.strip(), re.ASCII) else None


_PARAMETER: Final = re.compile(
    r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[@*]|\d{1,9})\])?(?:(?P<action>:?[-=+?])(?P<rest>.*))?",
    re.ASCII | re.DOTALL,
)
_NUMBER_NAME: Final = re.compile(r"(?<![\w])[A-Za-z_]\w*", re.ASCII)
_DOLLAR: Final = re.compile(r"\$\{?([A-Za-z_]\w*)\}?", re.ASCII)
_MOST_NUMBER: Final = 2**63
_BINARY: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(text: str, numbers: Mapping[str, int]) -> int | None:
    """Evaluate an arithmetic expression of ``+ - * / %`` and parentheses.

    None for others, and for results that are negative or need more than 64 bits.

    Shells round quotients towards zero; without negative numbers that is down.
    """
    try:
        tree = ast.parse(_DOLLAR.sub(r"\1", text.strip()), mode="eval")
        result = _evaluated(tree.body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError, MemoryError):
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
            result = _BINARY[type(op)](*operands)
            if result >= _MOST_NUMBER:
                raise ValueError("more than 64 bits")
            return result
        case _:
            raise ValueError("not evaluated")


def _unknown(part: WordPart, why: str) -> Scalar:
    return (Fragment(None, part.quoted, part.location, why),)


def words_of(scalar: Scalar) -> Iterator[Argument]:
    """Yield the words of a value in an expansion without quotes."""
    yield from map(_argument, _split(tuple(replace(fragment, quoted=False) for fragment in scalar)))


def _split(scalar: Scalar) -> Iterator[list[Fragment]]:
    """Split an expanded word at blanks outside of quotes."""
    current: list[Fragment] = []
    for fragment in scalar:
        if fragment.quoted or fragment.text is None:
            current.append(fragment)
            continue
        start = 0
        for run in re.split(r"(\s+)", fragment.text):
            if run and not run.isspace():
                location = fragment.location.part(start, start + len(run))
                current.append(replace(fragment, text=run, location=location))
            elif run and current:
                yield current
                current = []
            start += len(run)
    if current:
        yield current


def _argument(fragments: list[Fragment]) -> Argument:
    first = fragments[0]
    text = known_text(tuple(fragments))
    why = next((fragment.why for fragment in fragments if fragment.text is None), "")
    located = next((fragment for fragment in fragments if fragment.text), first)
    is_one_line = all(fragment.location.line == located.location.line for fragment in fragments)
    length = len(text) if text is not None and is_one_line else 1
    start = "" if text is not None else "".join(part.text or "" for part in takewhile(_is_known, fragments))
    return Argument(text, located.location.part(0, length), why, start)


def _is_known(fragment: Fragment) -> bool:
    return fragment.text is not None
