"""Whether the tests of a shell script hold, as far as reading it can tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from pipeproof.interop.megatron.shell_values import Variables
from pipeproof.interop.megatron.shell_words import Assignment, Operator, PieceKind, Token, Word

_DIGITS: Final = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_NUMERIC: Final = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})


class Conditions:
    """Whether tests hold: True, False, or None where only a run can tell."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def holds(self, tokens: Sequence[Token]) -> bool | None:
        """Tests joined by ``&&`` and ``||``, which bind alike and from the left."""
        result: bool | None = None
        current: list[Token] = []
        joined = ""
        for token in (*tokens, Operator("&&", 0, 0)):
            if not (isinstance(token, Operator) and token.text in ("&&", "||")):
                current.append(token)
                continue
            this = self._one(current)
            if not joined:
                result = this
            elif joined == "&&":
                result = False if False in (result, this) else None if None in (result, this) else True
            else:
                result = either(result, this)
            joined, current = token.text, []
        return result

    def _one(self, tokens: Sequence[Token]) -> bool | None:
        words = [token for token in tokens if isinstance(token, Word)]
        texts = [plain_text(word) for word in words]
        if any(isinstance(token, Assignment) for token in tokens) or not words:
            return None
        if texts[0] in ("[", "[[", "test"):
            words, texts = words[1:], texts[1:]
        if texts and texts[-1] in ("]", "]]"):
            words, texts = words[:-1], texts[:-1]
        if texts and texts[0] == "!":
            inverse = self._one(words[1:])
            return None if inverse is None else not inverse
        if texts and texts[0] in ("[", "[["):
            return self._one(words)
        return self._test(words, texts)

    def _test(self, words: Sequence[Word], texts: Sequence[str | None]) -> bool | None:
        match texts:
            case ["-z" | "-n" as test, _]:
                text = self._variables.text(words[1])
                return None if text is None else (text == "") is (test == "-z")
            case [_, "=" | "==" | "!=" as test, _]:
                left, right = self._variables.text(words[0]), self._variables.text(words[2])
                return None if left is None or right is None else fnmatchcase(left, right) is (test != "!=")
            case [_, test, _] if test in _NUMERIC:
                return self._compared(words[0], test, words[2])
            case ["true"]:
                return True
            case ["false"]:
                return False
            case _:
                return None

    def _compared(self, left: Word, test: str, right: Word) -> bool | None:
        texts = self._variables.text(left), self._variables.text(right)
        numbers = [int(text) for text in texts if text is not None and _DIGITS.fullmatch(text)]
        if len(numbers) < len(texts):
            return None
        a, b = numbers
        return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[test]


def either(a: bool | None, b: bool | None) -> bool | None:
    """``a or b`` where each may be unknown."""
    return True if True in (a, b) else None if None in (a, b) else False


def plain_text(token: Token) -> str | None:
    """The text of a word that is not quoted and has no expansions."""
    if not isinstance(token, Word) or len(token.pieces) != 1 or token.pieces[0].quoted:
        return None
    return token.pieces[0].text if token.pieces[0].kind is PieceKind.TEXT else None
