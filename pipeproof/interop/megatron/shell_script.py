"""Which commands a shell script comes to, found by reading it: assignments, conditions and arrays, nothing is run.

Taken for granted, as a person does who reads a launch script: it is called
without arguments, and the environment sets none of the variables that have a
default in it. Where a condition depends on more than that (files, commands,
loops), neither branch is taken, and what it would assign is noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from pipeproof.interop.megatron.shell_conditions import Conditions, either, plain_text
from pipeproof.interop.megatron.shell_values import Argument, Variables
from pipeproof.interop.megatron.shell_words import Assignment, Operator, Token, Word, shell_tokens


@dataclass(frozen=True, slots=True)
class Script:
    """The commands of a script with their arguments, and its variables at the end."""

    commands: tuple[tuple[Argument, ...], ...]
    variables: Variables


def read_script(text: str) -> Script:
    """Find the commands of a script.

    Raises:
        ShellTextError: a quote, a list or an expansion is not closed.
    """
    reader = _Reader(shell_tokens(text))
    reader.read()
    return Script(tuple(reader.commands), reader.variables)


_SEPARATORS: Final = frozenset({"\n", ";", "&&", "||", "|", "|&", "&", "(", ")", ";;", ";&", ";;&"})
_DECLARING: Final = frozenset({"export", "local", "declare", "typeset", "readonly"})


_HERE: Final = frozenset({"<<", "<<-"})
"""Of here-documents, whose words the tokens leave out."""

_LONGEST_HEADER: Final = 8
"""Tokens of ``function name () {``, with line breaks in it."""


@dataclass(slots=True)
class _Block:
    """An open ``if``, ``case``, loop or function: whether what is being read in it is carried out.

    ``runs`` is None where only a run decides; ``done`` says that an earlier
    branch was taken, or may have been.
    """

    ends: str
    runs: bool | None
    done: bool | None = False
    subject: str | None = None
    at_pattern: bool = False
    reading: list[Token] = field(default_factory=list)


class _Reader:
    """Goes through the tokens once, command by command."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.commands: list[tuple[Argument, ...]] = []
        self.variables = Variables()
        self._tokens = tokens
        self._at = 0
        self._blocks: list[_Block] = []

    def read(self) -> None:
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if self._blocks and self._blocks[-1].at_pattern and not _is_newline(token):
                self._pattern()
            elif isinstance(token, Operator):
                self._separator(token)
            else:
                self._command()

    def _separator(self, token: Operator) -> None:
        self._at += 1
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.ends == "esac" and token.text in (";;", ";&", ";;&"):
            block.at_pattern = True

    def _runs(self) -> bool | None:
        """Whether a command at this place is carried out."""
        states = [block.runs for block in self._blocks]
        return False if False in states else None if None in states else True

    def _command(self) -> None:
        start = self._at
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if isinstance(token, Operator):
                if token.text in _SEPARATORS:
                    break
                self._at += 1 if token.text in _HERE else 2  # a redirection and its file
            else:
                self._at += 1
        parts = [token for token in self._tokens[start : self._at] if not isinstance(token, Operator)]
        first = plain_text(parts[0]) if parts else None
        if first in _KEYWORDS:
            self._at = start + 1
            self._keyword(first)
        elif first is not None and self._opens_function(first, start):
            self._blocks.append(_Block("}", runs=False))
        elif first == "}" or first == "{":
            self._at = start + 1
            if first == "}" and self._blocks and self._blocks[-1].ends == "}":
                self._blocks.pop()
        else:
            self._simple(_without_files(self._tokens[start : self._at]))

    def _opens_function(self, first: str, start: int) -> bool:
        """``name() {`` and ``function name {``; what a function does is not followed."""
        texts: list[str] = []
        for at in range(start, min(start + _LONGEST_HEADER, len(self._tokens))):
            token = self._tokens[at]
            text = token.text if isinstance(token, Operator) else plain_text(token)
            if text == "{" and texts in (
                [first, "(", ")"],
                ["function", *texts[1:2]],
                ["function", *texts[1:2], "(", ")"],
            ):
                self._at = at + 1
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
                self.variables.undecided.setdefault(part.name, part.word.line)
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

    def _arguments(self, words: Sequence[Word]) -> Iterator[Argument]:
        """What the command gets; what follows ``eval`` and ``-c`` is a command line itself."""
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
        start = self._at
        while self._at < len(self._tokens) and plain_text(self._tokens[self._at]) != word:
            self._at += 1
        skipped = list(self._tokens[start : self._at])
        self._at += 1
        return skipped

    def _condition(self, before: str) -> bool | None:
        """What stands between ``if`` and ``then``."""
        tokens = self._skip_to(before)
        while tokens and isinstance(tokens[-1], Operator) and tokens[-1].text in (";", "\n"):
            tokens.pop()
        return Conditions(self.variables).holds(tokens)

    def _case(self) -> None:
        words = [token for token in self._skip_to("in") if isinstance(token, Word)]
        subject = self.variables.text(words[0]) if words else None
        self._blocks.append(_Block("esac", runs=False, subject=subject, at_pattern=True))

    def _pattern(self) -> None:
        """``a | b)`` of a ``case``, or its end."""
        block = self._blocks[-1]
        if plain_text(self._tokens[self._at]) == "esac":
            self._blocks.pop()
            self._at += 1
            return
        patterns = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
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
    """Whether a branch is taken that comes behind others."""
    if done or holds is False:
        return False
    return holds if done is False else None


def _is_newline(token: Token) -> bool:
    return isinstance(token, Operator) and token.text == "\n"


def _without_files(tokens: Sequence[Token]) -> list[Word | Assignment]:
    """The words of a command without its redirections."""
    kept: list[Word | Assignment] = []
    skip = False
    for token in tokens:
        if isinstance(token, Operator):
            skip = token.text not in _HERE
        elif skip:
            skip = False
        else:
            kept.append(token)
    return kept
