"""Commands of a shell script, found by static evaluation of assignments, conditions and arrays; nothing is run.

Assumptions: the script is called without arguments, and the environment sets
none of the variables that have a default in it. If a condition depends on more
than that (files, commands, loops), neither branch is taken, and its
assignments are noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.megatron.shell_values import Argument, Fragment, Variables
from pipeproof.interop.importers.megatron.shell_words import (
    Assignment,
    Operator,
    PartKind,
    ShellTextError,
    Token,
    Word,
    shell_tokens,
)

_DIGITS: Final = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_NUMERIC: Final = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})


class Conditions:
    """Evaluates tests: True, False, or None if only a run determines the result."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def holds(self, tokens: Sequence[Token]) -> bool | None:
        """Evaluate tests joined by ``&&`` and ``||``, which have equal precedence and are left-associative."""
        result: bool | None = None
        current: list[Token] = []
        joined = ""
        for token in (*tokens, Operator("&&", Location(""))):
            if not (isinstance(token, Operator) and token.text in ("&&", "||")):
                current.append(token)
                continue
            holds = self._single(current)
            if not joined:
                result = holds
            elif joined == "&&":
                result = False if False in (result, holds) else None if None in (result, holds) else True
            else:
                result = either(result, holds)
            joined, current = token.text, []
        return result

    def _single(self, tokens: Sequence[Token]) -> bool | None:
        words = [token for token in tokens if isinstance(token, Word)]
        texts = [plain_text(word) for word in words]
        if any(isinstance(token, Assignment) for token in tokens) or not words:
            return None
        if texts[0] in ("[", "[[", "test"):
            words, texts = words[1:], texts[1:]
        if texts and texts[-1] in ("]", "]]"):
            words, texts = words[:-1], texts[:-1]
        if texts and texts[0] == "!":
            inverse = self._single(words[1:])
            return None if inverse is None else not inverse
        if texts and texts[0] in ("[", "[["):
            return self._single(words)
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
    """Return ``a or b`` where each may be unknown (None)."""
    return True if True in (a, b) else None if None in (a, b) else False


def plain_text(token: Token) -> str | None:
    """Return the text of a word without quotes and expansions, else None."""
    if not isinstance(token, Word) or len(token.parts) != 1 or token.parts[0].quoted:
        return None
    return token.parts[0].text if token.parts[0].kind is PartKind.TEXT else None


@dataclass(frozen=True, slots=True)
class Script:
    """Commands of a script with their arguments, and its variables at the end.

    ``environments`` has the assignments before each command, such as ``NNODES=2 torchrun``.
    """

    commands: tuple[tuple[Argument, ...], ...]
    variables: Variables
    environments: tuple[Mapping[str, str | None], ...] = ()


def read_script(text: str, file: str, preset: Mapping[str, str] = MappingProxyType({})) -> Script:
    """Find the commands of a script; ``preset`` are variables of its environment.

    Raises:
        ShellTextError: a quote, a list or an expansion is not closed, is nested too deeply, or inserts too much.
    """
    try:
        reader = _Reader(shell_tokens(text, file))
        for name, value in preset.items():
            reader.variables.assign(name, (Fragment(value, quoted=True, location=Location(file)),), append=False)
        reader.read()
    except RecursionError:
        raise ShellTextError("an expansion is nested too deeply", Location(file)) from None
    return Script(tuple(reader.commands), reader.variables, tuple(reader.environments))


_SEPARATORS: Final = frozenset({"\n", ";", "&&", "||", "|", "|&", "&", "(", ")", ";;", ";&", ";;&"})
_DECLARING: Final = frozenset({"export", "local", "declare", "typeset", "readonly"})


_HERE_DOCUMENTS: Final = frozenset({"<<", "<<-"})
"""Operators of here-documents; the tokens do not contain their text."""

_LONGEST_HEADER: Final = 8
"""Tokens of ``function name () {``, with line breaks in it."""


@dataclass(slots=True)
class _Block:
    """An open ``if``, ``case``, loop or function.

    ``runs`` is True if the current branch is executed, None if only a run
    decides; ``done`` if an earlier branch was executed, None if it may have been.
    """

    ends: str
    runs: bool | None
    done: bool | None = False
    subject: str | None = None
    at_pattern: bool = False
    reading: list[Token] = field(default_factory=list)


