"""From the text of a statement to tokens, every character of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pipeproof.specs.finding import Location
from pipeproof.state.aoa.codes import NOT_READ, AoaError, fault
from pipeproof.state.aoa.syntax import IDS

Placing = Callable[[int, int], Location]
"""From the first character of a stretch of the text, and the one after its last, to where that is in the file."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<arrow>->)|(?P<comma>,)|(?P<equal>=)|(?P<open>\[)|(?P<close>\])|(?P<colon>:)
    |(?P<transpose>\^T(?![A-Za-z0-9._*$^]))|(?P<number>-?[0-9]+(?![A-Za-z0-9._]))|(?P<string>"[^"]*"|'[^']*')
    |(?P<name>[A-Za-z_][A-Za-z0-9._*$]*)""",
    re.VERBOSE,
)
_TAG = re.compile(r"\$(?!" + "|".join(re.escape(tag[1:]) for tag in IDS) + r")[A-Za-z_]*")
_HINTS = {
    "-": "the arrow is `->`",
    "$": "a name begins with a letter",
    "*": "a name begins with a letter; `*` stands for a number in it",
    "^": "`^T` stands at the end of a name, and nothing else is written so",
    '"': "the quote is not closed",
    "'": "the quote is not closed",
    ";": "one statement a line",
    "#": "a comment ends the line",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A stretch of the text; ``kind`` is ``arrow``, ``name`` and so on, and ``end`` after the last one."""

    kind: str
    text: str
    start: int

    @property
    def stop(self) -> int:
        """The place after its last character."""
        return self.start + len(self.text)


def tokens_of(text: str, placing: Placing) -> list[Token]:
    """The tokens, with one of kind ``end`` after them.

    Raises:
        AoaError: PP180, a character that begins none.
    """
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _strange(text, position, placing)
        kind = str(match.lastgroup)
        if kind == "name":
            _only_known_tags(match[0], position, placing)
        if kind != "space":
            tokens.append(Token(kind, match[0], position))
        position = match.end()
    return [*tokens, Token("end", "", len(text.rstrip()))]


def _strange(text: str, position: int, placing: Placing) -> AoaError:
    character = text[position]
    mend = _HINTS.get(character)
    if character.isdigit():
        mend = "a name begins with a letter, and digits are 0 to 9"
    return AoaError(fault(NOT_READ, f"unexpected {character!r}", placing(position, position + 1), mend))


def _only_known_tags(name: str, start: int, placing: Placing) -> None:
    wrong = _TAG.search(name)
    if wrong is not None:
        place = placing(start + wrong.start(), start + wrong.end())
        known = ", ".join(f"`{tag}`" for tag in IDS)
        raise AoaError(fault(NOT_READ, f"`{wrong[0]}` stands for nothing", place, f"known are {known}"))
