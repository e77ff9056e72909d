"""The pipeline layout string of Megatron-LM, such as ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer layer, ``m`` a module of multi-token
prediction, ``L`` the loss with the norm and the head before it. ``|`` parts
stages, ``x*n`` repeats a letter (or a bar), ``(..)*n`` what is in parentheses,
commas mean nothing. Stage ``s`` is chunk ``s // pp`` of pipeline rank
``s % pp`` (Megatron-LM, docs/user-guide/features/pipeline_parallel_layout.md
and megatron/core/transformer/pipeline_parallel_layer_layout.py). Here the whole
string must be of this grammar; Megatron-LM reads it by two replacements, which
let some nonsense pass.

    layout = { item | "," } ;
    item   = ( unit | "(" , unit , { unit | "," } , ")" ) , [ "*" , number ] ;
    unit   = "E" | "t" | "m" | "L" | "|" , [ "*" , number ] ;
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
class Placed:
    """A letter of the layout, and at which character of the string (from 0) it was written."""

    letter: str
    at: int


class LayoutError(ValueError):
    """A string that is no layout, with the characters (from 0, the last inclusive) at fault."""

    def __init__(self, message: str, at: int, last: int | None = None, help: str | None = None) -> None:
        super().__init__(message)
        self.at = at
        self.last = at if last is None else last
        self.help = help


def parse_layout(text: str) -> tuple[tuple[Placed, ...], ...]:
    """The letters of each global stage, in order.

    Raises:
        LayoutError: the string is not of the grammar.
    """
    flat, at = _units(text, 0, inside=None)
    assert at == len(text), "all of it is read, or an error was raised"
    stages: list[list[Placed]] = [[]]
    for unit in flat:
        if unit.letter == "|":
            stages.append([])
        else:
            stages[-1].append(unit)
    return tuple(tuple(stage) for stage in stages)


def check_layout(
    stages: tuple[tuple[Placed, ...], ...], *, num_layers: int, num_mtp: int, pp: int, length: int
) -> None:
    """What Megatron-LM asks of a layout, and that no stage is empty, which plans do not have.

    ``length`` is that of the string, for the place of what is missing.

    Raises:
        LayoutError: the first thing that is wrong.
    """
    flat = [unit for stage in stages for unit in stage]
    end = max(length - 1, 0)
    for letter, what, expected in (("E", "embedding", 1), ("L", "loss", 1)):
        found = [unit for unit in flat if unit.letter == letter]
        if len(found) != expected:
            raise LayoutError(f"the {what} `{letter}` stands {len(found)} times, and must stand once", *_at(found, end))
    if flat[0].letter != "E":
        raise LayoutError(f"the layout begins with `{flat[0].letter}`, and the embedding `E` must be first", flat[0].at)
    if flat[-1].letter != "L":
        raise LayoutError(f"the layout ends with `{flat[-1].letter}`, and the loss `L` must be last", flat[-1].at)
    for letter, flag, expected in (("t", "--num-layers", num_layers), ("m", "--mtp-num-layers", num_mtp)):
        count = sum(unit.letter == letter for unit in flat)
        if count != expected:
            raise LayoutError(f"the layout has {count} `{letter}`, and {flag} is {expected}", 0, end)
    modules = [index for index, unit in enumerate(flat) if unit.letter == "m"]
    late = next((unit for unit in flat[modules[0] :] if unit.letter == "t"), None) if modules else None
    if late is not None:
        raise LayoutError("a transformer layer stands behind a module `m`, which must come after all of them", late.at)
    if len(stages) % pp:
        raise LayoutError(
            f"the layout has {len(stages)} stages, which do not divide by --pipeline-model-parallel-size {pp}", 0, end
        )
    holders = {index for index, stage in enumerate(stages) if any(unit.letter == "m" for unit in stage)}
    if len(holders) > 1 or (holders and min(holders) < len(stages) - pp):
        at = flat[modules[0]].at
        raise LayoutError("all modules `m` must stand in one stage, in the last chunk of its pipeline rank", at)
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        before = max((unit.at for stage in stages[:empty] for unit in stage), default=-1)
        raise LayoutError(
            f"stage {empty} has no layer, and a plan's stages have one at least",
            min(before + 1, end),
            help="Megatron-LM runs such a layout; move a layer to that stage to have it proved",
        )


def _at(found: list[Placed], end: int) -> tuple[int]:
    return (found[1].at if len(found) > 1 else end,)


def _units(text: str, at: int, *, inside: int | None) -> tuple[list[Placed], int]:
    """Units from ``at`` to the end, or to the parenthesis that closes the one at ``inside``."""
    found: list[Placed] = []
    while at < len(text):
        c = text[at]
        if c == ",":
            at += 1
            continue
        if c == ")" and inside is not None:
            return found, at
        if c == "(":
            if inside is not None:
                raise LayoutError("parentheses stand in parentheses, which Megatron-LM does not read", at)
            units, closing = _units(text, at + 1, inside=at)
            if closing == len(text):
                raise LayoutError("the parenthesis that opens here is not closed", at)
            if not units:
                raise LayoutError("nothing stands in the parentheses", at, closing)
            at, first = closing + 1, at
            if not text.startswith("*", at):
                raise LayoutError(
                    "parentheses without `*n` behind them, which Megatron-LM does not read", first, closing
                )
        elif c in LETTERS or c == "|":
            units, at = [Placed(c, at)], at + 1
        else:
            near = {"e": "E", "T": "t", "M": "m", "l": "L"}.get(c)
            mend = f"did you mean `{near}`?" if near else None
            raise LayoutError(f"`{c}` is none of E, t, m, L, `|`, parentheses and `*n`", at, help=mend)
        times, at = _times(text, at)
        if len(found) + len(units) * times > MAX_LETTERS:
            raise LayoutError(f"more than {MAX_LETTERS} layers and bars", at - 1)
        found += units * times
    return found, at


def _times(text: str, at: int) -> tuple[int, int]:
    """The number behind ``*``, 1 without one, and where it ends."""
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