class _Reader:
    """Reads the tokens once, command by command."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.commands: list[tuple[Argument, ...]] = []
        self.environments: list[Mapping[str, str | None]] = []
        self.variables = Variables()
        self._tokens = tokens
        self._position = 0
        self._blocks: list[_Block] = []

    def read(self) -> None:
        while self._position < len(self._tokens):
            token = self._tokens[self._position]
            if self._blocks and self._blocks[-1].at_pattern and not _is_newline(token):
                self._pattern()
            elif isinstance(token, Operator):
                self._separator(token)
            else:
                self._command()

    def _separator(self, token: Operator) -> None:
        self._position += 1
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.ends == "esac" and token.text in (";;", ";&", ";;&"):
            block.at_pattern = True

    def _runs(self) -> bool | None:
        """Return True if the current command is executed; None if only a run decides."""
        states = [block.runs for block in self._blocks]
        return False if False in states else None if None in states else True

    def _command(self) -> None:
        start = self._position
        while self._position < len(self._tokens):
            token = self._tokens[self._position]
            if isinstance(token, Operator):
                if token.text in _SEPARATORS:
                    break
                self._position += 1 if token.text in _HERE_DOCUMENTS else 2  # a redirection and its file
            else:
                self._position += 1
        parts = [token for token in self._tokens[start : self._position] if not isinstance(token, Operator)]
        first = plain_text(parts[0]) if parts else None
        if first in _KEYWORDS:
            self._position = start + 1
            self._keyword(first)
        elif first is not None and self._opens_function(first, start):
            self._blocks.append(_Block("}", runs=False))
        elif first == "}" or first == "{":
            self._position = start + 1
            if first == "}" and self._blocks and self._blocks[-1].ends == "}":
                self._blocks.pop()
        else:
            self._simple(_without_files(self._tokens[start : self._position]))

    def _opens_function(self, first: str, start: int) -> bool:
        """Skip ``name() {`` or ``function name {``, and return True; function bodies are not evaluated."""
        texts: list[str] = []
        for index in range(start, min(start + _LONGEST_HEADER, len(self._tokens))):
            token = self._tokens[index]
            text = token.text if isinstance(token, Operator) else plain_text(token)
            if text == "{" and texts in (
                [first, "(", ")"],
                ["function", *texts[1:2]],
                ["function", *texts[1:2], "(", ")"],
            ):
                self._position = index + 1
                return True
            if text is None:
                return False
            if text != "\n":
                texts.append(text)
        return False

    def _simple(self, parts: Sequence[Word | Assignment]) -> None:
        runs = self._runs()
        declares = bool(parts) and plain_text(parts[0]) in _DECLARING
        assignments = [part for part in parts if isinstance(part, Assignment)]
        words = [part for part in parts if isinstance(part, Word)]
        if runs is None:
            for part in assignments:
                self.variables.undecided.setdefault(part.name, part.word.location)
        if not runs:
            return
        if declares or not words:
            for part in assignments:
                value = self.variables.scalar(part.word) if part.items is None else self.variables.items(part.items)
                self.variables.assign(part.name, value, append=part.append)
        elif plain_text(words[0]) == ":":
            for word in words:
                self.variables.scalar(word)  # `: ${NAME:=value}` assigns
        else:
            self.commands.append(tuple(self._arguments(words)))
            self.environments.append({part.name: self.variables.text(part.word) for part in assignments})

    def _arguments(self, words: Sequence[Word]) -> Iterator[Argument]:
        """Yield the arguments of a command; the text after ``eval`` and ``-c`` is a command line itself."""
        is_line = plain_text(words[0]) == "eval"
        for word in words[is_line:]:
            yield from self.variables.arguments(word, split_quotes=is_line)
            is_line = is_line or plain_text(word) in ("-c", "-lc")

    def _keyword(self, word: str) -> None:
        match word:
            case "if":
                self._open("fi", "then")
            case "while" | "until":
                runs = self._condition("do")
                never = runs is (word == "until")
                self._blocks.append(_Block("done", runs=False if runs is not None and never else None))
            case "for" | "select":
                self._skip_to("do")
                self._blocks.append(_Block("done", runs=None))
            case "case":
                self._case()
            case "elif" if self._blocks:
                block = self._blocks[-1]
                block.runs = True  # for the condition itself
                block.runs = _branch(block.done, self._condition("then"))
                block.done = either(block.done, block.runs)
            case "else" if self._blocks:
                block = self._blocks[-1]
                block.runs = _branch(block.done, holds=True)
            case "fi" | "done" | "esac" if self._blocks and self._blocks[-1].ends == word:
                self._blocks.pop()

    def _open(self, ends: str, before: str) -> None:
        holds = self._condition(before)
        self._blocks.append(_Block(ends, runs=holds, done=holds))

    def _skip_to(self, word: str) -> list[Token]:
        start = self._position
        while self._position < len(self._tokens) and plain_text(self._tokens[self._position]) != word:
            self._position += 1
        skipped = list(self._tokens[start : self._position])
        self._position += 1
        return skipped

    def _condition(self, before: str) -> bool | None:
        """Evaluate the tokens between ``if`` and ``then``."""
        tokens = self._skip_to(before)
        while tokens and isinstance(tokens[-1], Operator) and tokens[-1].text in (";", "\n"):
            tokens.pop()
        return Conditions(self.variables).holds(tokens)

    def _case(self) -> None:
        words = [token for token in self._skip_to("in") if isinstance(token, Word)]
        subject = self.variables.text(words[0]) if words else None
        self._blocks.append(_Block("esac", runs=False, subject=subject, at_pattern=True))

    def _pattern(self) -> None:
        """Read ``a | b)`` of a ``case``, or its end."""
        block = self._blocks[-1]
        if plain_text(self._tokens[self._position]) == "esac":
            self._blocks.pop()
            self._position += 1
            return
        patterns = []
        while self._position < len(self._tokens):
            token = self._tokens[self._position]
            self._position += 1
            if isinstance(token, Operator) and token.text == ")":
                break
            if isinstance(token, Word):
                patterns.append(self.variables.text(token))
        block.at_pattern = False
        holds = None
        if block.subject is not None and None not in patterns:
            holds = any(fnmatchcase(block.subject, pattern) for pattern in patterns if pattern is not None)
        block.runs = _branch(block.done, holds)
        block.done = either(block.done, block.runs)


_KEYWORDS: Final = frozenset(
    {"if", "then", "elif", "else", "fi", "while", "until", "for", "select", "do", "done", "case", "esac", "!", "time"}
)


def _branch(done: bool | None, holds: bool | None) -> bool | None:
    """Return True if a branch after others is taken; None if only a run decides."""
    if done or holds is False:
        return False
    return holds if done is False else None


def _is_newline(token: Token) -> bool:
    return isinstance(token, Operator) and token.text == "\n"


def _without_files(tokens: Sequence[Token]) -> list[Word | Assignment]:
    """Return the words of a command without its redirections."""
    kept: list[Word | Assignment] = []
    skip = False
    for token in tokens:
        if isinstance(token, Operator):
            skip = token.text not in _HERE_DOCUMENTS
        elif skip:
            skip = False
        else:
            kept.append(token)
    return kept
