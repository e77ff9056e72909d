"""The pipeline layout string of Megatron-LM, such as ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer layer, ``m`` a module of multi-token
prediction, ``L`` the loss with the norm and the head before it. ``|`` separates
stages, ``x*n`` repeats a letter (or a bar), ``(..)*n`` the letters in
parentheses; commas have no meaning. Stage ``s`` is chunk ``s // pp`` of pipeline rank
``s % pp`` (Megatron-LM, docs/user-guide/features/pipeline_parallel_layout.md
and megatron/core/transformer/pipeline_parallel_layer_layout.py). Here the whole
string must follow this grammar; Megatron-LM parses it with two replacements,
which accept some invalid strings.

    layout = { item | "," } ;
    item   = ( term | "(" , term , { term | "," } , ")" ) , [ "*" , number ] ;
    term   = "E" | "t" | "m" | "L" | "|" , [ "*" , number ] ;
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

LETTERS: Final = "EtmL"
MAX_LETTERS: Final = 100_000
"""Longest layout after all repetitions."""

_NUMBER: Final = re.compile(r"\*(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LayoutLetter:
    """A letter of the layout, and the index of its character in the string."""

    letter: str
    at: int


class LayoutError(ValueError):
    """An invalid layout, with the indices of the wrong characters (the last inclusive)."""

    def __init__(self, message: str, at: int, last: int | None = None, help: str | None = None) -> None:
        super().__init__(message)
        self.at = at
        self.last = at if last is None else last
        self.help = help


def parse_layout(text: str) -> tuple[tuple[LayoutLetter, ...], ...]:
    """Return the letters of each global stage, in order.

    Raises:
        LayoutError: the string does not follow the grammar.
    """
    flat, at = _letters(text, 0, inside=None)
    assert at == len(text), "the whole string is read, or an error was raised"
    stages: list[list[LayoutLetter]] = [[]]
    for entry in flat:
        if entry.letter == "|":
            stages.append([])
        else:
            stages[-1].append(entry)
    return tuple(tuple(stage) for stage in stages)


def check_layout(
    stages: tuple[tuple[LayoutLetter, ...], ...], *, num_layers: int, num_mtp: int, pp: int, length: int
) -> None:
    """Check Megatron-LM's conditions on a layout, and that no stage is empty, which plans do not allow.

    ``length`` is that of the string, for the location of a missing letter.

    Raises:
        LayoutError: the first violation.
    """
    flat = [entry for stage in stages for entry in stage]
    end = max(length - 1, 0)
    for letter, module, expected in (("E", "embedding", 1), ("L", "loss", 1)):
        matches = [entry for entry in flat if entry.letter == letter]
        if len(matches) != expected:
            raise LayoutError(
                f"the {module} `{letter}` appears {len(matches)} times, and must appear once", _fault(matches, end)
            )
    if flat[0].letter != "E":
        raise LayoutError(f"the layout begins with `{flat[0].letter}`, and the embedding `E` must be first", flat[0].at)
    if flat[-1].letter != "L":
        raise LayoutError(f"the layout ends with `{flat[-1].letter}`, and the loss `L` must be last", flat[-1].at)
    for letter, flag, expected in (("t", "--num-layers", num_layers), ("m", "--mtp-num-layers", num_mtp)):
        count = sum(entry.letter == letter for entry in flat)
        if count != expected:
            raise LayoutError(f"the layout has {count} `{letter}`, and {flag} is {expected}", 0, end)
    modules = [index for index, entry in enumerate(flat) if entry.letter == "m"]
    late = next((entry for entry in flat[modules[0] :] if entry.letter == "t"), None) if modules else None
    if late is not None:
        raise LayoutError("a transformer layer follows a module `m`, which must come after all of them", late.at)
    if len(stages) % pp:
        raise LayoutError(
            f"the layout has {len(stages)} stages, which do not divide by --pipeline-model-parallel-size {pp}", 0, end
        )
    holders = {index for index, stage in enumerate(stages) if any(entry.letter == "m" for entry in stage)}
    if len(holders) > 1 or (holders and min(holders) < len(stages) - pp):
        at = flat[modules[0]].at
        raise LayoutError("all modules `m` must be in one stage, in the last chunk of its pipeline rank", at)
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        before = max((entry.at for stage in stages[:empty] for entry in stage), default=-1)
        raise LayoutError(
            f"stage {empty} has no layer, and a plan's stages have at least one",
            min(before + 1, end),
            help="Megatron-LM runs such a layout; move a layer to that stage to check it",
        )


def _fault(matches: list[LayoutLetter], end: int) -> int:
    return matches[1].at if len(matches) > 1 else end


def _letters(text: str, at: int, *, inside: int | None) -> tuple[list[LayoutLetter], int]:
    """Read letters from ``at`` to the end, or to the parenthesis that closes the one at ``inside``."""
    result: list[LayoutLetter] = []
    while at < len(text):
        c = text[at]
        if c == ",":
            at += 1
            continue
        if c == ")" and inside is not None:
            return result, at
        if c == "(":
            if inside is not None:
                raise LayoutError("nested parentheses, which Megatron-LM does not read", at)
            letters, closing = _letters(text, at + 1, inside=at)
            if closing == len(text):
                raise LayoutError("the parenthesis that opens here is not closed", at)
            if not letters:
                raise LayoutError("the parentheses are empty", at, closing)
            at, first = closing + 1, at
            if not text.startswith("*", at):
                raise LayoutError(
                    "parentheses without a following `*n`, which Megatron-LM does not read", first, closing
                )
        elif c in LETTERS or c == "|":
            letters, at = [LayoutLetter(c, at)], at + 1
        else:
            near = {"e": "E", "T": "t", "M": "m", "l": "L"}.get(c)
            suggestion = f"did you mean `{near}`?" if near else None
            raise LayoutError(f"`{c}` is none of E, t, m, L, `|`, parentheses and `*n`", at, help=suggestion)
        times, at = _times(text, at)
        if len(result) + len(letters) * times > MAX_LETTERS:
            raise LayoutError(f"more than {MAX_LETTERS} layers and bars", at - 1)
        result += letters * times
    return result, at


def _times(text: str, at: int) -> tuple[int, int]:
    """Return the number after ``*``, 1 without one, and the index of its end."""
    if not text.startswith("*", at):
        return 1, at
    match = _NUMBER.match(text, at)
    if match is None:
        raise LayoutError("a number must follow `*`", at)
    if len(match.group(1)) > len(str(MAX_LETTERS)):
        raise LayoutError(f"a number of more than {len(str(MAX_LETTERS))} digits", at + 1, match.end() - 1)
    if match.end() < len(text) and text[match.end()] == "*":
        raise LayoutError("a second `*` follows the number", match.end())
    return int(match.group(1)), match.end()
